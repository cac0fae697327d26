// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
)

var (
	inLayer  = regexp.MustCompile(`^(.*layers\.(\d+)\.)(.*)$`)
	ofExpert = regexp.MustCompile(`^(mlp|block_sparse_moe)\.experts\.(\d+)\.(.*)$`)
	byRows   = regexp.MustCompile(`^(mlp|block_sparse_moe)\.((gate|router)\.(weight|bias|e_score_correction_bias)|experts\.(gate_up|down)_proj(_bias|_blocks|_scales)?)$`)
)

// expected computes the expected content of the output from the definition. It shares no code with the product.
func expected(in map[string]tensor, p *Permutation) map[string]tensor {
	permutations := map[int][]int{}
	for _, layer := range p.Layers {
		permutations[layer.Layer] = layer.NewToOld
	}
	out := map[string]tensor{}
	for name := range in {
		out[name] = expectedTensor(in, permutations, name)
	}
	return out
}

func expectedTensor(in map[string]tensor, permutations map[int][]int, name string) tensor {
	parts := inLayer.FindStringSubmatch(name)
	if parts == nil {
		return in[name]
	}
	layer, _ := strconv.Atoi(parts[2])
	if bytes.HasPrefix([]byte(name), []byte("mtp.")) {
		layer += testLayers
	}
	newToOld := permutations[layer]
	if newToOld == nil {
		return in[name]
	}
	if expert := ofExpert.FindStringSubmatch(parts[3]); expert != nil {
		j, _ := strconv.Atoi(expert[2])
		return in[fmt.Sprintf("%s%s.experts.%d.%s", parts[1], expert[1], newToOld[j], expert[3])]
	}
	if !byRows.MatchString(parts[3]) {
		return in[name]
	}
	x := in[name]
	rows := slices.Collect(slices.Chunk(x.data, len(x.data)/len(newToOld)))
	var data []byte
	for _, old := range newToOld {
		data = append(data, rows[old]...)
	}
	return tensor{x.dtype, x.shape, data}
}

func sameTensors(t *testing.T, want, got map[string]tensor) {
	t.Helper()
	for name, x := range want {
		y, ok := got[name]
		switch {
		case !ok:
			t.Errorf("tensor %s is missing", name)
		case x.dtype != y.dtype || !slices.Equal(x.shape, y.shape) || !bytes.Equal(x.data, y.data):
			t.Errorf("tensor %s differs", name)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d tensors, want %d", len(got), len(want))
	}
}

func mustRun(t *testing.T, o Options) *Result {
	t.Helper()
	result, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// TestFamilies checks for every family, tensor by tensor, that expert tensors and gate rows move, that all other
// tensors are unchanged, and that the inverse permutation restores the original.
func TestFamilies(t *testing.T) {
	for name, generate := range generators {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(4) {
				m := generate(seed)
				layers := m.layers
				if seed > 0 {
					layers = layers[:1+m.rng.IntN(len(layers))]
				}
				p := m.permutation(layers...)
				// All tensors in one file, or in several.
				model := m.write(t, []int{1 << 20, 5, 20, 50}[seed])
				base := t.TempDir()
				out, back := filepath.Join(base, "out"), filepath.Join(base, "back")
				result := mustRun(t, Options{Model: model, Permutation: p, Out: out, Verify: seed%2 == 0})
				if result.Layers != len(layers) || result.Reused {
					t.Errorf("result %+v", result)
				}
				sameTensors(t, expected(m.tensors, p), readAll(t, out))
				mustRun(t, Options{Model: out, Permutation: inverseOf(p), Out: back})
				sameTensors(t, m.tensors, readAll(t, back))
				for _, file := range []string{checkpoint.ConfigFile, checkpoint.IndexFile} {
					sameFile(t, filepath.Join(model, file), filepath.Join(back, file))
				}
			}
		})
	}
}

func sameFile(t *testing.T, a, b string) {
	t.Helper()
	textA, err := os.ReadFile(a)
	if err != nil {
		t.Fatal(err)
	}
	textB, err := os.ReadFile(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(textA), string(textB)); diff != "" {
		t.Errorf("%s and %s: %s", a, b, diff)
	}
}

// TestHeaderGrowth has shards with only experts 0 to 9, which get longer names. The data must be shifted by whole
// blocks.
func TestHeaderGrowth(t *testing.T) {
	m := generators["olmoe"](1)
	model := m.write(t, 5)
	p := m.permutation(m.layers...)
	out := filepath.Join(t.TempDir(), "out")
	mustRun(t, Options{Model: model, Permutation: p, Out: out, Verify: true})
	before, err := checkpoint.Open(model)
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	after, err := checkpoint.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer after.Close()
	grown := 0
	for i, shard := range after.Shards {
		shift := shard.DataStart() - before.Shards[i].DataStart()
		if shift%blockBytes != 0 || shift < 0 || shard.Size-before.Shards[i].Size != shift {
			t.Errorf("%s: the data moved by %d, the size grew by %d", shard.Name(), shift, shard.Size-before.Shards[i].Size)
		}
		if shift > 0 {
			grown++
		}
	}
	if grown == 0 {
		t.Error("no header grew: the test checks nothing")
	}
}

// TestSingleFile checks that an output without an index in the input gets none.
func TestSingleFile(t *testing.T) {
	m := generators["mixtral in GPTQ"](3)
	p := m.permutation(m.layers...)
	model := m.write(t, 1<<20)
	if err := os.Remove(filepath.Join(model, checkpoint.IndexFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(model, "model-00001.safetensors"), filepath.Join(model, "model.safetensors")); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	mustRun(t, Options{Model: model, Permutation: p, Out: out})
	sameTensors(t, expected(m.tensors, p), readAll(t, out))
	if _, err := os.Stat(filepath.Join(out, checkpoint.IndexFile)); !os.IsNotExist(err) {
		t.Errorf("index: %v", err)
	}
}

// TestBufferedCopy uses the code path for file systems that support neither clones nor copies in the kernel.
func TestBufferedCopy(t *testing.T) {
	for _, name := range []string{"deepseek_v3 in FP8, with groups and multi-token prediction", "gpt_oss in MXFP4"} {
		m := generators[name](5)
		p := m.permutation(m.layers...)
		j, err := newJob(t.Context(), Options{Model: m.write(t, 9), Permutation: p, Out: filepath.Join(t.TempDir(), "out")})
		if err != nil {
			t.Fatal(err)
		}
		if j.lock, err = filelock.Wait(t.Context(), hidden(j.out, lockSuffix)); err != nil {
			t.Fatal(err)
		}
		defer j.lock.Release()
		j.copier.noClone.Store(true)
		j.copier.noRange.Store(true)
		result, err := j.run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if result.Method != "buffered" {
			t.Errorf("method %s", result.Method)
		}
		sameTensors(t, expected(m.tensors, p), readAll(t, j.out))
	}
}
