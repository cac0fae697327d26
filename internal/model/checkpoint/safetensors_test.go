// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// safetensorsBytes returns a file with a header and data.
func safetensorsBytes(header string, data []byte) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	out = append(out, header...)
	return append(out, data...)
}

func writeFile(t testing.TB, path string, content []byte) string {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestParseHeaderRefuses(t *testing.T) {
	for name, test := range map[string]struct{ header, want string }{
		"not JSON":          {`]`, "not a JSON object"},
		"array":             {`[1]`, "not a JSON object"},
		"cut off":           {`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}`, "not valid JSON"},
		"trailing bytes":    {`{} x`, "after the JSON object"},
		"twice":             {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, `"a" appears twice`},
		"metadata nested":   {`{"__metadata__":{"x":{"y":1}}}`, "not a map of strings"},
		"unknown dtype":     {`{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}`, `"a": unknown dtype "F33"`},
		"no offsets":        {`{"a":{"dtype":"F32","shape":[1]}}`, "data_offsets"},
		"three offsets":     {`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}`, "data_offsets"},
		"nested shape":      {`{"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}}`, `tensor "a"`},
		"negative offset":   {`{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}`, "ascending"},
		"descending":        {`{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}`, "ascending"},
		"negative shape":    {`{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`, "negative dimension"},
		"overflow":          {`{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4]}}`, "overflows"},
		"overflow of bits":  {`{"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}}`, "overflows"},
		"size mismatch":     {`{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}}`, "needs 48 bits"},
		"half a byte":       {`{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}`, "needs 12 bits"},
		"overlap":           {`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}`, `"b" at [2, 6] overlaps tensor "a"`},
		"hole":              {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`, "a hole"},
		"offset as float":   {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1.5]}}`, `tensor "a"`},
		"offset beyond int": {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,99999999999999999999]}}`, `tensor "a"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseHeader([]byte(test.header))
			if err == nil || !IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %v, want an invalid error with %q", err, test.want)
			}
		})
	}
}

func TestOpenFileRefuses(t *testing.T) {
	header := `{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`
	good := safetensorsBytes(header, make([]byte, 8))
	for name, test := range map[string]struct {
		content []byte
		want    string
	}{
		"empty":          {nil, "too short"},
		"wrong length":   {safetensorsBytes(header, nil)[:20], "is truncated: the header needs 62 bytes, the file has 20"},
		"length huge":    {append(binary.LittleEndian.AppendUint64(nil, math.MaxUint64), good[8:]...), "the format allows at most"},
		"data truncated": {good[:len(good)-1], "is truncated: it has 69 bytes, its header needs 70"},
		"data too long":  {append(good, 0), "has extra bytes at the end: it has 71 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			path := writeFile(t, filepath.Join(t.TempDir(), "x.safetensors"), test.content)
			_, err := OpenFile(path)
			if !IsInvalid(err) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), path) {
				t.Fatalf("got %v, want an invalid error that names the file and has %q", err, test.want)
			}
		})
	}
}

func TestFloat32ReadsEveryFloatType(t *testing.T) {
	header := `{"__metadata__":{"format":"pt"},
		"bf":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},
		"half":{"dtype":"F16","shape":[6],"data_offsets":[4,16]},
		"single":{"dtype":"F32","shape":[],"data_offsets":[16,20]},
		"int":{"dtype":"I8","shape":[1],"data_offsets":[20,21]}}   `
	var data []byte
	for _, bits := range []uint16{0x3fc0, 0xc000, 0x3c00, 0x0001, 0x8000, 0x7c00, 0xfbff, 0x7e00} {
		data = binary.LittleEndian.AppendUint16(data, bits)
	}
	data = binary.LittleEndian.AppendUint32(data, math.Float32bits(-0.1))
	data = append(data, 7)
	f, err := OpenFile(writeFile(t, filepath.Join(t.TempDir(), "x.safetensors"), safetensorsBytes(header, data)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for name, want := range map[string][]float32{
		"bf":     {1.5, -2},
		"half":   {1, 1.0 / (1 << 24), float32(math.Copysign(0, -1)), inf, -65504, nan},
		"single": {-0.1},
	} {
		got, err := f.Float32(name)
		if err != nil {
			t.Fatal(err)
		}
		same := cmp.Comparer(func(a, b float32) bool {
			return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
		})
		if diff := cmp.Diff(want, got, same); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	for name, want := range map[string]string{"int": "only BF16, F16 and F32", "none": `no tensor "none"`} {
		if _, err := f.Float32(name); !IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", name, err, want)
		}
	}
}

// FuzzParseHeader checks the invariant that all readers rely on: the ranges of an accepted header partition the data
// section, and the length of each range matches its shape and dtype.
func FuzzParseHeader(f *testing.F) {
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"F4","shape":[2],"data_offsets":[24,25]}}`))
	f.Add([]byte(`{"__metadata__":{"format":"pt"},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}  `))
	f.Add([]byte(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[0,9223372036854775807],"data_offsets":[0,0]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := ParseHeader(text)
		if err != nil {
			if !IsInvalid(err) {
				t.Fatalf("not an InvalidError: %v", err)
			}
			return
		}
		var sum int64
		for name, tensor := range h.Tensors {
			length := tensor.End - tensor.Begin
			if tensor.Begin < 0 || length < 0 || tensor.Elements()*dtypeBits[tensor.DType] != 8*length {
				t.Fatalf("tensor %q accepted with %+v", name, tensor)
			}
			sum += length
		}
		if sum != h.DataBytes() {
			t.Fatalf("ranges sum to %d, the data section has %d", sum, h.DataBytes())
		}
		if _, err := json.Marshal(h); err != nil {
			t.Fatal(err)
		}
	})
}
