// SPDX-License-Identifier: Apache-2.0

package npy

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// file returns a .npy file as defined by the format.
func file(version byte, header string, values ...byte) []byte {
	for (10+len(header)+1)%64 != 0 {
		header += " "
	}
	header += "\n"
	out := append([]byte("\x93NUMPY"), version, 0)
	if version == 1 {
		out = binary.LittleEndian.AppendUint16(out, uint16(len(header)))
	} else {
		out = binary.LittleEndian.AppendUint32(out, uint32(len(header)))
	}
	return append(append(out, header...), values...)
}

func dict(descr, order, shape string) string {
	return fmt.Sprintf("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }", descr, order, shape)
}

func float32s(values ...float32) (out []byte) {
	for _, v := range values {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
	}
	return out
}

func TestRead(t *testing.T) {
	want := []float32{1, -2, 0.5, 65504, 0, 3}
	halves := []byte{0, 0x3c, 0, 0xc0, 0, 0x38, 0xff, 0x7b, 0, 0, 0, 0x42}
	for name, content := range map[string][]byte{
		"float32, version 1": file(1, dict("<f4", "False", "(3, 2)"), float32s(want...)...),
		"float32, version 2": file(2, dict("<f4", "False", "(3, 2)"), float32s(want...)...),
		"by column":          file(1, dict("<f4", "True", "(3, 2)"), float32s(1, 0.5, 0, -2, 65504, 3)...),
		"float16, version 3": file(3, dict("<f2", "False", "(3, 2)"), halves...),
	} {
		path := filepath.Join(t.TempDir(), "m.npy")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := Open(path)
		if err != nil || m.Rows != 3 || m.Columns != 2 || !slices.Equal(m.Values, want) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
		for length := range content {
			if _, err := Read(bytes.NewReader(content[:length]), int64(length)); !checkpoint.IsInvalid(err) {
				t.Fatalf("%s: %d of %d bytes: %v", name, length, len(content), err)
			}
		}
	}
}

func TestReadRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		content []byte
		want    string
	}{
		"another kind of file": {[]byte("PK\x03\x04 an archive of arrays"), "is not a .npy file"},
		"version":              {file(9, dict("<f4", "False", "(1, 1)")), "has version 9"},
		"big-endian":           {file(1, dict(">f4", "False", "(1, 1)"), float32s(1)...), "descr is \">f4\"; allowed is '<f2' (float16), '<f4' (float32)"},
		"integers":             {file(1, dict("<i4", "False", "(1, 1)"), float32s(1)...), "descr is \"<i4\""},
		"no order":             {file(1, dict("<f4", "Maybe", "(1, 1)"), float32s(1)...), "has no descr or no fortran_order"},
		"a vector":             {file(1, dict("<f4", "False", "(1,)"), float32s(1)...), "the shape must have two dimensions"},
		"no rows":              {file(1, dict("<f4", "False", "(0, 4)")), "both must be positive"},
		"too large":            {file(1, dict("<f4", "False", "(1000000000, 1000000000)")), "the maximum is"},
		"beyond numbers":       {file(1, dict("<f4", "False", "(99999999999999999999, 1)")), "both must be positive numbers"},
		"extra bytes":          {file(1, dict("<f4", "False", "(1, 1)"), float32s(1, 2)...), "needs 4 bytes after the header, the file has 8"},
		"no number":            {file(1, dict("<f4", "False", "(2, 2)"), float32s(1, 2, 3, float32(math.NaN()))...), "row 1, column 1 is NaN"},
		"no dictionary":        {file(1, "nothing"), "has no descr"},
		"long header":          {append([]byte("\x93NUMPY\x02\x00"), 255, 255, 255, 255), "the maximum is 65536"},
	} {
		if _, err := Read(bytes.NewReader(test.content), int64(len(test.content))); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none.npy")); !os.IsNotExist(err) {
		t.Errorf("error %v", err)
	}
}

// FuzzRead checks for any bytes that reading ends with a matrix of the file's values or with an error.
func FuzzRead(f *testing.F) {
	f.Add(file(1, dict("<f4", "False", "(2, 1)"), float32s(1, 2)...))
	f.Add(file(2, dict("<f2", "False", "(1, 3)"), 0, 0, 0, 0, 0, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Read(bytes.NewReader(data), int64(len(data)))
		if err == nil && (len(m.Values) != m.Rows*m.Columns || len(m.Values)*2 > len(data)) {
			t.Fatalf("%d x %d has %d values of %d bytes", m.Rows, m.Columns, len(m.Values), len(data))
		}
	})
}

// TestWriteFloat16 compares every float16 number, and the rounding between two of them.
func TestWriteFloat16(t *testing.T) {
	raw := make([]byte, 2<<16)
	for i := range 1 << 16 {
		binary.LittleEndian.PutUint16(raw[2*i:], uint16(i))
	}
	values := make([]float32, 1<<16)
	checkpoint.DecodeFloat32(values, raw, checkpoint.F16)
	finite := slices.DeleteFunc(values, func(v float32) bool { return v-v != 0 })
	var out bytes.Buffer
	if err := WriteFloat16(&out, &Matrix{Rows: len(finite) / 4, Columns: 4, Values: finite}); err != nil {
		t.Fatal(err)
	}
	m, err := Read(bytes.NewReader(out.Bytes()), int64(out.Len()))
	if err != nil || m.Rows != len(finite)/4 || m.Columns != 4 || !slices.EqualFunc(m.Values, finite, func(a, b float32) bool {
		return math.Float32bits(a) == math.Float32bits(b)
	}) {
		t.Errorf("%d rows, %v", m.Rows, err)
	}
	if header := out.Bytes()[:bytes.IndexByte(out.Bytes(), '\n')+1]; len(header)%64 != 0 {
		t.Errorf("the header has %d bytes, want a multiple of 64", len(header))
	}
	for v, want := range map[float32]uint16{
		1 + 1.0/2048: 0x3c00, 1 + 3.0/2048: 0x3c02, 1 + 1.1/2048: 0x3c01, 65519: 0x7bff, 65520: 0x7c00, -1e9: 0xfc00,
		6.097e-5: 0x3ff, 6.1034e-5: 0x400, 2.98e-8: 0, 2.99e-8: 1, -1e-30: 0x8000, float32(math.NaN()): 0x7e00, float32(math.Inf(1)): 0x7c00,
	} {
		if got := float16(v); got != want {
			t.Errorf("%v: %#x, want %#x", v, got, want)
		}
	}
}
