// SPDX-License-Identifier: Apache-2.0

package transformers

import (
	"math"
	"path/filepath"
	"slices"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/family"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/test/python"
)

// unknownToTransformers lists the families that the installed transformers cannot write.
var unknownToTransformers = []string{"kimi_k2", "mimo_v2", "bailing_moe", "bailing_moe_v2"}

// maxDifference is the maximum difference of logits between a checkpoint and its permutation. Float32 sums in another
// order differ by less than 1e-5 for these models; misplaced experts change logits by more than 1e-2.
const maxDifference, minFault = 1e-4, 1e-3

// TestPermuted lets transformers write a checkpoint of each family, in the published and in its own tensor names, and
// compares the logits of each checkpoint with those of its permutation.
func TestPermuted(t *testing.T) {
	if *interpreter == "" {
		t.Skip("-args -python names no interpreter: make test-transformers")
	}
	dir := t.TempDir()
	python.Run(t, *interpreter, "checkpoints.py", dir)
	models, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	seen := slices.Clone(unknownToTransformers)
	var paths []string
	for _, model := range models {
		report, err := checkpoint.Inspect(model)
		if err != nil || report.Unpermutable != "" || len(report.MoELayers) == 0 {
			t.Errorf("%s: report %+v, error %v", model, report, err)
			continue
		}
		seen = append(seen, report.Family)
		permutation := &reshuffle.Permutation{}
		for _, layer := range report.MoELayers {
			permutation.Layers = append(permutation.Layers, reshuffle.LayerPermutation{Layer: layer, NewToOld: reordered(report.Experts, report.Groups)})
		}
		out := model + "-permuted"
		if _, err := reshuffle.Run(t.Context(), reshuffle.Options{Model: model, Permutation: permutation, Out: out, Verify: true}); err != nil {
			t.Errorf("%s: %v", model, err)
			continue
		}
		paths = append(paths, model, out)
	}
	for _, known := range family.Types() {
		if !slices.Contains(seen, known) {
			t.Errorf("no checkpoint of %s is permuted: add it to checkpoints.py", known)
		}
	}
	type output struct{ Logits, Misplaced []float64 }
	outputs := python.Lines[output](t, *interpreter, "logits.py", paths...)
	for i := 0; i < len(paths); i += 2 {
		plain, permuted := outputs[i], outputs[i+1]
		name, _ := filepath.Rel(dir, paths[i])
		if d := difference(plain.Logits, permuted.Logits); d > maxDifference {
			t.Errorf("%s: permuted logits differ by %g", name, d)
		}
		if d := difference(plain.Logits, plain.Misplaced); d < minFault {
			t.Errorf("%s: misplaced experts change logits only by %g: the checkpoint does not test the order", name, d)
		}
	}
}

// reordered returns an order of experts in which each group moves and each of its experts changes its place.
func reordered(experts, groups int) []int {
	var order []int
	size := experts / groups
	for group := range groups {
		for member := range size {
			order = append(order, (group+1)%groups*size+size-1-member)
		}
	}
	return order
}

// difference returns the maximum difference of two lists, and infinity for lists of different lengths or a NaN.
func difference(a, b []float64) float64 {
	if len(a) != len(b) || len(a) == 0 {
		return math.Inf(1)
	}
	largest := 0.0
	for i := range a {
		d := math.Abs(a[i] - b[i])
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		largest = max(largest, d)
	}
	return largest
}
