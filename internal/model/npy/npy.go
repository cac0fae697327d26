// SPDX-License-Identifier: Apache-2.0

// Package npy reads and writes matrices of floating-point numbers in NumPy's .npy files. A file consists of a magic
// number, a header with a Python dictionary literal, and the values in row-major or, if the header says so,
// column-major order.
//
// Invariant: allocations are bounded by the size of the file, regardless of its header.
package npy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

const (
	magic = "\x93NUMPY"
	// maxHeader is the maximum size of the header. A matrix needs about a hundred bytes.
	maxHeader = 64 << 10
	// maxBytes is the maximum size of the values: a vocabulary of 256 Ki tokens with 8,192 numbers of 4 bytes each.
	maxBytes = 8 << 30
)

var (
	descr   = regexp.MustCompile(`'descr'\s*:\s*'([^']*)'`)
	fortran = regexp.MustCompile(`'fortran_order'\s*:\s*(True|False)`)
	shape   = regexp.MustCompile(`'shape'\s*:\s*\(\s*(\d+)\s*,\s*(\d+)\s*,?\s*\)`)
	dtypes  = map[string]checkpoint.DType{"<f2": checkpoint.F16, "<f4": checkpoint.F32}
)

// Matrix is a matrix in row-major order.
type Matrix struct {
	Rows, Columns int
	Values        []float32
}

// Open reads the matrix of little-endian float16 or float32 numbers in a file. An invalid file returns an error of
// checkpoint.Invalidf that names the file.
func Open(path string) (*Matrix, error) {
	file, err := regularfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	m, err := Read(file, info.Size())
	if checkpoint.IsInvalid(err) {
		return nil, checkpoint.Invalidf("%s: %v", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

// Read reads a matrix from a file of the given size. An invalid file returns an error of checkpoint.Invalidf.
func Read(r io.Reader, size int64) (*Matrix, error) {
	header, length, err := readHeader(r, size)
	if err != nil {
		return nil, err
	}
	m, dtype, byColumn, err := parseHeader(header)
	if err != nil {
		return nil, err
	}
	width := int64(4)
	if dtype == checkpoint.F16 {
		width = 2
	}
	want := int64(m.Rows) * int64(m.Columns) * width
	switch {
	case want > maxBytes:
		return nil, checkpoint.Invalidf("shape (%d, %d) needs %d bytes; the maximum is %d", m.Rows, m.Columns, want, int64(maxBytes))
	case want != size-length:
		return nil, checkpoint.Invalidf("shape (%d, %d) needs %d bytes after the header, the file has %d", m.Rows, m.Columns, want, size-length)
	}
	raw := make([]byte, want)
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, err
	}
	m.Values = make([]float32, m.Rows*m.Columns)
	checkpoint.DecodeFloat32(m.Values, raw, dtype)
	if byColumn {
		m.transpose()
	}
	for i, v := range m.Values {
		if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
			return nil, checkpoint.Invalidf("row %d, column %d is %v; every number must be finite", i/m.Columns, i%m.Columns, v)
		}
	}
	return m, nil
}

// readHeader returns the header's dictionary and the number of bytes before the values.
func readHeader(r io.Reader, size int64) (header []byte, length int64, err error) {
	short := func() error { return checkpoint.Invalidf("is truncated, or not a .npy file: it has %d bytes", size) }
	prefix := make([]byte, 12)
	if size < int64(len(prefix)) {
		return nil, 0, short()
	}
	if _, err := io.ReadFull(r, prefix[:10]); err != nil {
		return nil, 0, err
	}
	if !bytes.HasPrefix(prefix, []byte(magic)) {
		return nil, 0, checkpoint.Invalidf("is not a .npy file: it begins with %q", prefix[:len(magic)])
	}
	length = 10
	n := int64(binary.LittleEndian.Uint16(prefix[8:]))
	switch version := prefix[6]; version {
	case 1:
	case 2, 3:
		if _, err := io.ReadFull(r, prefix[10:]); err != nil {
			return nil, 0, err
		}
		length, n = 12, int64(binary.LittleEndian.Uint32(prefix[8:]))
	default:
		return nil, 0, checkpoint.Invalidf("has version %d of the .npy format; allowed is 1 to 3", version)
	}
	if n > maxHeader {
		return nil, 0, checkpoint.Invalidf("has a header of %d bytes; the maximum is %d", n, maxHeader)
	}
	if length+n > size {
		return nil, 0, short()
	}
	header = make([]byte, n)
	_, err = io.ReadFull(r, header)
	return header, length + n, err
}

// transpose converts column-major values to row-major order.
func (m *Matrix) transpose() {
	values := make([]float32, len(m.Values))
	for row := range m.Rows {
		for column := range m.Columns {
			values[row*m.Columns+column] = m.Values[column*m.Rows+row]
		}
	}
	m.Values = values
}

func parseHeader(header []byte) (m *Matrix, dtype checkpoint.DType, byColumn bool, err error) {
	d, f, s := descr.FindSubmatch(header), fortran.FindSubmatch(header), shape.FindSubmatch(header)
	switch {
	case d == nil || f == nil:
		return nil, "", false, checkpoint.Invalidf("header %.100q has no descr or no fortran_order", header)
	case dtypes[string(d[1])] == "":
		return nil, "", false, checkpoint.Invalidf("descr is %.20q; allowed is '<f2' (float16), '<f4' (float32)", d[1])
	case s == nil:
		return nil, "", false, checkpoint.Invalidf("header %.100q: the shape must have two dimensions", header)
	}
	rows, rowsErr := strconv.ParseInt(string(s[1]), 10, 31)
	columns, columnsErr := strconv.ParseInt(string(s[2]), 10, 31)
	if rowsErr != nil || columnsErr != nil || rows < 1 || columns < 1 {
		return nil, "", false, checkpoint.Invalidf("shape (%.20s, %.20s): both must be positive numbers below 2^30", s[1], s[2])
	}
	return &Matrix{Rows: int(rows), Columns: int(columns)}, dtypes[string(d[1])], string(f[1]) == "True", nil
}

// WriteFloat16 writes a matrix as float16 numbers, rounded to the nearest even one.
func WriteFloat16(w io.Writer, m *Matrix) error {
	header := fmt.Sprintf("{'descr': '<f2', 'fortran_order': False, 'shape': (%d, %d), }", m.Rows, m.Columns)
	const prefix, alignment = 10, 64 // the values of a file begin at a multiple of 64
	header += strings.Repeat(" ", alignment-1-(prefix+len(header))%alignment) + "\n"
	out := bufio.NewWriter(w)
	out.WriteString(magic + "\x01\x00")
	out.Write(binary.LittleEndian.AppendUint16(nil, uint16(len(header))))
	out.WriteString(header)
	var number [2]byte
	for _, v := range m.Values {
		binary.LittleEndian.PutUint16(number[:], float16(v))
		out.Write(number[:])
	}
	return out.Flush() // the first error of all writes
}

// float16 converts a number to an IEEE 754 binary16 value. Numbers above the largest one become infinite.
func float16(v float32) uint16 {
	const (
		largest  = 65520   // numbers from here on round to infinity
		smallest = 1 << 14 // times this, the smallest normal number is 1
		steps    = 1 << 24 // the steps of subnormal numbers in 1
	)
	bits := math.Float32bits(v)
	sign, magnitude := uint16(bits>>16)&0x8000, math.Float32frombits(bits&^(1<<31))
	switch {
	case magnitude != magnitude:
		return sign | 0x7e00
	case magnitude >= largest:
		return sign | 0x7c00
	case magnitude*smallest < 1:
		return sign | uint16(math.RoundToEven(float64(magnitude)*steps))
	}
	bits = math.Float32bits(magnitude) - (127-15)<<23
	bits += 0xfff + bits>>13&1 // round to the nearest even number; a carry increases the exponent
	return sign | uint16(bits>>13)
}
