// SPDX-License-Identifier: Apache-2.0

package embeddings

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/npy"
)

// tensor is a tensor of a test checkpoint: its type, its shape and the values of its rows.
type tensor struct {
	dtype  checkpoint.DType
	shape  []int64
	values []float32
}

// encoded returns the bytes of the tensor. Values of BF16 and F16 must be exact.
func (x tensor) encoded(t *testing.T) (out []byte) {
	t.Helper()
	for _, v := range x.values {
		switch bits := math.Float32bits(v); x.dtype {
		case checkpoint.F32:
			out = binary.LittleEndian.AppendUint32(out, bits)
		case checkpoint.BF16:
			out = binary.LittleEndian.AppendUint16(out, uint16(bits>>16))
		case checkpoint.F16:
			var file bytes.Buffer
			if err := npy.WriteFloat16(&file, &npy.Matrix{Rows: 1, Columns: 1, Values: []float32{v}}); err != nil {
				t.Fatal(err)
			}
			out = append(out, file.Bytes()[file.Len()-2:]...)
		default:
			out = append(out, byte(v))
		}
	}
	return out
}

// write writes a checkpoint with a vocabulary of 6 and the given tensors.
func write(t *testing.T, extra string, tensors map[string]tensor) string {
	t.Helper()
	dir := t.TempDir()
	config := `{"model_type":"qwen3_moe","num_hidden_layers":2,"num_experts":4,"num_experts_per_tok":2,"hidden_size":8,"vocab_size":6` + extra + `}`
	header, data := &checkpoint.Header{Tensors: map[string]checkpoint.Tensor{}}, []byte(nil)
	for name, x := range tensors {
		begin := int64(len(data))
		data = append(data, x.encoded(t)...)
		header.Tensors[name] = checkpoint.Tensor{DType: x.dtype, Shape: x.shape, Begin: begin, End: int64(len(data))}
	}
	text, err := checkpoint.EncodeHeader(header, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"config.json": []byte(config), "model.safetensors": append(checkpoint.FrameHeader(text), data...)} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// rows returns n rows of small powers of two, which every readable type stores exactly.
func rows(n, width int) []float32 {
	random := rand.New(rand.NewPCG(1, 2))
	values := make([]float32, n*width)
	for i := range values {
		values[i] = float32(math.Ldexp(float64(1-2*random.IntN(2)), -random.IntN(4)))
	}
	return values
}

// cosine returns the cosine of two rows.
func cosine(m *npy.Matrix, a, b int) float64 {
	var product, squareA, squareB float64
	for d := range m.Columns {
		x, y := float64(m.Values[a*m.Columns+d]), float64(m.Values[b*m.Columns+d])
		product, squareA, squareB = product+x*y, squareA+x*x, squareB+y*y
	}
	return product / math.Sqrt(squareA*squareB)
}

// centred returns the cosine of two rows after the mean row is subtracted, computed independently.
func centred(values []float32, tokens, width, a, b int) float64 {
	m := &npy.Matrix{Rows: tokens, Columns: width, Values: slices.Clone(values[:tokens*width])}
	for d := range width {
		mean := float32(0)
		for i := range tokens {
			mean += values[i*width+d] / float32(tokens)
		}
		for i := range tokens {
			m.Values[i*width+d] -= mean
		}
	}
	return cosine(m, a, b)
}

// TestExtract compares the cosines of short embeddings, which are not projected, with those of the tensor.
func TestExtract(t *testing.T) {
	const tokens, width = 6, 8
	values := rows(tokens+2, width) // two rows of padding
	for name, tc := range map[string]struct {
		tensor string
		dtype  checkpoint.DType
		config string
	}{
		"bfloat16":         {"model.embed_tokens.weight", checkpoint.BF16, ""},
		"float16":          {"model.embed_tokens.weight", checkpoint.F16, ""},
		"float32":          {"embed_tokens.weight", checkpoint.F32, ""},
		"Bailing":          {"model.word_embeddings.weight", checkpoint.BF16, ""},
		"Nemotron-H":       {"backbone.embeddings.weight", checkpoint.BF16, ""},
		"multimodal":       {"model.language_model.embed_tokens.weight", checkpoint.BF16, ""},
		"tied to the head": {"lm_head.weight", checkpoint.BF16, `,"tie_word_embeddings":true`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := write(t, tc.config, map[string]tensor{
				tc.tensor:                            {tc.dtype, []int64{tokens + 2, width}, values},
				"model.layers.2.embed_tokens.weight": {checkpoint.F32, []int64{1, 1}, []float32{1}}, // multi-token prediction
				"visual.embeddings.weight":           {checkpoint.F32, []int64{1, 1}, []float32{1}},
				"model.norm.weight":                  {checkpoint.F32, []int64{1}, []float32{1}},
			})
			m, err := Extract(t.Context(), dir, "")
			if err != nil {
				t.Fatal(err)
			}
			if m.Rows != tokens || m.Columns != width {
				t.Fatalf("shape (%d, %d), want (%d, %d)", m.Rows, m.Columns, tokens, width)
			}
			for a := range tokens {
				for b := range a {
					if got, want := cosine(m, a, b), centred(values, tokens, width, a, b); math.Abs(got-want) > 1e-5 {
						t.Errorf("tokens %d and %d have the cosine %v, want %v", a, b, got, want)
					}
				}
			}
		})
	}
}

// TestExtractRefuses checks that damaged and odd tensors are refused with the tensor and the reason.
func TestExtractRefuses(t *testing.T) {
	const tokens, width = 6, 8
	plain := rows(tokens, width)
	damaged := slices.Clone(plain)
	damaged[3*width+2] = float32(math.NaN())
	endless := slices.Clone(plain)
	endless[5*width] = float32(math.Inf(-1))
	one := func(x tensor) map[string]tensor { return map[string]tensor{"model.embed_tokens.weight": x} }
	for name, tc := range map[string]struct {
		tensors map[string]tensor
		want    string
	}{
		"none":            {map[string]tensor{"lm_head.weight": {checkpoint.F32, []int64{6, 8}, plain}}, "has no tensor of token embeddings"},
		"quantized":       {one(tensor{"F8_E4M3", []int64{6, 8}, plain}), "model.embed_tokens.weight is F8_E4M3: quantized embeddings are not read"},
		"packed":          {map[string]tensor{"model.embed_tokens.qweight": {"I8", []int64{6, 8}, plain}}, "has no tensor of token embeddings"},
		"not a matrix":    {one(tensor{checkpoint.F32, []int64{6, 2, 4}, plain}), "has shape [6 2 4]; allowed is [vocabulary, 1 to 32768]"},
		"empty rows":      {one(tensor{checkpoint.F32, []int64{6, 0}, nil}), "has shape [6 0]"},
		"split vocab":     {one(tensor{checkpoint.F32, []int64{3, 8}, plain[:24]}), "has 3 rows, the vocabulary has 6 token IDs: embeddings that are split by vocabulary"},
		"not a number":    {one(tensor{checkpoint.F32, []int64{6, 8}, damaged}), "row 3, column 2 is NaN"},
		"infinity":        {one(tensor{checkpoint.BF16, []int64{6, 8}, endless}), "row 5, column 0 is -Inf"},
		"all equal":       {one(tensor{checkpoint.F32, []int64{6, 8}, slices.Repeat([]float32{1}, 48)}), "all token embeddings are equal"},
		"all zero":        {one(tensor{checkpoint.F32, []int64{6, 8}, make([]float32, 48)}), "all token embeddings are equal"},
		"several models":  {map[string]tensor{"model.embed_tokens.weight": {checkpoint.F32, []int64{6, 8}, plain}, "thinker.model.embed_tokens.weight": {checkpoint.F32, []int64{6, 8}, plain}}, "several tensors of token embeddings: model.embed_tokens.weight, thinker.model.embed_tokens.weight"},
		"in a layer only": {map[string]tensor{"model.layers.2.embed_tokens.weight": {checkpoint.F32, []int64{6, 8}, plain}}, "has no tensor of token embeddings"},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := Extract(t.Context(), write(t, "", tc.tensors), "")
			if m != nil && err == nil || !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
	if _, err := Extract(t.Context(), t.TempDir(), ""); !checkpoint.IsInvalid(err) {
		t.Errorf("no checkpoint: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Extract(ctx, write(t, "", one(tensor{checkpoint.F32, []int64{6, 8}, plain})), ""); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestProjection compares cosines before and after the projection of long embeddings, in several blocks of rows.
func TestProjection(t *testing.T) {
	const tokens, width = 6, 1 << 11
	random := rand.New(rand.NewPCG(3, 4))
	values := make([]float32, tokens*width)
	for i := range values {
		common, own := float32(5), float32(random.NormFloat64())
		if token := i / width; token%2 == 1 { // each odd token is similar to the one before it
			own = (values[i-width] - common + float32(random.NormFloat64())) / math.Sqrt2
		}
		values[i] = common + own
	}
	dir := write(t, "", map[string]tensor{"model.embed_tokens.weight": {checkpoint.F32, []int64{tokens, width}, values}})
	m, err := Extract(t.Context(), dir, "")
	if err != nil {
		t.Fatal(err)
	}
	again, err := Extract(t.Context(), dir, "")
	if err != nil || !slices.Equal(m.Values, again.Values) {
		t.Errorf("a second extraction gives other vectors, %v", err)
	}
	if m.Columns != Dimensions {
		t.Fatalf("%d columns, want %d", m.Columns, Dimensions)
	}
	const tolerance = 1e-3 // fewer than Dimensions components contain all of the variance
	for a := range tokens {
		for b := range a {
			want := centred(values, tokens, width, a, b)
			if got := cosine(m, a, b); math.Abs(got-want) > tolerance {
				t.Errorf("tokens %d and %d have the cosine %.3f, want %.3f", a, b, got, want)
			}
		}
	}
	var file bytes.Buffer
	if err := npy.WriteFloat16(&file, m); err != nil || file.Len() > MaxBytes {
		t.Errorf("%d bytes, %v", file.Len(), err)
	}
}

// TestPaddingHasNoDirection checks that zero rows stay zero, and do not shift the mean of the others.
func TestPaddingHasNoDirection(t *testing.T) {
	const tokens, width = 6, 8
	values := rows(tokens, width)
	clear(values[4*width:])
	m, err := Extract(t.Context(), write(t, "", map[string]tensor{"model.embed_tokens.weight": {checkpoint.F32, []int64{tokens, width}, values}}), "")
	if err != nil {
		t.Fatal(err)
	}
	for i := 4 * width; i < tokens*width; i++ {
		if m.Values[i] != 0 {
			t.Fatalf("padding has the value %v", m.Values[i])
		}
	}
	if got, want := cosine(m, 0, 1), centred(values, 4, width, 0, 1); math.Abs(got-want) > 1e-5 {
		t.Errorf("cosine %v, want %v", got, want)
	}
}

func ExampleExtract() {
	m, err := Extract(context.Background(), "../../refengine/testdata/tiny-qwen3moe", "")
	fmt.Println(m.Rows, m.Columns, err)
	// Output: 4096 128 <nil>
}

func BenchmarkProjection(b *testing.B) {
	const width = 4096
	p, row, dst := newProjection(rows(256, width), width), rows(1, width), make([]float32, Dimensions)
	b.SetBytes(width * 2)
	for b.Loop() {
		clear(dst)
		p.apply(dst, row)
	}
}
