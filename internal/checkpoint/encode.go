package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// EncodeHeader writes a header as JSON, tensors in the order of their bytes, padded with spaces to at least the given
// size; ParseHeader reads it back.
func EncodeHeader(h *Header, size int) ([]byte, error) {
	var out bytes.Buffer
	out.Grow(max(size, 128*len(h.Tensors)))
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	field := func(name string, value any) error {
		if err := encoder.Encode(name); err != nil {
			return err
		}
		out.Truncate(out.Len() - 1) // the encoder ends each value with a line feed
		out.WriteByte(':')
		if err := encoder.Encode(value); err != nil {
			return err
		}
		out.Truncate(out.Len() - 1)
		out.WriteByte(',')
		return nil
	}
	out.WriteByte('{')
	if h.Metadata != nil {
		if err := field("__metadata__", h.Metadata); err != nil {
			return nil, err
		}
	}
	for _, name := range h.Names() {
		t := h.Tensors[name]
		entry := struct {
			DType   DType    `json:"dtype"`
			Shape   []int64  `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}{t.DType, append([]int64{}, t.Shape...), [2]int64{t.Begin, t.End}}
		if err := field(name, entry); err != nil {
			return nil, err
		}
	}
	if out.Len() > 1 {
		out.Truncate(out.Len() - 1)
	}
	out.WriteByte('}')
	for out.Len() < size {
		out.WriteByte(' ')
	}
	if out.Len() > maxHeaderBytes {
		return nil, Invalidf("header of %d bytes is above the format's bound %d", out.Len(), maxHeaderBytes)
	}
	return out.Bytes(), nil
}

// FrameHeader is the beginning of a safetensors file: the header's length and its text.
func FrameHeader(text []byte) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
}

// EncodeIndex replaces the weight_map of an index and keeps its other members. The text is formatted as transformers
// does: sorted, two spaces of indentation.
func EncodeIndex(index []byte, weightMap map[string]string) ([]byte, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(index, &members); err != nil {
		return nil, Invalidf("%s: not a valid index: %v", indexFile, err)
	}
	text, err := json.Marshal(weightMap)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", indexFile, err)
	}
	members["weight_map"] = text
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(members); err != nil {
		return nil, fmt.Errorf("%s: %w", indexFile, err)
	}
	return out.Bytes(), nil
}
