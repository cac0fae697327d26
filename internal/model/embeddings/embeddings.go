// SPDX-License-Identifier: Apache-2.0

// Package embeddings extracts from a checkpoint vectors by which token IDs are similar: the rows of the token
// embeddings, projected to at most Dimensions principal components, centred and scaled to length 1.
//
// The cosine of two vectors approximates the cosine of the centred embeddings. Centring matters: embeddings share a
// large common component, so that all of them are similar without it.
//
// Invariants:
//   - The tensor is read once, in blocks of rows, after a sample of its rows. Memory is bounded by the result as
//     float32 (4 × Dimensions bytes for each token ID), one block, the sample and the basis (10 KB for each number of a
//     row).
//   - The sample and the seed are fixed, so the same checkpoint always gives the same vectors.
//   - A tensor that cannot be read as token embeddings is an error of checkpoint.Invalidf. No caller fails because of
//     it: vectors only improve a plan.
package embeddings

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/family"
	"github.com/semmoe/operator/internal/model/npy"
)

const (
	// Dimensions is the maximum length of a vector. Longer embeddings are projected.
	Dimensions = 128
	// MaxTokens is the maximum size of a vocabulary, as in a routing trace.
	MaxTokens = 1 << 20
	// MaxBytes is the maximum size of the result, as a .npy file of float16 numbers.
	MaxBytes = MaxTokens*Dimensions*2 + 1<<10

	// maxWidth is the maximum length of an embedding. The largest known models have 16,384.
	maxWidth = 1 << 15
	// blockBytes is the size of the rows that are read together.
	blockBytes = 1 << 20
)

// names lists the modules that contain token embeddings.
var names = []string{"embed_tokens", "word_embeddings", "embeddings", "embed"}

// readable lists the element types of embeddings that can be read. Values of other types have scales in further
// tensors.
var readable = []checkpoint.DType{checkpoint.BF16, checkpoint.F16, checkpoint.F32}

// Extract returns the vectors of the token IDs of a checkpoint. layoutAs is the known model type whose layout the
// checkpoint has; empty means its own.
func Extract(ctx context.Context, dir, layoutAs string) (*npy.Matrix, error) {
	c, err := checkpoint.OpenAs(dir, layoutAs)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	source, err := find(c)
	if err != nil {
		return nil, err
	}
	m, err := source.project(ctx)
	if err != nil {
		return nil, err
	}
	return m, centre(m)
}

// source is the tensor of the token embeddings.
type source struct {
	name   string
	file   *checkpoint.File
	tensor checkpoint.Tensor
	// tokens is the vocabulary. Further rows are padding.
	tokens, width int
}

// find returns the tensor of the token embeddings.
func find(c *checkpoint.Checkpoint) (*source, error) {
	found, file, err := named(c)
	if err != nil {
		return nil, err
	}
	t, tokens := file.Tensors[found], c.Config.VocabSize
	switch {
	case !slices.Contains(readable, t.DType):
		return nil, checkpoint.Invalidf("tensor %s is %s: quantized embeddings are not read; allowed is BF16, F16, F32", found, t.DType)
	case len(t.Shape) != 2 || t.Shape[1] < 1 || t.Shape[1] > maxWidth:
		return nil, checkpoint.Invalidf("tensor %s has shape %v; allowed is [vocabulary, 1 to %d]", found, t.Shape, maxWidth)
	case tokens < 1 || tokens > MaxTokens:
		return nil, checkpoint.Invalidf("the vocabulary has %d token IDs; allowed is 1 to %d", tokens, MaxTokens)
	case t.Shape[0] < int64(tokens):
		return nil, checkpoint.Invalidf("tensor %s has %d rows, the vocabulary has %d token IDs: embeddings that are split by vocabulary are not read", found, t.Shape[0], tokens)
	}
	return &source{name: found, file: file, tensor: t, tokens: tokens, width: int(t.Shape[1])}, nil
}

// named returns the name of the tensor of the token embeddings: the one of the language model, or the output projection
// that is tied to it.
func named(c *checkpoint.Checkpoint) (string, *checkpoint.File, error) {
	var found []string
	files := map[string]*checkpoint.File{}
	for _, shard := range c.Shards {
		for name := range shard.Tensors {
			if isOf(name, names) || c.Config.TiedEmbeddings && isOf(name, []string{"lm_head"}) {
				found, files[name] = append(found, name), shard
			}
		}
	}
	if embedded := slices.DeleteFunc(slices.Clone(found), func(name string) bool { return !isOf(name, names) }); len(embedded) > 0 {
		found = embedded
	}
	slices.Sort(found)
	switch len(found) {
	case 0:
		return "", nil, checkpoint.Invalidf("the checkpoint has no tensor of token embeddings, such as model.embed_tokens.weight, that is not quantized or split")
	case 1:
		return found[0], files[found[0]], nil
	}
	return "", nil, checkpoint.Invalidf("the checkpoint has several tensors of token embeddings: %s", strings.Join(found[:min(len(found), 4)], ", "))
}

// isOf reports whether a tensor is the weight of one of the modules in the language model itself, and not in a layer or
// in another model next to it.
func isOf(tensor string, modules []string) bool {
	path := strings.Split(tensor, ".")
	n := len(path)
	if n < 2 || path[n-1] != "weight" || !slices.Contains(modules, path[n-2]) {
		return false
	}
	return !slices.ContainsFunc(path[:n-2], func(outer string) bool { return !slices.Contains(family.RootPrefixes, outer) })
}

// project reads the tensor and returns its projected rows.
func (s *source) project(ctx context.Context) (*npy.Matrix, error) {
	p, err := s.projection()
	if err != nil {
		return nil, err
	}
	m := &npy.Matrix{Rows: s.tokens, Columns: p.to, Values: make([]float32, s.tokens*p.to)}
	rows := max(1, blockBytes/(4*s.width))
	values := make([]float32, rows*s.width)
	for first := 0; first < s.tokens; first += rows {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		block := values[:min(rows, s.tokens-first)*s.width]
		if err := s.read(block, first); err != nil {
			return nil, err
		}
		p.applyAll(m.Values[first*p.to:first*p.to+len(block)/s.width*p.to], block)
	}
	return m, nil
}

// projection returns the projection for the tensor, computed from rows at equal distances.
func (s *source) projection() (*projection, error) {
	if s.width <= Dimensions {
		return newProjection(nil, s.width), nil
	}
	n := min(s.tokens, sampledRows)
	sample := make([]float32, n*s.width)
	for i := range n {
		if err := s.read(sample[i*s.width:(i+1)*s.width], i*s.tokens/n); err != nil {
			return nil, err
		}
	}
	return newProjection(sample, s.width), nil
}

// read reads whole rows from the given one on, as many as fit into dst.
func (s *source) read(dst []float32, first int) error {
	rowBytes := (s.tensor.End - s.tensor.Begin) / s.tensor.Shape[0]
	raw := make([]byte, int64(len(dst)/s.width)*rowBytes)
	if _, err := s.file.Handle().ReadAt(raw, s.file.DataStart()+s.tensor.Begin+int64(first)*rowBytes); err != nil {
		return fmt.Errorf("failed to read tensor %s: %w", s.name, err)
	}
	checkpoint.DecodeFloat32(dst, raw, s.tensor.DType)
	if at := slices.IndexFunc(dst, func(v float32) bool { return v-v != 0 }); at >= 0 { // an infinity or NaN
		return checkpoint.Invalidf("tensor %s, row %d, column %d is %v; every number must be finite", s.name, first+at/s.width, at%s.width, dst[at])
	}
	return nil
}

// centre subtracts the mean of all rows, and scales rows to length 1. Zero rows are padding, and stay zero.
func centre(m *npy.Matrix) error {
	mean, rows := make([]float64, m.Columns), 0
	padding := make([]bool, m.Rows)
	for i := range m.Rows {
		row := m.Values[i*m.Columns : (i+1)*m.Columns]
		if padding[i] = !slices.ContainsFunc(row, func(v float32) bool { return v != 0 }); padding[i] {
			continue
		}
		for d, v := range row {
			mean[d] += float64(v)
		}
		rows++
	}
	distinct := false
	for i := range m.Rows {
		if padding[i] {
			continue
		}
		row, squares := m.Values[i*m.Columns:(i+1)*m.Columns], 0.0
		for d, v := range row {
			difference := float64(v) - mean[d]/float64(rows)
			row[d] = float32(difference)
			squares += difference * difference
		}
		length := math.Sqrt(squares)
		for d := range row {
			if length > 0 {
				row[d] = float32(float64(row[d]) / length)
			}
		}
		distinct = distinct || length > 0
	}
	if !distinct {
		return checkpoint.Invalidf("all token embeddings are equal")
	}
	return nil
}
