// SPDX-License-Identifier: Apache-2.0

package counts

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// ReadCompressed reads the output of WriteCompressed. It returns an error for a file of more than limit bytes after
// decompression.
func ReadCompressed(r io.Reader, limit int64) (*Counts, error) {
	decoder, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
	if err != nil {
		return nil, err
	}
	defer decoder.Close()
	return read(decoder, limit)
}

// read reads the output of Write, and validates that the counts are consistent. It returns an error for a file of more
// than limit bytes.
func read(r io.Reader, limit int64) (*Counts, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("counts: %w", err)
	case int64(len(data)) > limit:
		return nil, fmt.Errorf("counts: the file has more than %d bytes", limit)
	case len(data) < 8:
		return nil, errors.New("counts: the file is shorter than the length of its header")
	}
	length := binary.LittleEndian.Uint64(data)
	if length > uint64(len(data)-8) {
		return nil, fmt.Errorf("counts: the header has %d bytes, but the file only %d", length, len(data))
	}
	header, err := checkpoint.ParseHeader(data[8 : 8+length])
	if err != nil {
		return nil, fmt.Errorf("counts: %w", err)
	}
	file := &reader{header, data[8+length:]}
	if header.DataBytes() != int64(len(file.data)) {
		return nil, fmt.Errorf("counts: the header declares %d bytes of data, but the file has %d", header.DataBytes(), len(file.data))
	}
	c, err := file.counts()
	if err != nil {
		return nil, fmt.Errorf("counts: %w", err)
	}
	return c, nil
}

// reader reads the tensors of a file.
type reader struct {
	*checkpoint.Header
	data []byte
}

// integers reads a tensor of a type and shape. A negative length in shape matches any length. Elements must not exceed
// largest.
func (r *reader) integers(name string, dtype checkpoint.DType, largest uint64, shape ...int64) ([]uint64, error) {
	tensor, known := r.Tensors[name]
	if !known {
		return nil, fmt.Errorf("tensor %s is missing", name)
	}
	fits := slices.EqualFunc(tensor.Shape, shape, func(got, want int64) bool { return want < 0 || got == want })
	if tensor.DType != dtype || !fits {
		return nil, fmt.Errorf("tensor %s is %s %v; want %s %v", name, tensor.DType, tensor.Shape, dtype, shape)
	}
	values := make([]uint64, tensor.Elements())
	if len(values) == 0 {
		return values, nil
	}
	width := (tensor.End - tensor.Begin) / int64(len(values))
	for i := range values {
		var word [8]byte
		copy(word[:width], r.data[tensor.Begin+int64(i)*width:])
		if values[i] = binary.LittleEndian.Uint64(word[:]); values[i] > largest {
			return nil, fmt.Errorf("tensor %s: element %d, %d, is invalid: the maximum is %d", name, i, values[i], largest)
		}
	}
	return values, nil
}

// number reads a number from the metadata. An absent optional number is 0.
func (r *reader) number(name string, optional bool) (int64, error) {
	text, known := r.Metadata[name]
	if !known && optional {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("metadata %s: %q is invalid: it must be a non-negative number", name, text)
	}
	return n, nil
}

func (r *reader) model() (Model, error) {
	if format := r.Metadata["format"]; format != Format {
		return Model{}, fmt.Errorf("format is %q; this version reads %q", format, Format)
	}
	m := Model{Digest: r.Metadata["model_digest"]}
	for name, into := range map[string]*int{"num_experts": &m.Experts, "num_experts_per_tok": &m.ExpertsPerToken, "vocab_size": &m.Vocabulary} {
		n, err := r.number(name, false)
		if err != nil {
			return Model{}, err
		}
		*into = int(n)
	}
	if err := json.Unmarshal([]byte(r.Metadata["moe_layers"]), &m.MoELayers); err != nil {
		return Model{}, fmt.Errorf("metadata moe_layers: %w", err)
	}
	return m, m.Validate()
}

func (r *reader) counts() (*Counts, error) {
	model, err := r.model()
	if err != nil {
		return nil, err
	}
	c := New(model)
	if c.dropped, err = r.number("dropped_tokens", true); err != nil {
		return nil, err
	}
	if c.undercount, err = r.number("undercount", true); err != nil {
		return nil, err
	}
	ids, err := r.integers("token_ids", "I32", uint64(model.Vocabulary-1), -1)
	if err != nil {
		return nil, err
	}
	occurrences, err := r.integers("token_counts", "U32", 1<<32-1, int64(len(ids)))
	if err != nil {
		return nil, err
	}
	for i, id := range ids {
		if i > 0 && id <= ids[i-1] || occurrences[i] == 0 {
			return nil, fmt.Errorf("row %d: token %d with count %d is invalid: token IDs must ascend, and counts must be positive", i, id, occurrences[i])
		}
		c.occurrences[id] = uint32(occurrences[i])
		c.tokens += int64(occurrences[i])
	}
	if total, err := r.number("tokens", false); err != nil || total != c.tokens {
		return nil, fmt.Errorf("metadata tokens: %q is invalid: the counts of the tokens sum to %d", r.Metadata["tokens"], c.tokens)
	}
	for i, layer := range model.MoELayers {
		if c.layers[i].run, err = r.layer(model, layer, ids, occurrences); err != nil {
			return nil, err
		}
	}
	if _, known := r.Tensors[bigramTensor]; known {
		values, err := r.integers(bigramTensor, "U32", 1<<32-1, bigramRows, bigramBuckets)
		if err != nil {
			return nil, err
		}
		c.bigrams = &Bigrams{}
		for i, n := range values {
			c.bigrams[i/bigramBuckets][i%bigramBuckets] = uint32(n)
		}
	}
	return c, nil
}

// layer reads the pairs of a layer. Each occurrence of a token activates ExpertsPerToken experts.
func (r *reader) layer(model Model, layer int, ids, occurrences []uint64) (run, error) {
	experts, err := r.integers(layerTensor(layer, "experts"), "U16", uint64(model.Experts-1), -1)
	if err != nil {
		return run{}, err
	}
	counts, err := r.integers(layerTensor(layer, "counts"), "U32", 1<<32-1, int64(len(experts)))
	if err != nil {
		return run{}, err
	}
	offsets, err := r.integers(layerTensor(layer, "row_offsets"), "I64", uint64(len(experts)), int64(len(ids))+1)
	if err != nil {
		return run{}, err
	}
	if offsets[0] != 0 || offsets[len(ids)] != uint64(len(experts)) {
		return run{}, fmt.Errorf("layer %d: rows from %d to %d do not cover the %d pairs", layer, offsets[0], offsets[len(ids)], len(experts))
	}
	all := run{make([]pair, 0, len(experts)), make([]uint32, 0, len(experts))}
	for row, id := range ids {
		if offsets[row+1] < offsets[row] {
			return run{}, fmt.Errorf("layer %d: row %d ends before it starts", layer, row)
		}
		sum := uint64(0)
		for i := offsets[row]; i < offsets[row+1]; i++ {
			if i > offsets[row] && experts[i] <= experts[i-1] || counts[i] == 0 {
				return run{}, fmt.Errorf("layer %d, token %d: expert %d with count %d is invalid: experts must ascend, and counts must be positive", layer, id, experts[i], counts[i])
			}
			sum += counts[i]
			all.pairs, all.counts = append(all.pairs, pairOf(int32(id), uint16(experts[i]))), append(all.counts, uint32(counts[i]))
		}
		if want := occurrences[row] * uint64(model.ExpertsPerToken); sum != want {
			return run{}, fmt.Errorf("layer %d, token %d: %d activations are invalid: %d occurrences have %d", layer, id, sum, occurrences[row], want)
		}
	}
	return all, nil
}
