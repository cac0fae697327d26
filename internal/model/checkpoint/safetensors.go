// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// maxHeaderBytes is the format's maximum size of the JSON header. It prevents large allocations for a corrupt length.
const maxHeaderBytes = 100_000_000

// Tensor is one tensor of a safetensors file.
type Tensor struct {
	DType DType
	// Shape is row-major; an empty shape is a scalar.
	Shape []int64
	// Begin and End are the byte range of the data, relative to the end of the header.
	Begin, End int64
}

// Elements is the product of the shape.
func (t Tensor) Elements() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Header is the parsed header of a safetensors file.
type Header struct {
	Tensors  map[string]Tensor
	Metadata map[string]string
}

// Names returns the tensor names ordered by offset.
func (h *Header) Names() []string {
	type entry struct {
		begin, end int64
		name       string
	}
	entries := make([]entry, 0, len(h.Tensors))
	for name, t := range h.Tensors {
		entries = append(entries, entry{t.Begin, t.End, name})
	}
	slices.SortFunc(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end), cmp.Compare(a.name, b.name))
	})
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.name
	}
	return names
}

// DataBytes returns the size of the data section. By the format, it is the end of the last tensor.
func (h *Header) DataBytes() int64 {
	var end int64
	for _, t := range h.Tensors {
		end = max(end, t.End)
	}
	return end
}

// ParseHeader parses the JSON header of a safetensors file, without the eight length bytes. It requires known dtypes,
// byte ranges of length shape times dtype, and contiguous ranges from zero. Errors are *InvalidError and name the
// tensor.
func ParseHeader(text []byte) (*Header, error) { return parseHeader(bytes.NewReader(text)) }

// parseHeader parses a header that is read part by part, because its text is larger than the result.
func parseHeader(text io.Reader) (*Header, error) {
	h := &Header{Tensors: map[string]Tensor{}}
	decoder := json.NewDecoder(text)
	if open, err := decoder.Token(); err != nil || open != json.Delim('{') {
		return nil, Invalidf("header is not a JSON object")
	}
	var last Tensor
	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			return nil, Invalidf("header is not valid JSON: %v", err)
		}
		if err := h.add(key.(string), decoder, &last); err != nil {
			return nil, err
		}
	}
	if _, err := decoder.Token(); err != nil {
		return nil, Invalidf("header is not valid JSON: %v", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, Invalidf("header has text after the JSON object")
	}
	return h, h.checkRanges()
}

// add decodes the value of one key of the header. A repeated key is an error, because readers disagree on which value
// applies. Hundreds of thousands of tensors have few distinct types and shapes, so equal consecutive values share
// memory.
func (h *Header) add(name string, decoder *json.Decoder, last *Tensor) error {
	if name == "__metadata__" {
		if h.Metadata != nil {
			return Invalidf("header has __metadata__ twice")
		}
		if err := decoder.Decode(&h.Metadata); err != nil {
			return Invalidf("__metadata__ is not a map of strings: %v", err)
		}
		return nil
	}
	if _, twice := h.Tensors[name]; twice {
		return Invalidf("tensor %q appears twice in the header", name)
	}
	var entry struct {
		DType   DType    `json:"dtype"`
		Shape   *[]int64 `json:"shape"`
		Offsets *[]int64 `json:"data_offsets"`
	}
	if err := decoder.Decode(&entry); err != nil {
		return Invalidf("tensor %q: %v", name, err)
	}
	if entry.Shape == nil || entry.Offsets == nil || len(*entry.Offsets) != 2 {
		return Invalidf("tensor %q needs dtype, shape and data_offsets [begin, end]", name)
	}
	tensor := Tensor{DType: entry.DType, Shape: *entry.Shape, Begin: (*entry.Offsets)[0], End: (*entry.Offsets)[1]}
	if last.DType == tensor.DType {
		tensor.DType = last.DType
		if slices.Equal(last.Shape, tensor.Shape) {
			tensor.Shape = last.Shape
		}
	}
	*last = tensor
	if err := tensor.check(); err != nil {
		return Invalidf("tensor %q: %v", name, err)
	}
	h.Tensors[name] = tensor
	return nil
}

func (t Tensor) check() error {
	width, known := dtypeBits[t.DType]
	if !known {
		return fmt.Errorf("unknown dtype %q", t.DType)
	}
	if t.Begin < 0 || t.End < t.Begin {
		return fmt.Errorf("data_offsets [%d, %d] are not an ascending range", t.Begin, t.End)
	}
	total := uint64(width)
	for _, d := range t.Shape {
		if d < 0 {
			return fmt.Errorf("shape %v has a negative dimension", t.Shape)
		}
		high, low := bits.Mul64(total, uint64(d))
		if high != 0 || low > math.MaxInt64 {
			return fmt.Errorf("shape %v of %s overflows 64 bits", t.Shape, t.DType)
		}
		total = low
	}
	if total%8 != 0 || int64(total/8) != t.End-t.Begin {
		return fmt.Errorf("shape %v of %s needs %d bits, data_offsets [%d, %d] hold %d bytes",
			t.Shape, t.DType, total, t.Begin, t.End, t.End-t.Begin)
	}
	return nil
}

// checkRanges requires that the tensors, in offset order, cover the data section without overlaps and holes, as the
// format does. A rewrite would lose or duplicate bytes that belong to no tensor or to two tensors.
func (h *Header) checkRanges() error {
	names := h.Names()
	var end int64
	for i, name := range names {
		t := h.Tensors[name]
		switch {
		case t.Begin < end:
			return Invalidf("tensor %q at [%d, %d] overlaps tensor %q, which ends at %d", name, t.Begin, t.End, names[i-1], end)
		case t.Begin > end:
			return Invalidf("tensor %q begins at %d, the data before it ends at %d: a hole", name, t.Begin, end)
		}
		end = t.End
	}
	return nil
}

// File is an open safetensors file with a header that matches its size. It is safe for concurrent reads.
type File struct {
	Header
	// Path is the path of the file. Size is its size in bytes.
	Path string
	Size int64
	// HeaderText is the JSON header as stored, including padding. It is nil in a checkpoint and in a file that OpenHeader
	// opened: see ReadHeaderText.
	HeaderText  []byte
	headerBytes int64
	file        *os.File
}

// OpenFile opens a safetensors file and reads its header.
func OpenFile(path string) (*File, error) {
	f, err := OpenHeader(path)
	if err != nil {
		return nil, err
	}
	if f.HeaderText, err = f.ReadHeaderText(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// OpenHeader opens a safetensors file and reads its header, but does not keep its text.
func OpenHeader(path string) (*File, error) { return openFile(path, io.Discard) }

// openFile opens a safetensors file and reads its header. It writes the length bytes and the text of the header to
// framed.
func openFile(path string, framed io.Writer) (*File, error) {
	file, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	f := &File{Path: path, file: file}
	if err := f.readHeader(framed); err != nil {
		file.Close()
		return nil, err
	}
	return f, nil
}

// Name returns the base name of the file.
func (f *File) Name() string { return filepath.Base(f.Path) }

// Handle returns the open file, for positioned reads and for copies inside the kernel.
func (f *File) Handle() *os.File { return f.file }

// DataStart returns the offset of the data section in the file. The byte ranges of tensors are relative to it.
func (f *File) DataStart() int64 { return 8 + f.headerBytes }

// HeaderBytes returns the length of the JSON header as stored, including padding.
func (f *File) HeaderBytes() int { return int(f.headerBytes) }

// ReadHeaderText reads the JSON header again.
func (f *File) ReadHeaderText() ([]byte, error) {
	text, err := readHeaderText(f.file, f.Size)
	if err == nil && len(text) != f.HeaderBytes() {
		err = Invalidf("the header has changed since the file was opened")
	}
	if err != nil {
		return nil, f.wrap(err)
	}
	return text, nil
}

// Close closes the file.
func (f *File) Close() error { return f.file.Close() }

func (f *File) readHeader(framed io.Writer) error {
	info, err := f.file.Stat()
	if err != nil {
		return classify("safetensors file", f.Path, err)
	}
	f.Size = info.Size()
	length, err := readHeaderLength(f.file, f.Size)
	if err != nil {
		return f.wrap(err)
	}
	if _, err := framed.Write(binary.LittleEndian.AppendUint64(nil, uint64(length))); err != nil {
		return err
	}
	text := &failingReader{Reader: io.TeeReader(io.NewSectionReader(f.file, 8, length), framed)}
	header, err := parseHeader(text)
	if err := cmp.Or(text.err, err); err != nil {
		return f.wrap(err)
	}
	if want := 8 + length + header.DataBytes(); want != f.Size {
		problem := "is truncated"
		if f.Size > want {
			problem = "has extra bytes at the end"
		}
		return Invalidf("%s %s: it has %d bytes, its header needs %d: fetch the file again", f.Path, problem, f.Size, want)
	}
	f.Header, f.headerBytes = *header, length
	return nil
}

// failingReader remembers the error of a read, which another read may not have, so that it is not taken for an invalid
// header.
type failingReader struct {
	io.Reader
	err error
}

func (r *failingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

// openRegular opens a regular file. It refuses a FIFO, a device or a socket without opening it, because opening a FIFO
// blocks.
func openRegular(path string) (*os.File, error) {
	const what = "safetensors file"
	switch info, err := os.Stat(path); {
	case err != nil:
		return nil, classify(what, path, err)
	case !info.Mode().IsRegular():
		return nil, Invalidf("%s is not a regular file", path)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	return file, classify(what, path, err)
}

func (f *File) wrap(err error) error {
	if IsInvalid(err) {
		return Invalidf("%s: %v", f.Path, err)
	}
	return fmt.Errorf("%s: %w", f.Path, err)
}

// readHeaderText reads the JSON header of a file of the given size.
func readHeaderText(r io.ReaderAt, size int64) ([]byte, error) {
	length, err := readHeaderLength(r, size)
	if err != nil {
		return nil, err
	}
	text := make([]byte, length)
	_, err = r.ReadAt(text, 8)
	return text, err
}

// readHeaderLength reads the length of the JSON header of a file of the given size.
func readHeaderLength(r io.ReaderAt, size int64) (int64, error) {
	if size < 8 {
		return 0, Invalidf("a file of %d bytes is too short for safetensors, which begins with 8 length bytes", size)
	}
	var prefix [8]byte
	if _, err := r.ReadAt(prefix[:], 0); err != nil {
		return 0, err
	}
	length := binary.LittleEndian.Uint64(prefix[:])
	beginning := make([]byte, min(size, placeholderBytes))
	if _, err := r.ReadAt(beginning, 0); err != nil {
		return 0, err
	}
	if err := checkPlaceholder(beginning); err != nil {
		return 0, err
	}
	switch {
	case length > maxHeaderBytes:
		return 0, Invalidf("header length is %d bytes, the format allows at most %d: not a safetensors file, or corrupt", length, maxHeaderBytes)
	case int64(length) > size-8:
		return 0, Invalidf("is truncated: the header needs %d bytes, the file has %d: fetch the file again", 8+length, size)
	}
	return int64(length), nil
}

// Float32 reads a tensor of type BF16, F16 or F32 as float32 values in row-major order.
func (f *File) Float32(name string) ([]float32, error) {
	t, ok := f.Tensors[name]
	if !ok {
		return nil, Invalidf("%s: no tensor %q", f.Path, name)
	}
	if t.DType != BF16 && t.DType != F16 && t.DType != F32 {
		return nil, Invalidf("%s: tensor %q is %s; only BF16, F16 and F32 can be read as float32", f.Path, name, t.DType)
	}
	raw := make([]byte, t.End-t.Begin)
	if _, err := f.file.ReadAt(raw, f.DataStart()+t.Begin); err != nil {
		return nil, fmt.Errorf("%s: tensor %q: %w", f.Path, name, err)
	}
	values := make([]float32, t.Elements())
	DecodeFloat32(values, raw, t.DType)
	return values, nil
}
