// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"strconv"

	"github.com/semmoe/operator/internal/engine"
)

// decodeRoutedExperts decodes base64 of a .npy file: an array of integers [tokens][layers][top]. The values of dense
// layers are zero.
func decodeRoutedExperts(text string, layers, top int) ([]int32, error) {
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("routed experts: %w", err)
	}
	ids, err := readArray(data, layers, top)
	if err != nil {
		return nil, fmt.Errorf("routed experts: %w", err)
	}
	return ids, nil
}

// maxHeaderSearch is the maximum number of bytes that are searched for the end of the header. Real headers have a few
// hundred bytes.
const maxHeaderSearch = 64 << 10

// renumberRoutedExperts returns an editor of the format that decodeRoutedExperts reads. The width of the elements does
// not change.
func renumberRoutedExperts(layers, top int, logical engine.Logical) engine.TextEditor {
	r := &renumberer{layers: layers, top: top, logical: logical}
	return engine.EditBase64(r.edit)
}

// renumberer edits a .npy file that arrives in pieces.
type renumberer struct {
	layers, top int
	logical     engine.Logical
	// array is the parsed header. It is nil until the header is complete. at is the index of the next element.
	array *integers
	at    int
}

func (r *renumberer) edit(data []byte, end bool) (done int, err error) {
	if r.array == nil {
		header, rest, err := splitHeader(data)
		if err != nil && !end && len(data) < maxHeaderSearch {
			return 0, nil // the header is incomplete
		}
		if err == nil {
			r.array, err = readHeader(header, r.layers, r.top)
		}
		if err != nil {
			return 0, err
		}
		done = len(data) - len(rest)
	}
	for width := r.array.width; done+width <= len(data); done += width {
		if err := r.renumber(data[done : done+width]); err != nil {
			return 0, err
		}
	}
	if size := r.at*r.array.width + len(data) - done; end && size != r.array.bytes() {
		return 0, r.array.wrongSize(size)
	}
	return done, nil
}

// renumber edits the next element.
func (r *renumberer) renumber(raw []byte) error {
	id, ok := r.array.integer(raw)
	if !ok {
		return notExpertID(r.at)
	}
	logical := r.logical(r.at/r.top%r.layers, id)
	var wide [8]byte
	binary.LittleEndian.PutUint64(wide[:], uint64(int64(logical)))
	copy(raw, wide[:])
	if written, ok := r.array.integer(raw); !ok || written != logical {
		return fmt.Errorf("element %d becomes %d, which %d bytes cannot hold", r.at, logical, len(raw))
	}
	r.at++
	return nil
}

// arrayMagic is the beginning of every .npy file. It is followed by the major version, the minor version, the length of
// the header, and the header, which is a dictionary literal.
var arrayMagic = []byte("\x93NUMPY")

// The members of the header, in any order.
var (
	typeMember  = regexp.MustCompile(`'descr':\s*'([<>|=])([iu])([1248])'`)
	orderMember = regexp.MustCompile(`'fortran_order':\s*(True|False)`)
	shapeMember = regexp.MustCompile(`'shape':\s*\((\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9}),?\s*\)`)
)

// integers is the parsed header of an array of integers.
type integers struct {
	width  int
	signed bool
	shape  [3]int
}

// bytes returns the length of the array's data.
func (a *integers) bytes() int {
	row := a.shape[1] * a.shape[2] * a.width // at most nine digits each
	if a.shape[0] > math.MaxInt/row {
		return math.MaxInt // longer than any data
	}
	return a.shape[0] * row
}

func (a *integers) wrongSize(bytes int) error {
	return fmt.Errorf("%d bytes of data do not match an array of shape %v with %d bytes per element", bytes, a.shape, a.width)
}

// readArray decodes an array of integers of any width with the shape [any][layers][top] from a .npy file. It allocates
// at most four bytes for each byte of the file.
func readArray(file []byte, layers, top int) ([]int32, error) {
	header, data, err := splitHeader(file)
	if err != nil {
		return nil, err
	}
	a, err := readHeader(header, layers, top)
	if err != nil {
		return nil, err
	}
	if a.bytes() != len(data) {
		return nil, a.wrongSize(len(data))
	}
	return a.decode(data)
}

// readHeader parses the header of an array of integers with the shape [any][layers][top].
func readHeader(header []byte, layers, top int) (*integers, error) {
	kind, order, shape := typeMember.FindSubmatch(header), orderMember.FindSubmatch(header), shapeMember.FindSubmatch(header)
	switch {
	case kind == nil || order == nil || shape == nil:
		return nil, fmt.Errorf("%.80q is not the header of a three-dimensional array of integers", header)
	case string(order[1]) != "False":
		return nil, fmt.Errorf("the array is in Fortran order: C order is required")
	case string(kind[1]) == ">":
		return nil, fmt.Errorf("the array is big-endian: little-endian is required")
	}
	a := &integers{width: int(kind[3][0] - '0'), signed: kind[2][0] == 'i'}
	for i := range a.shape {
		a.shape[i], _ = strconv.Atoi(string(shape[i+1])) // at most nine digits
	}
	if a.shape[1] != layers || a.shape[2] != top || layers*top <= 0 {
		return nil, fmt.Errorf("the array has shape %v; the model has %d layers and %d experts per token", a.shape, layers, top)
	}
	return a, nil
}

// splitHeader splits a file of format 1.0 (with a length of two bytes), 2.0 or 3.0 (four bytes) into header and data.
func splitHeader(file []byte) (header, data []byte, err error) {
	rest, ok := bytes.CutPrefix(file, arrayMagic)
	if !ok || len(rest) < 4 {
		return nil, nil, fmt.Errorf("%d bytes are not a .npy file", len(file))
	}
	version, rest := rest[0], rest[2:]
	length := 0
	switch {
	case version == 1:
		length, rest = int(binary.LittleEndian.Uint16(rest)), rest[2:]
	case (version == 2 || version == 3) && len(rest) >= 4:
		length, rest = int(binary.LittleEndian.Uint32(rest)), rest[4:]
	default:
		return nil, nil, fmt.Errorf(".npy format %d is not supported, or the file is truncated", version)
	}
	if length > len(rest) {
		return nil, nil, fmt.Errorf("the .npy file is truncated: its header has %d bytes, the file contains only %d of them", length, len(rest))
	}
	return rest[:length], rest[length:], nil
}

// decode decodes the array's data.
func (a *integers) decode(data []byte) ([]int32, error) {
	ids := make([]int32, len(data)/a.width)
	for i := range ids {
		var ok bool
		if ids[i], ok = a.integer(data[i*a.width : (i+1)*a.width]); !ok {
			return nil, notExpertID(i)
		}
	}
	return ids, nil
}

// integer decodes a little-endian integer. ok is false if the value does not fit int32, which no expert id exceeds.
func (a *integers) integer(element []byte) (id int32, ok bool) {
	var raw [8]byte
	copy(raw[:], element)
	value := binary.LittleEndian.Uint64(raw[:])
	if a.signed { // the sign is the highest bit of the element
		value = uint64(int64(value<<(64-8*a.width)) >> (64 - 8*a.width))
	}
	wide := int64(value)
	return int32(wide), wide >= math.MinInt32 && wide <= math.MaxInt32 && (a.signed || wide >= 0)
}

func notExpertID(element int) error {
	return fmt.Errorf("element %d is not an expert id: it does not fit int32", element)
}
