// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

func TestParsePermutationRefuses(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"not JSON":         {`{`, "not a gate permutation"},
		"array":            {`[]`, "the text is a JSON array; it must be as in"},
		"no layers":        {`{}`, "layers is missing"},
		"unknown field":    {`{"layers":[],"layer_count":3}`, `unknown field "layer_count"`},
		"text after":       {`{"layers":[]} x`, "text after"},
		"no layer":         {`{"layers":[{"new_to_old":[0]}]}`, "layers[0] needs layer and new_to_old"},
		"no permutation":   {`{"layers":[{"layer":1}]}`, "layers[0] needs layer and new_to_old"},
		"negative layer":   {`{"layers":[{"layer":-1,"new_to_old":[0]}]}`, "layer -1 is negative"},
		"layer twice":      {`{"layers":[{"layer":1,"new_to_old":[0]},{"layer":1,"new_to_old":[0]}]}`, "layer 1 is negative or listed twice"},
		"expert twice":     {`{"layers":[{"layer":1,"new_to_old":[0,2,2]}]}`, "layer 1: new_to_old is not a permutation: value 2 is at both 1 and 2"},
		"expert too large": {`{"layers":[{"layer":1,"new_to_old":[0,3,1]}]}`, "new_to_old[1] is 3; allowed is 0 to 2"},
		"negative expert":  {`{"layers":[{"layer":1,"new_to_old":[0,-1]}]}`, "new_to_old[1] is -1"},
		"not an integer":   {`{"layers":[{"layer":1,"new_to_old":[0,0.5]}]}`, "new_to_old is a JSON number 0.5; it must be as in"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "gate-permutation.json")
			writeFile(t, path, []byte(test.text))
			_, err := ReadPermutation(path)
			if !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v, want an invalid error that names the file and has %q", err, test.want)
			}
		})
	}
	if _, err := ReadPermutation(filepath.Join(t.TempDir(), "none")); !checkpoint.IsInvalid(err) {
		t.Errorf("missing file: %v", err)
	}
}

func TestInverse(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		p := &Permutation{Layers: []LayerPermutation{{3, rng.Perm(1 + rng.IntN(40))}}}
		inverse := inverseOf(p)
		for j, old := range p.Layers[0].NewToOld {
			if inverse.Layers[0].NewToOld[old] != j {
				t.Fatalf("%v is not the inverse of %v", inverse, p)
			}
		}
		if diff := cmp.Diff(p, inverseOf(inverse)); diff != "" {
			t.Error(diff)
		}
	}
}

func TestDigest(t *testing.T) {
	a := &Permutation{Layers: []LayerPermutation{{1, []int{1, 0}}, {2, []int{0, 2, 1}}}}
	same := &Permutation{Layers: []LayerPermutation{{2, []int{0, 2, 1}}, {5, []int{0, 1}}, {1, []int{1, 0}}}}
	other := &Permutation{Layers: []LayerPermutation{{1, []int{0, 1}}, {2, []int{0, 2, 1}}}}
	if a.Digest() != same.Digest() || a.Digest() == other.Digest() {
		t.Errorf("digests %s, %s, %s", a.Digest(), same.Digest(), other.Digest())
	}
}

func FuzzParsePermutation(f *testing.F) {
	f.Add([]byte(`{"layers":[{"layer":0,"new_to_old":[1,0]},{"layer":3,"new_to_old":[0,2,1]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := ParsePermutation(text)
		if err != nil {
			if !checkpoint.IsInvalid(err) {
				t.Fatalf("not an InvalidError: %v", err)
			}
			return
		}
		if diff := cmp.Diff(p.canonical(), inverseOf(inverseOf(p)).canonical()); diff != "" {
			t.Fatal(diff)
		}
	})
}

// TestRefused has inputs that do not match. No file may be written for them.
func TestRefused(t *testing.T) {
	const v3 = "deepseek_v3 in FP8, with groups and multi-token prediction"
	shift := func(n int) []int {
		p := make([]int, n)
		for i := range p {
			p[i] = (i + 1) % n
		}
		return p
	}
	one := func(layer, n int) *Permutation { return &Permutation{[]LayerPermutation{{layer, shift(n)}}} }
	for name, test := range map[string]struct {
		family      string
		change      func(m *model)
		permutation *Permutation
		want        []string
	}{
		"experts of another model": {"qwen3_moe", nil, one(0, 16), []string{"16 experts in layer 0", "has 12", "use the permutation of this model"}},
		"layer of another model":   {"qwen3_moe", nil, one(7, testExperts), []string{"layer 7", "3 hidden layers", "use the permutation of this model"}},
		"dense layer":              {"qwen2_moe with a dense layer", nil, one(1, testExperts), []string{"layer 1", "not an MoE layer"}},
		"absent prediction layer":  {"glm4_moe", nil, one(testLayers, testExperts), []string{"layer 3", "not an MoE layer"}},
		"breaks groups":            {v3, nil, one(1, testExperts), []string{"layer 1", "4 groups of 3 experts", "keep groups whole"}},
		"tensor of an expert missing": {"qwen3_moe", func(m *model) { delete(m.tensors, "model.layers.1.mlp.experts.4.up_proj.weight") }, one(0, testExperts),
			[]string{checkpoint.IndexFile, `"model.layers.1.mlp.experts.4.up_proj.weight" is missing`}},
		"scale missing": {v3, func(m *model) { delete(m.tensors, "model.layers.2.mlp.experts.7.down_proj.weight_scale_inv") }, one(0, testExperts),
			[]string{`"model.layers.2.mlp.experts.7.down_proj.weight_scale_inv" is missing`}},
		"projection missing": {"olmoe", func(m *model) {
			for name := range m.tensors {
				if strings.Contains(name, ".up_proj.") {
					delete(m.tensors, name)
				}
			}
		}, one(0, testExperts), []string{`experts.0.up_proj.weight" is missing`}},
		"gate missing":       {"qwen3_moe", func(m *model) { delete(m.tensors, "model.layers.2.mlp.gate.weight") }, one(0, testExperts), []string{`"model.layers.2.mlp.gate.weight" is missing`}},
		"fused bias missing": {"gpt_oss", func(m *model) { delete(m.tensors, "model.layers.0.mlp.experts.down_proj_bias") }, one(0, testExperts), []string{`"model.layers.0.mlp.experts.down_proj_bias" is missing`}},
		"layer missing": {"qwen3_moe", func(m *model) { m.config["num_hidden_layers"] = testLayers + 1 }, one(0, testExperts),
			[]string{"layer 3 has neither gate nor experts", "qwen3_moe"}},
		"too many experts": {"qwen3_moe", func(m *model) { m.config["num_local_experts"] = 8 }, one(0, 8), []string{"declares only 8 experts per layer, 0 to 7"}},
		"unknown family":   {"qwen3_moe", func(m *model) { m.config["model_type"] = "llama" }, one(0, testExperts), []string{`model_type "llama"`, "config.json", "qwen3_next"}},
		"unknown tensor in the block": {"qwen3_moe", func(m *model) { m.add("model.layers.0.mlp.expert_bias", "F32", testExperts) }, one(0, testExperts),
			[]string{`"model.layers.0.mlp.expert_bias" is not known`, ".safetensors"}},
		"quantised gate": {"qwen3_moe", func(m *model) { m.add("model.layers.0.mlp.gate.qzeros", "I32", testExperts, 1) }, one(0, testExperts),
			[]string{`"model.layers.0.mlp.gate.qzeros"`, "cannot be permuted"}},
		"gate scaled by blocks": {"qwen3_moe", func(m *model) { m.add("model.layers.0.mlp.gate.weight_scale_inv", "F32", 2, 1) }, one(0, testExperts),
			[]string{`"model.layers.0.mlp.gate.weight_scale_inv" has shape [2 1]`, "12 rows"}},
		"fused tensor in another order": {"gpt_oss", func(m *model) { m.add("model.layers.0.mlp.experts.gate_up_proj", "BF16", testHidden, testExperts, 6) }, one(0, testExperts),
			[]string{"gate_up_proj", "shape [8 12 6]"}},
		"one layer under two names": {"qwen3_moe", func(m *model) {
			m.add("model.language_model.layers.0.mlp.gate.weight", "BF16", testExperts, testHidden)
		}, one(0, testExperts),
			[]string{"same layer 0"}},
		"ignore list that cannot be rewritten": {"qwen3_moe", func(m *model) {
			m.config["quantization_config"] = map[string]any{"ignore": []string{`re:.*mlp\.experts\.[0-3]\..*`}}
		}, one(0, testExperts), []string{"config.json", "[0-3]", "which are exchanged"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := generators[test.family](1)
			if test.change != nil {
				test.change(m)
			}
			base := t.TempDir()
			_, err := Run(t.Context(), Options{Model: m.write(t, 40), Permutation: test.permutation, Out: filepath.Join(base, "parent", "out")})
			if !checkpoint.IsInvalid(err) {
				t.Fatalf("got %v, want an invalid error", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not mention %q", err, want)
				}
			}
			if entries, err := os.ReadDir(base); err != nil || len(entries) > 0 {
				t.Errorf("something was written: %v, %v", entries, err)
			}
		})
	}
}

func TestOverlappingDirectories(t *testing.T) {
	m := generators["olmoe"](1)
	model := m.write(t, 400)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(model, link); err != nil {
		t.Fatal(err)
	}
	for _, out := range []string{model, filepath.Join(model, "out"), filepath.Dir(model), filepath.Join(link, "a", "b")} {
		_, err := Run(t.Context(), Options{Model: model, Permutation: m.permutation(0), Out: out})
		if !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), "overlap") {
			t.Errorf("%s: got %v", out, err)
		}
	}
}

// inverseOf returns the inverse permutation.
func inverseOf(p *Permutation) *Permutation {
	inverse := &Permutation{}
	for _, layer := range p.Layers {
		inverse.Layers = append(inverse.Layers, LayerPermutation{layer.Layer, invert(layer.NewToOld)})
	}
	return inverse
}
