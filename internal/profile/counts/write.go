// SPDX-License-Identifier: Apache-2.0

package counts

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/internal/files/atomicfile"
)

// Format is the value of "format" in the metadata of a counts file.
const Format = "semmoe-counts/1"

// bigramTensor is the name of the tensor with the bigrams, in the files of counts that have bigrams.
const bigramTensor = "bigram_counts"

// Create writes the counts to a zstd-compressed safetensors file. The file is replaced atomically.
func (c *Counts) Create(path string) error { return atomicfile.Write(path, 0o644, c.WriteCompressed) }

// WriteCompressed writes the counts as zstd-compressed safetensors.
func (c *Counts) WriteCompressed(w io.Writer) error {
	encoder, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	return errors.Join(c.Write(encoder), encoder.Close())
}

// Write writes the counts as safetensors. Rows are the token IDs that occurred, in compressed sparse rows per layer
// (docs/trace-format.md).
func (c *Counts) Write(w io.Writer) error {
	var tokens []int32
	for id, occurrences := range c.occurrences {
		if occurrences > 0 {
			tokens = append(tokens, int32(id))
		}
	}
	for layer := range c.layers {
		c.layers[layer].merge()
	}
	header, err := c.header(len(tokens))
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(w, 1<<20)
	put := func(value uint64, width int) {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], value)
		out.Write(word[:width]) // the writer returns the error in Flush
	}
	put(uint64(len(header)), 8)
	out.Write(header)
	for layer := range c.layers { // in the order of header: wide elements first
		l, next := c.layers[layer], 0
		put(0, 8)
		for _, token := range tokens {
			for next < len(l.pairs) && l.pairs[next].token() == token {
				next++
			}
			put(uint64(next), 8)
		}
	}
	for _, token := range tokens {
		put(uint64(token), 4)
	}
	for _, token := range tokens {
		put(uint64(c.occurrences[token]), 4)
	}
	if c.bigrams != nil {
		for row := range c.bigrams {
			for _, n := range c.bigrams[row] {
				put(uint64(n), 4)
			}
		}
	}
	for layer := range c.layers {
		for _, n := range c.layers[layer].counts {
			put(uint64(n), 4)
		}
	}
	for layer := range c.layers {
		for _, p := range c.layers[layer].pairs {
			put(uint64(p.expert()), 2)
		}
	}
	return out.Flush()
}

// header returns the header, with the tensors in the order of Write.
func (c *Counts) header(tokens int) ([]byte, error) {
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int    `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	layers, err := json.Marshal(c.Model.MoELayers)
	if err != nil {
		return nil, err
	}
	metadata := map[string]string{
		"format": Format, "model_digest": c.Model.Digest, "tokens": strconv.FormatInt(c.tokens, 10),
		"num_experts": strconv.Itoa(c.Model.Experts), "num_experts_per_tok": strconv.Itoa(c.Model.ExpertsPerToken),
		"vocab_size": strconv.Itoa(c.Model.Vocabulary), "moe_layers": string(layers),
	}
	if c.dropped > 0 {
		metadata["dropped_tokens"], metadata["undercount"] = strconv.FormatInt(c.dropped, 10), strconv.FormatInt(c.undercount, 10)
	}
	object := map[string]any{"__metadata__": metadata}
	end := int64(0)
	add := func(name, dtype string, width int, shape ...int) {
		begin := end
		size := int64(width)
		for _, d := range shape {
			size *= int64(d)
		}
		end += size
		object[name] = entry{dtype, shape, [2]int64{begin, end}}
	}
	each := func(name, dtype string, width int, length func(layer int) int) {
		for layer, index := range c.Model.MoELayers {
			add(layerTensor(index, name), dtype, width, length(layer))
		}
	}
	pairs := func(layer int) int { return len(c.layers[layer].pairs) }
	each("row_offsets", "I64", 8, func(int) int { return tokens + 1 })
	add("token_ids", "I32", 4, tokens)
	add("token_counts", "U32", 4, tokens)
	if c.bigrams != nil {
		add(bigramTensor, "U32", 4, bigramRows, bigramBuckets)
	}
	each("counts", "U32", 4, pairs)
	each("experts", "U16", 2, pairs)
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	return text, nil
}

// layerTensor returns the name of a tensor of a MoE layer, where layer is the index in the model.
func layerTensor(layer int, name string) string { return fmt.Sprintf("layer.%d.%s", layer, name) }
