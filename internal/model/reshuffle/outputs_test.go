// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	refmodel "github.com/semmoe/operator/internal/refengine/model"
)

const tinyModel = "../../refengine/testdata/tiny-qwen3moe"

// generation is the output of a model for one prompt.
type generation struct {
	tokens []int32
	// logits are those of the prompt's last position. routes are the prompt's experts, [tokens][layers][top-k].
	logits []float32
	routes []uint16
}

func load(t *testing.T, dir string) *refmodel.Model {
	t.Helper()
	c, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m, err := refmodel.Load(c, 512)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// generate continues a prompt with greedy decoding.
func generate(t *testing.T, m *refmodel.Model, prompt []int32, length int) generation {
	t.Helper()
	runner, cache := m.NewRunner(2), m.NewCache(len(prompt)+length)
	var out generation
	next := prompt
	for range length {
		chunk := refmodel.Chunk{Cache: cache, Tokens: next, Routes: make([]uint16, len(next)*m.Layers*m.TopK), Logits: make([]float32, m.Vocab)}
		if err := runner.Step([]refmodel.Chunk{chunk}); err != nil {
			t.Fatal(err)
		}
		if out.logits == nil {
			out.logits, out.routes = chunk.Logits, chunk.Routes
		}
		best := 0
		for i, v := range chunk.Logits {
			if v > chunk.Logits[best] {
				best = i
			}
		}
		out.tokens = append(out.tokens, int32(best))
		next = []int32{int32(best)}
	}
	return out
}

func largestDifference(a, b []float32) float64 {
	var largest float64
	for i := range a {
		largest = max(largest, math.Abs(float64(a[i]-b[i])))
	}
	return largest
}

func prompts(t *testing.T) [][]int32 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(tinyModel, "golden.json"))
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases []struct {
			PromptIDs []int32 `json:"prompt_ids"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(text, &golden); err != nil || len(golden.Cases) == 0 {
		t.Fatalf("%d golden cases, %v", len(golden.Cases), err)
	}
	var list [][]int32
	for _, g := range golden.Cases {
		list = append(list, g.PromptIDs)
	}
	return list
}

// TestOutputsAreEqual runs a trained model before and after a permutation. Tokens and logits are equal, and routes
// differ only by the permutation.
func TestOutputsAreEqual(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	p := &Permutation{}
	for _, layer := range []int{0, 1, 3} {
		p.Layers = append(p.Layers, LayerPermutation{layer, rng.Perm(32)})
	}
	out := filepath.Join(t.TempDir(), "out")
	mustRun(t, Options{Model: tinyModel, Permutation: p, Out: out, Verify: true})
	before, after := load(t, tinyModel), load(t, out)
	newToOld := map[int][]int{}
	for _, layer := range p.Layers {
		newToOld[layer.Layer] = layer.NewToOld
	}
	routed, largest := 0, 0.0
	for i, prompt := range prompts(t) {
		want, got := generate(t, before, prompt, 24), generate(t, after, prompt, 24)
		for j := range want.tokens {
			if want.tokens[j] != got.tokens[j] {
				t.Errorf("prompt %d: token %d is %d, want %d", i, j, got.tokens[j], want.tokens[j])
			}
		}
		// The gate's softmax sums over the experts in order, so float32 rounds differently. The largest logits are
		// about 13, where one unit in the last place is 1e-6.
		scale := largestDifference(want.logits, make([]float32, len(want.logits)))
		if d := largestDifference(want.logits, got.logits); d > 1e-5*max(1, scale) {
			t.Errorf("prompt %d: logits differ by %g; the largest is %g", i, d, scale)
		}
		largest = max(largest, largestDifference(want.logits, got.logits)/max(1, scale))
		for j, expert := range got.routes {
			old := int(expert)
			if permutation := newToOld[j/before.TopK%before.Layers]; permutation != nil {
				old = permutation[expert]
			}
			if old != int(want.routes[j]) {
				t.Fatalf("prompt %d: route %d is expert %d, which was %d; want %d", i, j, expert, old, want.routes[j])
			}
			routed++
		}
	}
	t.Logf("%d routes compared; logits differ by at most %.2g of the largest", routed, largest)
	if routed == 0 {
		t.Error("no route was compared")
	}
	// Check that the comparison detects a wrong order: restore the old order of one gate.
	putGateBack(t, out, "model.layers.1.mlp.gate.weight")
	wrong := load(t, out)
	prompt := prompts(t)[0]
	if d := largestDifference(generate(t, before, prompt, 1).logits, generate(t, wrong, prompt, 1).logits); d < 1e-2 {
		t.Errorf("a gate in the wrong order changes logits by only %g", d)
	}
}

func putGateBack(t *testing.T, dir, name string) {
	t.Helper()
	c, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	shard, _ := c.Shard(name)
	file, err := os.OpenFile(shard.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteAt(readAll(t, tinyModel)[name].data, shard.DataStart()+shard.Tensors[name].Begin); err != nil {
		t.Fatal(err)
	}
}

// fuse writes the tiny model with all experts of a layer in two tensors of shape [experts, outputs, inputs], or
// [experts, inputs, outputs] if exchanged.
func fuse(t *testing.T, exchanged bool) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(tinyModel, checkpoint.ConfigFile))
	if err != nil {
		t.Fatal(err)
	}
	m := &model{tensors: map[string]tensor{}, rng: rand.New(rand.NewPCG(1, 1))}
	if err := json.Unmarshal(text, &m.config); err != nil {
		t.Fatal(err)
	}
	all := readAll(t, tinyModel)
	for name, x := range all {
		if ofExpert.FindStringSubmatch(inLayerRest(name)) == nil {
			m.tensors[name] = x
		}
	}
	for layer := range 4 {
		prefix := fmt.Sprintf("model.layers.%d.mlp.experts.", layer)
		for name, projections := range map[string][]string{"gate_up_proj": {"gate_proj", "up_proj"}, "down_proj": {"down_proj"}} {
			fused := tensor{dtype: "BF16", shape: []int64{32, 0, 0}}
			for e := range 32 {
				var rows []byte
				for _, projection := range projections {
					x := all[fmt.Sprintf("%s%d.%s.weight", prefix, e, projection)]
					rows = append(rows, x.data...)
					fused.shape[2] = x.shape[1]
				}
				fused.shape[1] = int64(len(rows)) / 2 / fused.shape[2]
				if exchanged {
					rows = transposed(rows, int(fused.shape[1]), int(fused.shape[2]))
				}
				fused.data = append(fused.data, rows...)
			}
			if exchanged {
				fused.shape[1], fused.shape[2] = fused.shape[2], fused.shape[1]
			}
			m.tensors[prefix+name] = fused
		}
	}
	return m.write(t, 10)
}

func inLayerRest(name string) string {
	if parts := inLayer.FindStringSubmatch(name); parts != nil {
		return parts[3]
	}
	return ""
}

// transposed transposes a BF16 matrix.
func transposed(data []byte, rows, cols int) []byte {
	out := make([]byte, len(data))
	for i := range rows {
		for j := range cols {
			copy(out[2*(j*rows+i):], data[2*(i*cols+j):][:2])
		}
	}
	return out
}

// TestRandomPermutations permutes a trained model, in each layout, by random permutations of random layers. The outputs
// stay equal, and the inverse permutation restores every byte.
func TestRandomPermutations(t *testing.T) {
	prompt := prompts(t)[0]
	want := generate(t, load(t, tinyModel), prompt, 8)
	rng := rand.New(rand.NewPCG(3, 5))
	for name, dir := range map[string]string{"separate": tinyModel, "fused": fuse(t, false), "fused, exchanged": fuse(t, true)} {
		t.Run(name, func(t *testing.T) {
			if got := generate(t, load(t, dir), prompt, 8); !slices.Equal(got.tokens, want.tokens) || largestDifference(got.logits, want.logits) > 0 {
				t.Fatalf("tokens %v, want %v; logits differ by %g", got.tokens, want.tokens, largestDifference(got.logits, want.logits))
			}
			for range 3 {
				p := &Permutation{}
				for _, layer := range rng.Perm(4)[:1+rng.IntN(4)] {
					p.Layers = append(p.Layers, LayerPermutation{layer, rng.Perm(32)})
				}
				base := t.TempDir()
				out, back := filepath.Join(base, "out"), filepath.Join(base, "back")
				mustRun(t, Options{Model: dir, Permutation: p, Out: out, Verify: true})
				mustRun(t, Options{Model: out, Permutation: inverseOf(p), Out: back, Verify: true})
				got := generate(t, load(t, out), prompt, 8)
				scale := largestDifference(want.logits, make([]float32, len(want.logits)))
				if !slices.Equal(got.tokens, want.tokens) || largestDifference(got.logits, want.logits) > 1e-5*max(1, scale) {
					t.Errorf("tokens %v, want %v; logits differ by %g", got.tokens, want.tokens, largestDifference(got.logits, want.logits))
				}
				sameTensors(t, readAll(t, dir), readAll(t, back))
				for _, file := range []string{checkpoint.ConfigFile, checkpoint.IndexFile} {
					sameFile(t, filepath.Join(dir, file), filepath.Join(back, file))
				}
			}
		})
	}
}
