package vllm

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"strconv"
)

// decodeRoutedExperts reads base64 of a .npy file: an array of integers [tokens][layers][top]. The layers of dense ones
// are all zero.
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

// encodeRoutedExperts undoes decodeRoutedExperts, with elements of four bytes.
func encodeRoutedExperts(ids []int32, layers, top int) string {
	return base64.StdEncoding.EncodeToString(writeArray(ids, layers, top))
}

// writeArray writes a .npy file of format 1.0. Its data begins at a multiple of 64 bytes, as readers that map it want.
func writeArray(ids []int32, layers, top int) []byte {
	header := fmt.Sprintf("{'descr': '<i4', 'fortran_order': False, 'shape': (%d, %d, %d), }", len(ids)/max(1, layers*top), layers, top)
	begin := len(arrayMagic) + 4 // the version and the header's length
	length := (begin+len(header)+1+63)/64*64 - begin
	file := append(bytes.Clone(arrayMagic), 1, 0)
	file = binary.LittleEndian.AppendUint16(file, uint16(length))
	file = append(file, header...)
	file = append(file, bytes.Repeat([]byte{' '}, length-len(header)-1)...)
	file = append(file, '\n')
	for _, id := range ids {
		file = binary.LittleEndian.AppendUint32(file, uint32(id))
	}
	return file
}

// arrayMagic begins every .npy file; the major version follows, the minor one, the length of the header, and the header:
// the literal of a dictionary.
var arrayMagic = []byte("\x93NUMPY")

// The members of the header, in any order.
var (
	typeMember  = regexp.MustCompile(`'descr':\s*'([<>|=])([iu])([1248])'`)
	orderMember = regexp.MustCompile(`'fortran_order':\s*(True|False)`)
	shapeMember = regexp.MustCompile(`'shape':\s*\((\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9}),?\s*\)`)
)

// readArray reads an array of integers of any width with the shape [any][layers][top] from a .npy file. It allocates no
// more than four bytes for each byte of the file.
func readArray(file []byte, layers, top int) ([]int32, error) {
	header, data, err := splitHeader(file)
	if err != nil {
		return nil, err
	}
	kind, order, shape := typeMember.FindSubmatch(header), orderMember.FindSubmatch(header), shapeMember.FindSubmatch(header)
	switch {
	case kind == nil || order == nil || shape == nil:
		return nil, fmt.Errorf("%.80q is no header of an array of integers with three dimensions", header)
	case string(order[1]) != "False":
		return nil, fmt.Errorf("the array is in Fortran order: C order is needed")
	case string(kind[1]) == ">":
		return nil, fmt.Errorf("the array is big-endian: little-endian is needed")
	}
	width := int(kind[3][0] - '0')
	var dimensions [3]int
	for i := range dimensions {
		dimensions[i], _ = strconv.Atoi(string(shape[i+1])) // nine digits at most
	}
	if dimensions[1] != layers || dimensions[2] != top {
		return nil, fmt.Errorf("the array has shape %v; the model has %d layers and %d experts per token", dimensions, layers, top)
	}
	// The file bounds the first dimension, so that the product cannot overflow.
	row := layers * top * width
	if row <= 0 || dimensions[0] > len(data)/row || dimensions[0]*row != len(data) {
		return nil, fmt.Errorf("%d bytes of data do not make an array of shape %v with %d bytes an element", len(data), dimensions, width)
	}
	return widen(data, width, kind[2][0] == 'i')
}

// splitHeader splits a file of format 1.0 (a length of two bytes), 2.0 or 3.0 (of four).
func splitHeader(file []byte) (header, data []byte, err error) {
	rest, ok := bytes.CutPrefix(file, arrayMagic)
	if !ok || len(rest) < 4 {
		return nil, nil, fmt.Errorf("%d bytes are no .npy file", len(file))
	}
	version, rest := rest[0], rest[2:]
	length := 0
	switch {
	case version == 1:
		length, rest = int(binary.LittleEndian.Uint16(rest)), rest[2:]
	case (version == 2 || version == 3) && len(rest) >= 4:
		length, rest = int(binary.LittleEndian.Uint32(rest)), rest[4:]
	default:
		return nil, nil, fmt.Errorf(".npy format %d is not known, or the file is cut off", version)
	}
	if length > len(rest) {
		return nil, nil, fmt.Errorf("the .npy file is cut off: its header has %d bytes, %d are there", length, len(rest))
	}
	return rest[:length], rest[length:], nil
}

// widen reads little-endian integers; one that int32 cannot hold is no expert's id.
func widen(data []byte, width int, signed bool) ([]int32, error) {
	ids := make([]int32, len(data)/width)
	for i := range ids {
		var raw [8]byte
		copy(raw[:], data[i*width:(i+1)*width])
		value := binary.LittleEndian.Uint64(raw[:])
		if signed { // the sign is the topmost bit of the width
			value = uint64(int64(value<<(64-8*width)) >> (64 - 8*width))
		}
		id := int64(value)
		if id < math.MinInt32 || id > math.MaxInt32 || !signed && id < 0 {
			return nil, fmt.Errorf("element %d is no id of an expert: int32 cannot hold it", i)
		}
		ids[i] = int32(id)
	}
	return ids, nil
}
