// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"github.com/klauspost/compress/zstd"
)

// MaxBytes is the default limit on the uncompressed size of a trace, which keeps a small compressed file from filling
// the memory.
const MaxBytes = 32 << 30

// The maximum uncompressed size of a compressed trace is minExpanded plus maxRatio times its compressed size. Real
// traces expand 1 to 4 times, generated traces with few distinct rows hundreds of times.
const (
	minExpanded = 32 << 20
	maxRatio    = 200
)

// expertsTensor is the name of the tensor of activated experts.
const expertsTensor = "routed_experts"

// zstdMagic is the beginning of every zstd frame.
var zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// Open reads the trace in a file, plain or zstd-compressed; the format is detected from the content, not from the name.
// For an invalid file it returns an *InvalidError with the path.
func Open(ctx context.Context, path string) (*Trace, error) {
	file, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	t, err := Read(contextReader{ctx, file}, MaxBytes)
	if IsInvalid(err) {
		return nil, invalidf("%s: %v", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// openRegular opens a file for reading. It refuses named pipes, sockets and devices before it opens the path, because
// they block their reader. Package internal/files/regularfile has the same check, with messages for the files of the
// operator; this package does not import packages of the operator.
func openRegular(path string) (*os.File, error) {
	check := func(info fs.FileInfo, err error) error {
		switch {
		case err != nil:
			return err
		case info.IsDir():
			return invalidf("%s: is a directory; a routing trace is a .safetensors or .safetensors.zst file", path)
		case !info.Mode().IsRegular():
			return invalidf("%s: is not a regular file; a routing trace is a .safetensors or .safetensors.zst file", path)
		}
		return nil
	}
	if err := check(os.Stat(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// The path can change between the check and the call: without O_NONBLOCK, opening a named pipe waits for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := check(file.Stat()); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// contextReader makes reading a large file cancellable.
type contextReader struct {
	ctx context.Context
	io.Reader
}

func (r contextReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// Read reads a trace of at most maxBytes uncompressed bytes and checks it.
func Read(r io.Reader, maxBytes int64) (*Trace, error) {
	return read(r, func(plain io.Reader) (*Trace, error) { return readPlain(plain, maxBytes) })
}

// ReadModel reads the model description of a trace, plain or zstd-compressed, without the data that follows.
func ReadModel(r io.Reader) (Model, error) {
	return read(r, func(plain io.Reader) (Model, error) {
		tensors, metadata, err := newStream(plain).tensors()
		if err != nil {
			return Model{}, err
		}
		experts := slices.IndexFunc(tensors, func(t tensor) bool { return t.name == expertsTensor })
		return parseModel(metadata, tensors[experts].shape) // checkTensors ensures that the tensor exists
	})
}

// read decompresses zstd input and passes the plain input to readPlain.
func read[T any](r io.Reader, readPlain func(io.Reader) (T, error)) (T, error) {
	var none T
	input := &recordingReader{Reader: r}
	source := bufio.NewReaderSize(input, 1<<20)
	magic, err := source.Peek(len(zstdMagic))
	if err != nil && !errors.Is(err, io.EOF) {
		return none, err
	}
	if !bytes.Equal(magic, zstdMagic) {
		return readPlain(source)
	}
	// One goroutine: the decoder must not read the source concurrently.
	decoder, err := zstd.NewReader(source, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
	if err != nil {
		return none, err
	}
	defer decoder.Close()
	content, err := readPlain(&expansionReader{decoder: decoder, compressed: input})
	if err != nil && !IsInvalid(err) && input.err == nil {
		return none, invalidf("zstd data is damaged: %v", err)
	}
	return content, err
}

// expansionReader returns an error if data decompresses to far more than its size: a small file must not fill the
// memory.
type expansionReader struct {
	decoder    io.Reader
	compressed *recordingReader
	expanded   int64
}

func (r *expansionReader) Read(p []byte) (int, error) {
	n, err := r.decoder.Read(p)
	r.expanded += int64(n)
	if r.expanded > minExpanded+maxRatio*r.compressed.bytes {
		return 0, invalidf("decompresses to more than %d times its size", maxRatio)
	}
	return n, err
}

// recordingReader counts bytes and records read errors. Every other error of a decoder means damaged data.
type recordingReader struct {
	io.Reader
	bytes int64
	err   error
}

func (r *recordingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.bytes += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

// stream reads forward only, hashes the data, and reports the location of an unexpected end.
type stream struct {
	r      io.Reader
	digest hash.Hash
	buffer []byte
}

func (s *stream) next(n int, what string) ([]byte, error) {
	chunk := s.buffer[:n]
	if _, err := io.ReadFull(s.r, chunk); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, invalidf("is truncated within %s: fetch the file again", what)
		}
		return nil, err
	}
	s.digest.Write(chunk)
	return chunk, nil
}

func newStream(r io.Reader) *stream {
	return &stream{r: r, digest: sha256.New(), buffer: make([]byte, 64<<10)}
}

// tensors reads the header and returns the tensors of a routing trace and its metadata.
func (s *stream) tensors() ([]tensor, map[string]string, error) {
	text, err := s.header()
	if err != nil {
		return nil, nil, err
	}
	tensors, metadata, err := parseHeader(text)
	if err != nil {
		return nil, nil, err
	}
	return tensors, metadata, checkTensors(tensors)
}

func readPlain(r io.Reader, maxBytes int64) (*Trace, error) {
	s := newStream(r)
	tensors, metadata, err := s.tensors()
	if err != nil {
		return nil, err
	}
	if size := tensors[len(tensors)-1].end; size > maxBytes {
		return nil, invalidf("contains %d bytes of data; the maximum is %d", size, maxBytes)
	}
	t := &Trace{}
	for _, entry := range tensors {
		switch entry.name {
		case expertsTensor:
			if t.Model, err = parseModel(metadata, entry.shape); err != nil {
				return nil, err
			}
		case lookAheadExperts:
			if entry.shape[2] < 1 || entry.shape[2] > MaxLookAhead {
				return nil, invalidf("tensor %q has shape %v; it must have 1 to %d experts per token and layer", entry.name, entry.shape, MaxLookAhead)
			}
			t.LookAhead = &LookAhead{Width: int(entry.shape[2])}
		}
	}
	for _, entry := range tensors {
		if err := t.decode(s, entry); err != nil {
			return nil, err
		}
	}
	if n, err := io.ReadFull(r, s.buffer[:1]); n > 0 {
		return nil, invalidf("has extra bytes after the last tensor")
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	s.digest.Sum(t.Digest[:0])
	return t, t.Validate()
}

func (s *stream) header() ([]byte, error) {
	prefix, err := s.next(8, "the length of the header")
	if err != nil {
		return nil, err
	}
	length := binary.LittleEndian.Uint64(prefix)
	if length > maxHeaderBytes {
		return nil, invalidf("header length %d is above %d: not a safetensors file, or damaged", length, maxHeaderBytes)
	}
	var text []byte
	for rest := int(length); rest > 0; {
		chunk, err := s.next(min(rest, len(s.buffer)), "the header")
		if err != nil {
			return nil, err
		}
		text, rest = append(text, chunk...), rest-len(chunk)
	}
	return text, nil
}

func (t *Trace) decode(s *stream, entry tensor) (err error) {
	switch entry.name {
	case "input_ids":
		t.Tokens, err = decodeTensor[int32](s, entry)
	case "request_offsets":
		t.Offsets, err = decodeTensor[int64](s, entry)
	case "request_document":
		t.Documents, err = decodeTensor[int32](s, entry)
	case "request_domain":
		t.Domains, err = decodeTensor[uint8](s, entry)
	case expertsTensor:
		t.Experts, err = decodeTensor[uint16](s, entry)
	case lookAheadExperts:
		t.LookAhead.Experts, err = decodeTensor[uint16](s, entry)
	case lookAheadScores:
		t.LookAhead.Scores, err = decodeTensor[uint16](s, entry)
	default:
		_, err = decodeTensor[struct{}](s, entry)
	}
	return err
}

// decodeTensor reads a tensor of integers into a slice; a slice of struct{} skips the tensor. The slice grows with the
// data, so that a header cannot cause a large allocation.
func decodeTensor[T int32 | int64 | uint8 | uint16 | struct{}](s *stream, entry tensor) ([]T, error) {
	const firstAllocation = 1 << 22
	var values []T
	if _, skip := any(values).([]struct{}); !skip {
		values = make([]T, 0, min(entry.elements(), firstAllocation))
	}
	for rest := entry.end - entry.begin; rest > 0; {
		chunk, err := s.next(int(min(rest, int64(len(s.buffer)))), fmt.Sprintf("tensor %q", entry.name))
		if err != nil {
			return nil, err
		}
		rest -= int64(len(chunk))
		switch v := any(&values).(type) {
		case *[]int32:
			*v = appendInt32(*v, chunk, entry.dtype)
		case *[]int64:
			for ; len(chunk) > 0; chunk = chunk[8:] {
				*v = append(*v, int64(binary.LittleEndian.Uint64(chunk)))
			}
		case *[]uint8:
			*v = append(*v, chunk...)
		case *[]uint16:
			*v = appendUint16(*v, chunk, entry.dtype)
		}
	}
	return values, nil
}

func appendInt32(values []int32, chunk []byte, dtype string) []int32 {
	if dtype == "U16" {
		for ; len(chunk) > 0; chunk = chunk[2:] {
			values = append(values, int32(binary.LittleEndian.Uint16(chunk)))
		}
		return values
	}
	for ; len(chunk) > 0; chunk = chunk[4:] {
		values = append(values, int32(binary.LittleEndian.Uint32(chunk)))
	}
	return values
}

func appendUint16(values []uint16, chunk []byte, dtype string) []uint16 {
	if dtype == "U8" {
		for _, b := range chunk {
			values = append(values, uint16(b))
		}
		return values
	}
	for ; len(chunk) > 0; chunk = chunk[2:] {
		values = append(values, binary.LittleEndian.Uint16(chunk))
	}
	return values
}
