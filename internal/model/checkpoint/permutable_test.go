// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// writeMixtral writes a checkpoint of one layer and two experts with tensors of the given shapes, all of type U8.
func writeMixtral(t *testing.T, shapes map[string][]int64, metadata map[string]string) string {
	t.Helper()
	header := map[string]any{"__metadata__": metadata}
	size := int64(0)
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		begin, bytes := size, int64(1)
		for _, d := range shapes[name] {
			bytes *= d
		}
		size += bytes
		header[name] = map[string]any{"dtype": "U8", "shape": shapes[name], "data_offsets": []int64{begin, size}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, configFile), []byte(smallConfig))
	writeFile(t, filepath.Join(dir, singleShardFile), safetensorsBytes(string(text), make([]byte, size)))
	return dir
}

// TestUnpermutable checks that a checkpoint is reported as not permutable, without an error.
func TestUnpermutable(t *testing.T) {
	const block = "model.layers.0.block_sparse_moe."
	long := block + strings.Repeat("<", 600)
	for name, test := range map[string]struct {
		change   map[string][]int64 // nil removes
		metadata map[string]string
		want     string
	}{
		"plain":                        {},
		"packed gate":                  {change: map[string][]int64{block + "gate.weight": {4, 1}}, want: `model.safetensors: tensor "` + block + `gate.weight" has shape [4 1] of U8`},
		"gate of GPTQ":                 {change: map[string][]int64{block + "gate.weight": nil, block + "gate.qweight": {1, 2}}, want: "cannot be permuted: its format is not supported"},
		"missing tensor":               {change: map[string][]int64{block + "experts.1.w2.weight": nil}, want: `experts.1.w2.weight" is missing`},
		"unknown tensor":               {change: map[string][]int64{block + "extra": {2}}, want: "its dependence on the order of the experts is unknown"},
		"row of blocks":                {change: map[string][]int64{block + "gate.weight_scale_inv": {1, 3}}},
		"number elsewhere":             {change: map[string][]int64{block + "experts.w1.1.scale": {2}}, want: "experts.w1.1.scale"},
		"outside of the block":         {change: map[string][]int64{"model.layers.0.router.bias": {2}}, want: "router.bias"},
		"of the model":                 {change: map[string][]int64{"model.expert_load": {2}}, want: "model.expert_load"},
		"attention, norms, embeddings": {change: map[string][]int64{"model.layers.0.self_attn.q_proj.weight": {2}, "model.layers.0.input_layernorm.weight": {2}, "lm_head.weight": {2}, "model.norm.weight": {2}}},
		"metadata":                     {metadata: map[string]string{"order": "layers.0.experts.1"}, want: "names experts"},
		"tensor with the longest name": {change: map[string][]int64{long: {2}}, want: "model.safetensors: tensor"},
	} {
		shapes := map[string][]int64{block + "gate.weight": {2, 2}}
		for expert := range 2 {
			for _, projection := range []string{"w1", "w2", "w3"} {
				shapes[fmt.Sprintf("%sexperts.%d.%s.weight", block, expert, projection)] = []int64{2, 2}
			}
		}
		maps.Copy(shapes, test.change)
		maps.DeleteFunc(shapes, func(_ string, shape []int64) bool { return shape == nil })
		report, err := Inspect(writeMixtral(t, shapes, test.metadata) + "/")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := report.Unpermutable; (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
		if text, err := json.Marshal(report.Unpermutable); err != nil || len(text) > maxReason {
			t.Errorf("%s: %d bytes, error %v", name, len(text), err)
		}
	}
}
