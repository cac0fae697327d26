// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
)

// EncodeHeader encodes a header as JSON, with tensors ordered by offset, padded with spaces to at least size bytes.
// ParseHeader reads it back.
func EncodeHeader(h *Header, size int) ([]byte, error) {
	return EncodeRenamed(h, size, func(name string) string { return name })
}

// EncodeRenamed encodes a header in the same way, with other names of the tensors.
func EncodeRenamed(h *Header, size int, newName func(string) string) ([]byte, error) {
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
		if err := field(newName(name), entry); err != nil {
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
		return nil, Invalidf("header has %d bytes; the format allows at most %d", out.Len(), maxHeaderBytes)
	}
	return out.Bytes(), nil
}

// FrameHeader returns the beginning of a safetensors file: the header's length and its text.
func FrameHeader(text []byte) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
}

// WriteIndex writes an index of the tensors in names, and the other members of an old index. The output has the format
// of transformers: sorted, indented by two spaces. Names are sorted in place.
func WriteIndex(w io.Writer, old []byte, names []string, fileOf func(tensor string) string) error {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(old, &members); err != nil {
		return Invalidf("%s: not a valid index: %v", indexFile, err)
	}
	slices.Sort(names)
	out := bufio.NewWriter(w)
	separator := "{\n"
	for _, member := range slices.Sorted(maps.Keys(members)) {
		fmt.Fprintf(out, "%s  %s: ", separator, quoted(member))
		separator = ",\n"
		if member == "weight_map" {
			writeWeightMap(out, names, fileOf)
			continue
		}
		var text bytes.Buffer
		if err := json.Indent(&text, members[member], "  ", "  "); err != nil {
			return Invalidf("%s: %s: %v", indexFile, member, err)
		}
		out.Write(text.Bytes())
	}
	out.WriteString("\n}\n")
	return out.Flush()
}

func writeWeightMap(out *bufio.Writer, names []string, fileOf func(string) string) {
	separator := "{\n"
	for _, name := range names {
		fmt.Fprintf(out, "%s    %s: %s", separator, quoted(name), quoted(fileOf(name)))
		separator = ",\n"
	}
	out.WriteString("\n  }")
}

// quoted encodes a JSON string.
func quoted(text string) []byte {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.Encode(text) // strings always encode
	return bytes.TrimSuffix(out.Bytes(), []byte("\n"))
}
