package embedding

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strconv"
)

// Table is a vector for each token id.
type Table struct {
	// Tokens and Size are the shape.
	Tokens, Size int
	// Values are the vectors [tokens × size].
	Values []float32
}

// InvalidError is a fault of the file: reading it again cannot help.
type InvalidError struct{ message string }

func (e *InvalidError) Error() string { return e.message }

func invalidf(format string, args ...any) error { return &InvalidError{fmt.Sprintf(format, args...)} }

// Open reads a table from a file in NumPy's format .npy, versions 1 to 3: two dimensions in C or Fortran order, little-endian
// float32 or float16. Errors name the file; a fault of its content is an *InvalidError.
func Open(path string) (*Table, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	t, err := Read(bufio.NewReaderSize(file, 1<<16))
	var invalid *InvalidError
	switch {
	case errors.As(err, &invalid):
		return nil, invalidf("%s: %s", path, invalid.message)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

const (
	magic = "\x93NUMPY"
	// maxHeader bounds the header's text; NumPy writes about a hundred bytes.
	maxHeader = 1 << 16
	// maxSide bounds either dimension, so that their product cannot overflow.
	maxSide = 1 << 24
)

// Read is Open for a stream.
func Read(in io.Reader) (*Table, error) {
	h, err := readHeader(in)
	if err != nil {
		return nil, err
	}
	values, err := h.readValues(in)
	if err != nil {
		return nil, err
	}
	if h.byColumn {
		rows := make([]float32, len(values))
		for i, v := range values {
			rows[i%h.tokens*h.size+i/h.tokens] = v
		}
		values = rows
	}
	return &Table{h.tokens, h.size, values}, nil
}

// header is what a file says about its values.
type header struct {
	wide, byColumn bool
	tokens, size   int
}

// readValues reads the values in the file's order, to its end.
func (h *header) readValues(in io.Reader) ([]float32, error) {
	bytesEach := 2
	if h.wide {
		bytesEach = 4
	}
	var values []float32
	chunk := make([]byte, 1<<16)
	total := h.tokens * h.size * bytesEach
	for left := total; left > 0; {
		part := chunk[:min(left, len(chunk))]
		left -= len(part)
		if _, err := io.ReadFull(in, part); err != nil {
			return nil, readError(err, "the values end early: shape (%d, %d) needs %d bytes", h.tokens, h.size, total)
		}
		for ; len(part) > 0; part = part[bytesEach:] {
			v := h.value(part)
			if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
				return nil, invalidf("value %d is %v; allowed is any finite number", len(values), v)
			}
			values = append(values, v)
		}
	}
	if n, err := io.ReadFull(in, chunk[:1]); n > 0 {
		return nil, invalidf("bytes follow the values of shape (%d, %d)", h.tokens, h.size)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return values, nil
}

func (h *header) value(of []byte) float32 {
	if h.wide {
		return math.Float32frombits(binary.LittleEndian.Uint32(of))
	}
	return half(binary.LittleEndian.Uint16(of))
}

// readError tells a file that ends early from one that cannot be read.
func readError(err error, format string, args ...any) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return invalidf(format, args...)
	}
	return err
}

var (
	headerType  = regexp.MustCompile(`'descr'\s*:\s*'([^']*)'`)
	headerOrder = regexp.MustCompile(`'fortran_order'\s*:\s*(True|False)`)
	headerShape = regexp.MustCompile(`'shape'\s*:\s*\(\s*(\d+)\s*,\s*(\d+)\s*,?\s*\)`)
)

func readHeader(in io.Reader) (*header, error) {
	start := make([]byte, len(magic)+2)
	if _, err := io.ReadFull(in, start); err != nil {
		return nil, readError(err, "it is shorter than the start of a .npy file")
	}
	if !bytes.HasPrefix(start, []byte(magic)) {
		return nil, invalidf("it does not begin like a .npy file")
	}
	width := 2
	switch version := start[len(magic)]; version {
	case 1:
	case 2, 3:
		width = 4
	default:
		return nil, invalidf("it has version %d of the .npy format; allowed is 1, 2, 3", version)
	}
	field := make([]byte, 4)
	if _, err := io.ReadFull(in, field[:width]); err != nil {
		return nil, readError(err, "it ends in the header")
	}
	length := binary.LittleEndian.Uint32(field)
	if length > maxHeader {
		return nil, invalidf("its header has %d bytes; allowed is at most %d", length, maxHeader)
	}
	text := make([]byte, length)
	if _, err := io.ReadFull(in, text); err != nil {
		return nil, readError(err, "it ends in the header")
	}
	return parseHeader(text)
}

func parseHeader(text []byte) (*header, error) {
	descr, order, shape := headerType.FindSubmatch(text), headerOrder.FindSubmatch(text), headerShape.FindSubmatch(text)
	switch {
	case descr == nil || string(descr[1]) != "<f4" && string(descr[1]) != "<f2":
		return nil, invalidf("its header is %q; allowed as descr is <f4, <f2", text)
	case order == nil:
		return nil, invalidf("its header is %q; fortran_order must be True or False", text)
	case shape == nil:
		return nil, invalidf("its header is %q; shape must have two dimensions: tokens and values of each", text)
	}
	tokens, errTokens := strconv.Atoi(string(shape[1]))
	size, errSize := strconv.Atoi(string(shape[2]))
	if errTokens != nil || errSize != nil || tokens < 1 || size < 1 || tokens > maxSide || size > maxSide {
		return nil, invalidf("its shape is (%s, %s); allowed is 1 to %d each", shape[1], shape[2], maxSide)
	}
	return &header{string(descr[1]) == "<f4", string(order[1]) == "True", tokens, size}, nil
}

// half converts an IEEE 754 binary16.
func half(bits uint16) float32 {
	sign, exponent, fraction := uint32(bits>>15)<<31, int(bits>>10&0x1f), uint32(bits&0x3ff)
	switch exponent {
	case 0:
		// A subnormal number: fraction · 2⁻²⁴.
		v := float32(fraction) * (1.0 / (1 << 24))
		return math.Float32frombits(sign | math.Float32bits(v))
	case 0x1f:
		return math.Float32frombits(sign | 0xff<<23 | fraction<<13)
	default:
		return math.Float32frombits(sign | uint32(exponent-15+127)<<23 | fraction<<13)
	}
}
