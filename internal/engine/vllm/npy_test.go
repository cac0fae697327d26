// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// array returns a .npy file as defined by the format: the header ends in a line feed and is padded with spaces, so that
// the data begins at a multiple of 64 bytes.
func array(version byte, header string, data any) []byte {
	var file bytes.Buffer
	file.WriteString("\x93NUMPY")
	file.Write([]byte{version, 0})
	prefix := 10
	if version > 1 {
		prefix = 12
	}
	for (prefix+len(header)+1)%64 != 0 {
		header += " "
	}
	header += "\n"
	if version == 1 {
		binary.Write(&file, binary.LittleEndian, uint16(len(header))) //nolint:errcheck // memory
	} else {
		binary.Write(&file, binary.LittleEndian, uint32(len(header))) //nolint:errcheck // memory
	}
	file.WriteString(header)
	binary.Write(&file, binary.LittleEndian, data) //nolint:errcheck // memory
	return file.Bytes()
}

func header(descr string, shape ...int) string {
	text := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(shape)), ", "), "[]")
	return fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", descr, text)
}

// renumbered renumbers a text in pieces of a size. Expert e of layer 0 becomes e+1, expert e of layer 1 becomes e+11.
func renumbered(t *testing.T, text string, pieceBytes, layers, top int) (string, error) {
	t.Helper()
	editor := renumberRoutedExperts(layers, top, func(layer int, id int32) int32 { return id + 1 + int32(10*layer) })
	var out []byte
	for piece := range slices.Chunk([]byte(text), pieceBytes) {
		var err error
		if out, err = editor.Edit(out, piece); err != nil {
			return string(out), err
		}
	}
	out, err := editor.End(out)
	return string(out), err
}

// TestRenumbers checks that experts are renumbered and that header, width and length do not change, for all piece
// sizes.
func TestRenumbers(t *testing.T) {
	long, longWant := make([]int32, 2*2*10_000), make([]int32, 2*2*10_000)
	for i := range long {
		long[i] = int32(i % 200)
		longWant[i] = long[i] + 1 + int32(10*(i/2%2))
	}
	for name, tc := range map[string]struct{ file, want []byte }{
		"int32":       {array32("<i4", 0, 1, 2, 3), array32("<i4", 1, 2, 13, 14)},
		"format 2":    {array(2, header("<i4", 1, 2, 2), []int32{0, 1, 2, 3}), array(2, header("<i4", 1, 2, 2), []int32{1, 2, 13, 14})},
		"another pad": {array(1, header("<i4", 1, 2, 2)+strings.Repeat(" ", 64), []int32{0, 1, 2, 3}), array(1, header("<i4", 1, 2, 2)+strings.Repeat(" ", 64), []int32{1, 2, 13, 14})},
		"uint8":       {array(1, header("|u1", 1, 2, 2), []uint8{0, 1, 2, 244}), array(1, header("|u1", 1, 2, 2), []uint8{1, 2, 13, 255})},
		"int16":       {array(1, header("<i2", 1, 2, 2), []int16{-1, 1, 2, 3}), array(1, header("<i2", 1, 2, 2), []int16{0, 2, 13, 14})},
		"int64":       {array(1, header("<i8", 1, 2, 2), []int64{-2, 1, 2, 3}), array(1, header("<i8", 1, 2, 2), []int64{-1, 2, 13, 14})},
		"no token":    {array(1, header("<i4", 0, 2, 2), []int32{}), array(1, header("<i4", 0, 2, 2), []int32{})},
		"long":        {array(1, header("<i4", 10_000, 2, 2), long), array(1, header("<i4", 10_000, 2, 2), longWant)},
	} {
		for _, pieceBytes := range []int{1, 2, 3, 5, 64, 32 << 10, 1 << 20} {
			got, err := renumbered(t, base64.StdEncoding.EncodeToString(tc.file), pieceBytes, 2, 2)
			if want := base64.StdEncoding.EncodeToString(tc.want); got != want || err != nil {
				t.Errorf("%s, pieces of %d bytes: %.200s, %v; want %.200s", name, pieceBytes, got, err, want)
			}
		}
	}
}

func array32(descr string, ids ...int32) []byte {
	return array(1, header(descr, len(ids)/4, 2, 2), ids)
}

// TestRenumberRefuses checks that the editor refuses what the decoder refuses, and numbers that do not fit an element.
func TestRenumberRefuses(t *testing.T) {
	sound := array32("<i4", 1, 2, 3, 4)
	for name, tc := range map[string]struct {
		text, want string
	}{
		"empty":         {"", "0 bytes are not a .npy file"},
		"no base64":     {"!!!!", "illegal base64 data"},
		"a line feed":   {base64.StdEncoding.EncodeToString(sound)[:8] + "\nAAA", "illegal base64 data"},
		"cut off":       {base64.StdEncoding.EncodeToString(sound[:len(sound)-1]), "15 bytes of data do not match an array of shape [1 2 2]"},
		"half a group":  {base64.StdEncoding.EncodeToString(sound)[:10], "base64 ends in"},
		"after the end": {base64.StdEncoding.EncodeToString(sound) + "AAAA", ""},
		"raw integers":  {base64.StdEncoding.EncodeToString(make([]byte, 64)), "not a .npy file"},
		"more tokens":   {base64.StdEncoding.EncodeToString(array(1, header("<i4", 999999999, 2, 2), []int32{1, 2, 3, 4})), "16 bytes of data"},
		"another shape": {base64.StdEncoding.EncodeToString(array(1, header("<i4", 1, 4, 1), []int32{1, 2, 3, 4})), "the model has 2 layers"},
		"too large":     {base64.StdEncoding.EncodeToString(array(1, header("<i8", 1, 2, 2), []int64{1, 2, 3, 1 << 40})), "element 3 is not an expert id"},
		"grows":         {base64.StdEncoding.EncodeToString(array(1, header("|u1", 1, 2, 2), []uint8{255, 2, 3, 4})), "element 0 becomes 256, which 1 bytes cannot hold"},
	} {
		for _, pieceBytes := range []int{1, 4, 1 << 20} {
			_, err := renumbered(t, tc.text, pieceBytes, 2, 2)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s, pieces of %d bytes: error %v, want %q", name, pieceBytes, err, tc.want)
			}
		}
	}
}

func TestDecodesEveryIntegerType(t *testing.T) {
	want := []int32{0, 1, 2, 3, 4, 100, 0, 7}
	for name, file := range map[string][]byte{
		"int32":       array(1, header("<i4", 2, 2, 2), []int32{0, 1, 2, 3, 4, 100, 0, 7}),
		"int16":       array(1, header("<i2", 2, 2, 2), []int16{0, 1, 2, 3, 4, 100, 0, 7}),
		"uint16":      array(1, header("<u2", 2, 2, 2), []uint16{0, 1, 2, 3, 4, 100, 0, 7}),
		"uint8":       array(1, header("|u1", 2, 2, 2), []uint8{0, 1, 2, 3, 4, 100, 0, 7}),
		"int8":        array(1, header("|i1", 2, 2, 2), []int8{0, 1, 2, 3, 4, 100, 0, 7}),
		"int64":       array(1, header("<i8", 2, 2, 2), []int64{0, 1, 2, 3, 4, 100, 0, 7}),
		"uint64":      array(2, header("<u8", 2, 2, 2), []uint64{0, 1, 2, 3, 4, 100, 0, 7}),
		"format 3":    array(3, header("<u4", 2, 2, 2), []uint32{0, 1, 2, 3, 4, 100, 0, 7}),
		"other order": array(1, "{'shape': (2, 2, 2), 'fortran_order': False, 'descr': '<i4'}", []int32{0, 1, 2, 3, 4, 100, 0, 7}),
	} {
		got, err := decodeRoutedExperts(base64.StdEncoding.EncodeToString(file), 2, 2)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: error %v, (-want +got):\n%s", name, err, diff)
		}
	}
	got, err := decodeRoutedExperts(base64.StdEncoding.EncodeToString(array(1, header("<i2", 1, 1, 2), []int16{-1, 300})), 1, 2)
	if diff := cmp.Diff([]int32{-1, 300}, got); diff != "" || err != nil {
		t.Errorf("negative: error %v, (-want +got):\n%s", err, diff)
	}
	if got, err := decodeRoutedExperts(base64.StdEncoding.EncodeToString(array(1, header("<i4", 0, 2, 2), []int32{})), 2, 2); err != nil || len(got) != 0 {
		t.Errorf("no token: %v, error %v", got, err)
	}
}

func TestDecodeRefuses(t *testing.T) {
	sound := array(1, header("<i4", 1, 2, 2), []int32{1, 2, 3, 4})
	for name, test := range map[string]struct {
		file []byte
		want string
	}{
		"empty":             {nil, "not a .npy file"},
		"raw integers":      {[]byte{1, 0, 0, 0, 2, 0, 0, 0}, "not a .npy file"},
		"cut off":           {sound[:len(sound)-1], "15 bytes of data do not match an array of shape [1 2 2]"},
		"cut in the header": {sound[:40], "its header has 118 bytes, the file contains only 30 of them"},
		"cut in the length": {sound[:8], "not a .npy file"},
		"version":           {append([]byte("\x93NUMPY\x09\x00"), make([]byte, 8)...), ".npy format 9"},
		"more data":         {append(bytes.Clone(sound), 0), "17 bytes of data"},
		"Fortran":           {array(1, strings.Replace(header("<i4", 1, 2, 2), "False", "True", 1), []int32{1, 2, 3, 4}), "Fortran order"},
		"big-endian":        {array(1, header(">i4", 1, 2, 2), []int32{1, 2, 3, 4}), "big-endian"},
		"floats":            {array(1, header("<f4", 1, 2, 2), []float32{1, 2, 3, 4}), "is not the header of a three-dimensional array of integers"},
		"objects":           {array(1, header("|O", 1, 2, 2), []int32{1, 2, 3, 4}), "is not the header of a three-dimensional array of integers"},
		"two dimensions":    {array(1, header("<i4", 2, 2), []int32{1, 2, 3, 4}), "three-dimensional"},
		"only MoE layers":   {array(1, header("<i4", 2, 1, 2), []int32{1, 2, 3, 4}), "the model has 2 layers and 2 experts per token"},
		"more tokens":       {array(1, header("<i4", 999999999, 2, 2), []int32{1, 2, 3, 4}), "16 bytes of data"},
		"too large":         {array(1, header("<i8", 1, 2, 2), []int64{1, 2, 3, 1 << 40}), "element 3"},
		"much too large":    {array(1, header("<u8", 1, 2, 2), []uint64{1, 1<<64 - 1, 3, 4}), "element 1"},
	} {
		_, err := decodeRoutedExperts(base64.StdEncoding.EncodeToString(test.file), 2, 2)
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.HasPrefix(err.Error(), "routed experts: ") {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
	if _, err := decodeRoutedExperts("!", 2, 2); err == nil || !strings.Contains(err.Error(), "routed experts") {
		t.Errorf("no base64: %v", err)
	}
	if _, err := decodeRoutedExperts(base64.StdEncoding.EncodeToString(array(1, header("<i4", 1, 0, 0), []int32{})), 0, 0); err == nil {
		t.Error("a model without layers is accepted")
	}
}

// FuzzReadArray checks that the result has one element for each element in the file, regardless of the header.
func FuzzReadArray(f *testing.F) {
	f.Add(array(1, header("<i4", 1, 2, 2), []int32{1, 2, 3, 4}), 2, 2)
	f.Add(array(2, header("|u1", 3, 1, 2), []uint8{1, 2, 3, 4, 5, 6}), 1, 2)
	f.Add(array(3, header("<i8", 999999999, 48, 8), []int64{1}), 48, 8)
	f.Fuzz(func(t *testing.T, file []byte, layers, top int) {
		if layers < 0 || layers > 1<<16 || top < 0 || top > 1<<16 {
			return
		}
		ids, err := readArray(file, layers, top)
		if err != nil {
			return
		}
		if len(ids) > len(file) || len(ids)%(layers*top) != 0 {
			t.Fatalf("%d ids from %d bytes, %d layers, %d experts", len(ids), len(file), layers, top)
		}
	})
}

// FuzzRenumber renumbers any file, in pieces of any size. The editor accepts only what the decoder accepts, and keeps
// the length.
func FuzzRenumber(f *testing.F) {
	f.Add(array(1, header("<i4", 1, 2, 2), []int32{1, 2, 3, 4}), 2, 2, 7)
	f.Add(array(2, header("|u1", 3, 1, 2), []uint8{1, 2, 3, 4, 5, 6}), 1, 2, 1)
	f.Add(array(1, header("|i1", 1, 1, 2), []int8{127, 2}), 1, 2, 1000)
	f.Add(array(3, header("<i8", 999999999, 48, 8), []int64{1}), 48, 8, 64)
	f.Fuzz(func(t *testing.T, file []byte, layers, top, pieceBytes int) {
		if layers < 0 || layers > 1<<12 || top < 0 || top > 1<<12 || pieceBytes < 1 {
			return
		}
		text := base64.StdEncoding.EncodeToString(file)
		edited, err := renumbered(t, text, pieceBytes, layers, top)
		if err != nil {
			return
		}
		ids, err := decodeRoutedExperts(text, layers, top)
		if err != nil || len(edited) != len(text) {
			t.Fatalf("%q becomes %q; the decoder returns error %v", text, edited, err)
		}
		got, err := decodeRoutedExperts(edited, layers, top)
		if err != nil && !slices.Contains(ids, math.MaxInt32) && len(ids) > 0 && slices.Min(ids) >= 0 {
			t.Fatalf("%q becomes %q: %v", text, edited, err)
		}
		for i, id := range got {
			if want := ids[i] + 1 + int32(10*(i/top%layers)); id != want {
				t.Fatalf("id %d is %d, want %d", i, id, want)
			}
		}
	})
}

func TestReadCompletion(t *testing.T) {
	tokens, experts, err := readCompletion([]byte(`{"choices":[{"text":"x","token_ids":[7,8],"routed_experts":"QQ=="},{"routed_experts":"Qg=="}]}`))
	if diff := cmp.Diff([]int32{7, 8}, tokens); diff != "" || experts != "QQ==" || err != nil {
		t.Errorf("%q, error %v %s", experts, err, diff)
	}
	for _, text := range []string{`{}`, `{"choices":[{"routed_experts":null}]}`} {
		if _, experts, err := readCompletion([]byte(text)); experts != "" || err != nil {
			t.Errorf("%s: %q, error %v", text, experts, err)
		}
	}
	if _, _, err := readCompletion([]byte(`[`)); err == nil {
		t.Error("invalid JSON is accepted")
	}
}
