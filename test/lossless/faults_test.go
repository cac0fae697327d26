// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/refengine/model"
)

const tinyModel = "../../internal/refengine/testdata/tiny-qwen3moe"

// logits returns the logits of a short prompt.
func logits(t *testing.T, dir string) []float32 {
	t.Helper()
	c, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m, err := model.Load(c, 0)
	if err != nil {
		t.Fatal(err)
	}
	tokens := []int32{5, 80, 300, 1200, 77, 9, 2048, 31}
	chunk := model.Chunk{Cache: m.NewCache(len(tokens)), Tokens: tokens, Routes: make([]uint16, len(tokens)*m.Layers*m.TopK), Logits: make([]float32, m.Vocab)}
	if err := m.NewRunner(1).Step([]model.Chunk{chunk}); err != nil {
		t.Fatal(err)
	}
	return chunk.Logits
}

func farthest(a, b []float32) (most float32) {
	for i := range a {
		most = max(most, max(a[i]-b[i], b[i]-a[i]))
	}
	return most
}

// TestFaultsChangeOutputs checks that each fault except the smallest changes every output, that no fault changes the
// original checkpoint, and that an order of gate rows and its inverse restore the outputs.
func TestFaultsChangeOutputs(t *testing.T) {
	right := logits(t, tinyModel)
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(7, 7))
			p := &reshuffle.Permutation{}
			for layer := range 4 {
				p.Layers = append(p.Layers, reshuffle.LayerPermutation{Layer: layer, NewToOld: random.Perm(32)})
			}
			out := filepath.Join(t.TempDir(), "permuted")
			if _, err := reshuffle.Run(t.Context(), reshuffle.Options{Model: tinyModel, Permutation: p, Out: out}); err != nil {
				t.Fatal(err)
			}
			if d := farthest(right, logits(t, out)); d > 1e-3 {
				t.Fatalf("the permuted checkpoint differs by %v", d)
			}
			if err := f.plant(out, p, random); err != nil {
				t.Fatal(err)
			}
			if d := farthest(right, logits(t, out)); d < 1e-3 && f.name != faults[0].name {
				t.Errorf("outputs with the fault differ by %v", d)
			}
		})
	}
	if d := farthest(right, logits(t, tinyModel)); d != 0 {
		t.Errorf("the outputs of the original checkpoint changed by %v", d)
	}
}

func TestReorderGateIsUndoneByTheInverse(t *testing.T) {
	out := filepath.Join(t.TempDir(), "copy")
	order := rand.New(rand.NewPCG(8, 8)).Perm(32)
	if _, err := reshuffle.Run(t.Context(), reshuffle.Options{Model: tinyModel, Permutation: &reshuffle.Permutation{}, Out: out}); err != nil {
		t.Fatal(err)
	}
	for _, o := range [][]int{order, inverse(order)} {
		if err := reorderGate(out, 2, o); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(logits(t, out), logits(t, tinyModel)) {
		t.Error("an order and its inverse change the outputs")
	}
	if err := reorderGate(out, 9, order); err == nil {
		t.Error("reorderGate accepts a missing layer, want an error")
	}
}
