// SPDX-License-Identifier: Apache-2.0

// Package vllm compares checkpoints and their permutations on vLLM itself.
package vllm

import (
	"flag"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/test/python"
)

var environment = flag.String("vllm", "", "directory of the virtual environment with vLLM (test/vllm/install.sh); the tests are skipped without it")

// families are two of those that vLLM's CPU build runs: with a correction bias, and with all experts in one tensor.
var families = []string{"ernie4_5_moe", "granitemoe"}

// maxDifference is the maximum difference of log-probabilities. Sums in another order change float32 values by about
// 1e-6.
const maxDifference, minFault = 1e-4, 1e-2

// TestPermuted checks that vLLM answers alike from a checkpoint and from its permutation, and differently from a
// checkpoint whose gates are not permuted.
func TestPermuted(t *testing.T) {
	if *environment == "" {
		t.Skip("-args -vllm names no environment: make e2e-vllm")
	}
	interpreter, dir := filepath.Join(*environment, "bin/python"), t.TempDir()
	python.Run(t, interpreter, "../transformers/checkpoints.py", append([]string{dir}, families...)...)
	type answer struct {
		Error    string
		Tokens   []int
		Logprobs []float64
	}
	difference := func(a, b answer) float64 {
		largest := 0.0
		for i := range a.Logprobs {
			largest = max(largest, math.Abs(a.Logprobs[i]-b.Logprobs[i]))
		}
		return largest
	}
	for _, family := range families {
		model := filepath.Join(dir, family, "published")
		reordered, wrong := permute(t, model), filepath.Join(dir, family, "faulty")
		restoreGates(t, model, reordered, wrong)
		answers := python.Lines[answer](t, interpreter, "answers.py", model, reordered, wrong)
		for _, a := range answers {
			if a.Error != "" || len(a.Logprobs) == 0 || len(a.Logprobs) != len(a.Tokens) || len(a.Tokens) != len(answers[0].Tokens) {
				t.Fatalf("%s: %+v", family, answers)
			}
		}
		plain, permuted, faulty := answers[0], answers[1], answers[2]
		d := difference(plain, permuted)
		t.Logf("%s: log-probabilities of %d tokens differ by at most %.1e", family, len(plain.Tokens), d)
		if !slices.Equal(plain.Tokens, permuted.Tokens) || d > maxDifference {
			t.Errorf("%s: answers %+v, permuted %+v", family, plain, permuted)
		}
		if d := difference(plain, faulty); d < minFault {
			t.Errorf("%s: gates in the old order change log-probabilities only by %g: the checkpoint does not test the order", family, d)
		}
	}
}

// permute reverses the order of the experts of each layer, and returns the output.
func permute(t *testing.T, model string) string {
	t.Helper()
	report, err := checkpoint.Inspect(model)
	if err != nil || report.Unpermutable != "" || len(report.MoELayers) == 0 {
		t.Fatalf("%s: report %+v, error %v", model, report, err)
	}
	permutation := &reshuffle.Permutation{}
	for _, layer := range report.MoELayers {
		var order []int
		for e := range report.Experts {
			order = append(order, report.Experts-1-e)
		}
		permutation.Layers = append(permutation.Layers, reshuffle.LayerPermutation{Layer: layer, NewToOld: order})
	}
	out := model + "-permuted"
	if _, err := reshuffle.Run(t.Context(), reshuffle.Options{Model: model, Permutation: permutation, Out: out, Verify: true}); err != nil {
		t.Fatal(err)
	}
	return out
}

// restoreGates copies a permuted checkpoint to out, with the gates of the model.
func restoreGates(t *testing.T, model, permuted, out string) {
	t.Helper()
	if err := os.CopyFS(out, os.DirFS(permuted)); err != nil {
		t.Fatal(err)
	}
	from, err := checkpoint.Open(model)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := checkpoint.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	restored := 0
	for _, shard := range to.Shards {
		file, err := os.OpenFile(shard.Path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		for name, tensor := range shard.Tensors {
			if to.Config.Classify(name).Role != checkpoint.Gate {
				continue
			}
			source, ok := from.Shard(name)
			if !ok {
				t.Fatalf("%s is missing in %s", name, model)
			}
			data := make([]byte, tensor.End-tensor.Begin)
			if _, err := source.Handle().ReadAt(data, source.DataStart()+source.Tensors[name].Begin); err != nil {
				t.Fatal(err)
			}
			if _, err := file.WriteAt(data, shard.DataStart()+tensor.Begin); err != nil {
				t.Fatal(err)
			}
			restored++
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if restored == 0 {
		t.Fatal("no gate is restored: the test checks nothing")
	}
}
