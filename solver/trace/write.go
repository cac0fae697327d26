// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// Create writes a trace to a file in the format of WriteAs.
func Create(path string, t *Trace) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(WriteAs(file, path, t), file.Close())
}

// WriteAs writes a trace in the format of a file name: zstd-compressed if the name ends in .zst.
func WriteAs(w io.Writer, name string, t *Trace) error {
	if strings.HasSuffix(name, ".zst") {
		return writeCompressed(w, t)
	}
	return Write(w, t)
}

func writeCompressed(w io.Writer, t *Trace) error {
	encoder, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedBetterCompression))
	if err != nil {
		return err
	}
	if err := Write(encoder, t); err != nil {
		encoder.Close()
		return err
	}
	return encoder.Close()
}

// Write writes a trace as plain safetensors, with the narrowest integer types for its ids. The bytes depend on the
// trace only.
func Write(w io.Writer, t *Trace) error {
	if err := t.Validate(); err != nil {
		return err
	}
	header, err := t.header()
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(w, 1<<20)
	var prefix [8]byte
	binary.LittleEndian.PutUint64(prefix[:], uint64(len(header)))
	out.Write(prefix[:])
	out.Write(header)
	writeIntegers(out, t.Offsets, 8)
	writeIntegers(out, t.Documents, 4)
	writeIntegers(out, t.Tokens, t.tokenBytes())
	writeIntegers(out, t.Experts, t.expertBytes())
	if t.LookAhead != nil {
		writeIntegers(out, t.LookAhead.Scores, 2)
		writeIntegers(out, t.LookAhead.Experts, t.expertBytes())
	}
	writeIntegers(out, t.Domains, 1)
	return out.Flush()
}

func (t *Trace) tokenBytes() int {
	if t.Model.Vocabulary <= 1<<16 {
		return 2
	}
	return 4
}

func (t *Trace) expertBytes() int {
	if t.Model.Experts <= 1<<8 {
		return 1
	}
	return 2
}

// header lists the tensors in the order in which Write stores them, padded so that the data begins at a multiple of 8.
func (t *Trace) header() ([]byte, error) {
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int    `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	tokenType, expertType := "I32", "U16"
	if t.tokenBytes() == 2 {
		tokenType = "U16"
	}
	if t.expertBytes() == 1 {
		expertType = "U8"
	}
	m := t.Model
	layers, err := json.Marshal(m.Layers)
	if err != nil {
		return nil, err
	}
	metadata := map[string]string{
		"num_experts":         strconv.Itoa(m.Experts),
		"num_experts_per_tok": strconv.Itoa(m.TopK),
		"num_moe_layers":      strconv.Itoa(len(m.Layers)),
		"moe_layers":          string(layers),
		"vocab_size":          strconv.Itoa(m.Vocabulary),
	}
	for key, value := range map[string]string{"model_type": m.Type, "model_config": m.Config, "model_digest": m.Digest} {
		if value != "" {
			metadata[key] = value
		}
	}
	if m.Domains != nil {
		domains, err := json.Marshal(m.Domains)
		if err != nil {
			return nil, err
		}
		metadata["domains"] = string(domains)
	}
	object := map[string]any{"__metadata__": metadata}
	end := int64(0)
	add := func(name, dtype string, width int, shape ...int) {
		size := int64(width)
		for _, d := range shape {
			size *= int64(d)
		}
		object[name] = entry{dtype, shape, [2]int64{end, end + size}}
		end += size
	}
	add("request_offsets", "I64", 8, len(t.Offsets))
	add("request_document", "I32", 4, len(t.Documents))
	add("input_ids", tokenType, t.tokenBytes(), len(t.Tokens))
	add("routed_experts", expertType, t.expertBytes(), len(t.Tokens), len(m.Layers), m.TopK)
	if t.LookAhead != nil {
		add(lookAheadScores, "U16", 2, len(t.Tokens), len(m.Layers), t.LookAhead.Width)
		add(lookAheadExperts, expertType, t.expertBytes(), len(t.Tokens), len(m.Layers), t.LookAhead.Width)
	}
	if t.Domains != nil {
		add("request_domain", "U8", 1, len(t.Domains))
	}
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	return text, nil
}

// writeIntegers leaves the error to the writer's Flush.
func writeIntegers[T int32 | int64 | uint8 | uint16](w *bufio.Writer, values []T, width int) {
	var word [8]byte
	for _, v := range values {
		binary.LittleEndian.PutUint64(word[:], uint64(v))
		w.Write(word[:width])
	}
}
