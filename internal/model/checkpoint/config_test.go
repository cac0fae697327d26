// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParseConfigFamilies(t *testing.T) {
	const base = `"hidden_size":64,"vocab_size":512`
	for name, test := range map[string]struct {
		text string
		want Config
	}{
		"qwen3_moe of transformers 5": {
			`{"model_type":"qwen3_moe","num_hidden_layers":3,"num_local_experts":16,"num_experts_per_tok":4,"dtype":"float32","decoder_sparse_step":1,"mlp_only_layers":[],"tie_word_embeddings":true,` + base + `}`,
			Config{ModelType: "qwen3_moe", Layers: 3, MoELayers: []int{0, 1, 2}, Experts: 16, ExpertsPerToken: 4, Groups: 1, GroupsPerToken: 1, DType: "float32", TiedEmbeddings: true},
		},
		"qwen2_moe of transformers 4, sparse step and dense layers": {
			`{"model_type":"qwen2_moe","num_hidden_layers":8,"num_experts":60,"num_experts_per_tok":4,"torch_dtype":"bfloat16","decoder_sparse_step":2,"mlp_only_layers":[3],` + base + `}`,
			Config{ModelType: "qwen2_moe", Layers: 8, MoELayers: []int{1, 5, 7}, Experts: 60, ExpertsPerToken: 4, Groups: 1, GroupsPerToken: 1, DType: "bfloat16"},
		},
		"members that differ in case": {
			`{"model_type":"qwen3_moe","num_hidden_layers":2,"num_experts":16,"num_experts_per_tok":4,"n_group":4,"topk_group":2,"N_GROUP":1,"TopK_Group":1,"NUM_EXPERTS":4,` + base + `}`,
			Config{ModelType: "qwen3_moe", Layers: 2, MoELayers: []int{0, 1}, Experts: 16, ExpertsPerToken: 4, Groups: 4, GroupsPerToken: 2},
		},
		"deepseek_v3 with groups": {
			`{"model_type":"deepseek_v3","num_hidden_layers":6,"n_routed_experts":256,"num_experts_per_tok":8,"n_group":8,"topk_group":4,"first_k_dense_replace":3,"moe_layer_freq":1,` + base + `}`,
			Config{ModelType: "deepseek_v3", Layers: 6, MoELayers: []int{3, 4, 5}, Experts: 256, ExpertsPerToken: 8, Groups: 8, GroupsPerToken: 4},
		},
		"deepseek_v2 with a layer step": {
			`{"model_type":"deepseek_v2","num_hidden_layers":6,"n_routed_experts":16,"num_experts_per_tok":4,"n_group":null,"first_k_dense_replace":1,"moe_layer_freq":2,` + base + `}`,
			Config{ModelType: "deepseek_v2", Layers: 6, MoELayers: []int{2, 4}, Experts: 16, ExpertsPerToken: 4, Groups: 1, GroupsPerToken: 1},
		},
		"deepseek_v3 with a flag per layer": {
			`{"model_type":"deepseek_v3","num_hidden_layers":5,"n_routed_experts":16,"num_experts_per_tok":4,"n_group":1,"topk_group":1,"first_k_dense_replace":1,"moe_layer_freq":[1,1,0,1,1],` + base + `}`,
			Config{ModelType: "deepseek_v3", Layers: 5, MoELayers: []int{1, 3, 4}, Experts: 16, ExpertsPerToken: 4, Groups: 1, GroupsPerToken: 1},
		},
		"deepseek_v2 without a layer step": {
			`{"model_type":"deepseek_v2","num_hidden_layers":3,"n_routed_experts":16,"num_experts_per_tok":4,"moe_layer_freq":null,` + base + `}`,
			Config{ModelType: "deepseek_v2", Layers: 3, MoELayers: []int{0, 1, 2}, Experts: 16, ExpertsPerToken: 4, Groups: 1, GroupsPerToken: 1},
		},
		"quantised": {
			`{"model_type":"mixtral","num_hidden_layers":1,"num_local_experts":8,"num_experts_per_tok":2,"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4","group_size":16},` + base + `}`,
			Config{ModelType: "mixtral", Layers: 1, MoELayers: []int{0}, Experts: 8, ExpertsPerToken: 2, Groups: 1, GroupsPerToken: 1, Quantization: "modelopt/NVFP4"},
		},
		"quantised multimodal wrapper": {
			`{"model_type":"kimi_k25","quantization_config":{"quant_method":"fp8"},"text_config":{"model_type":"kimi_k2","num_hidden_layers":2,"n_routed_experts":384,"num_experts_per_tok":8,"first_k_dense_replace":1,` + base + `}}`,
			Config{ModelType: "kimi_k2", Wrapper: "kimi_k25", Layers: 2, MoELayers: []int{1}, Experts: 384, ExpertsPerToken: 8, Groups: 1, GroupsPerToken: 1, Quantization: "fp8"},
		},
		"quantised by compressed-tensors": {
			`{"model_type":"mixtral","num_hidden_layers":1,"num_local_experts":8,"num_experts_per_tok":2,"quantization_config":{"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized","config_groups":{"group_0":{"format":null}}},` + base + `}`,
			Config{ModelType: "mixtral", Layers: 1, MoELayers: []int{0}, Experts: 8, ExpertsPerToken: 2, Groups: 1, GroupsPerToken: 1, Quantization: "compressed-tensors/nvfp4-pack-quantized"},
		},
		"quantised by group": {
			`{"model_type":"mixtral","num_hidden_layers":1,"num_local_experts":8,"num_experts_per_tok":2,"quantization_config":{"quant_method":"compressed-tensors","format":"mixed-precision","config_groups":{"group_0":{"format":"float-quantized"},"group_1":{"format":"nvfp4-pack-quantized"}}},` + base + `}`,
			Config{ModelType: "mixtral", Layers: 1, MoELayers: []int{0}, Experts: 8, ExpertsPerToken: 2, Groups: 1, GroupsPerToken: 1, Quantization: "compressed-tensors/nvfp4-pack-quantized"},
		},
		"quantised, members of other forms": {
			`{"model_type":"mixtral","num_hidden_layers":1,"num_local_experts":8,"num_experts_per_tok":2,"quantization_config":{"quant_method":"fp8","format":8,"config_groups":[1]},` + base + `}`,
			Config{ModelType: "mixtral", Layers: 1, MoELayers: []int{0}, Experts: 8, ExpertsPerToken: 2, Groups: 1, GroupsPerToken: 1, Quantization: "fp8"},
		},
		"mixtral": {
			`{"model_type":"mixtral","num_hidden_layers":2,"num_local_experts":8,"num_experts_per_tok":2,` + base + `}`,
			Config{ModelType: "mixtral", Layers: 2, MoELayers: []int{0, 1}, Experts: 8, ExpertsPerToken: 2, Groups: 1, GroupsPerToken: 1},
		},
		"wrapper with language_config": {
			`{"model_type":"deepseek_vl_v2","language_config":{"model_type":"deepseek_v2","num_hidden_layers":2,"n_routed_experts":64,"num_experts_per_tok":6,"first_k_dense_replace":1,` + base + `}}`,
			Config{ModelType: "deepseek_v2", Wrapper: "deepseek_vl_v2", Layers: 2, MoELayers: []int{1}, Experts: 64, ExpertsPerToken: 6, Groups: 1, GroupsPerToken: 1},
		},
		"wrapper with llm_config": {
			`{"model_type":"internvl_chat","llm_config":{"model_type":"qwen3_moe","num_hidden_layers":2,"num_experts":128,"num_experts_per_tok":8,` + base + `}}`,
			Config{ModelType: "qwen3_moe", Wrapper: "internvl_chat", Layers: 2, MoELayers: []int{0, 1}, Experts: 128, ExpertsPerToken: 8, Groups: 1, GroupsPerToken: 1},
		},
		"wrapper in a wrapper": {
			`{"model_type":"omni","thinker_config":{"model_type":"thinker","text_config":{"model_type":"qwen3_moe","num_hidden_layers":2,"num_experts":128,"num_experts_per_tok":8,` + base + `}}}`,
			Config{ModelType: "qwen3_moe", Wrapper: "omni", Layers: 2, MoELayers: []int{0, 1}, Experts: 128, ExpertsPerToken: 8, Groups: 1, GroupsPerToken: 1},
		},
		"numbers of Python": {
			`{"model_type":"mixtral","num_hidden_layers":2,"num_local_experts":8,"num_experts_per_tok":2,"time_step_limit":[0.0,Infinity],"least":-Infinity,"scale":NaN,` + base + `}`,
			Config{ModelType: "mixtral", Layers: 2, MoELayers: []int{0, 1}, Experts: 8, ExpertsPerToken: 2, Groups: 1, GroupsPerToken: 1},
		},
		"multimodal wrapper": {
			`{"model_type":"kimi_k25","dtype":"bfloat16","text_config":{"model_type":"kimi_k2","num_hidden_layers":2,"n_routed_experts":384,"num_experts_per_tok":8,"first_k_dense_replace":1,` + base + `}}`,
			Config{ModelType: "kimi_k2", Wrapper: "kimi_k25", Layers: 2, MoELayers: []int{1}, Experts: 384, ExpertsPerToken: 8, Groups: 1, GroupsPerToken: 1, DType: "bfloat16"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseConfig([]byte(test.text))
			if err != nil {
				t.Fatal(err)
			}
			if !json.Valid(got.Text) {
				t.Errorf("the text is not JSON: %s", got.Text)
			}
			test.want.HiddenSize, test.want.VocabSize = 64, 512
			if diff := cmp.Diff(&test.want, got, cmpopts.IgnoreFields(Config{}, "Text"), cmpopts.IgnoreUnexported(Config{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseConfigRefuses(t *testing.T) {
	qwen := func(change string) string {
		return fmt.Sprintf(`{"model_type":"qwen3_moe","num_hidden_layers":2,"num_experts":8,"num_experts_per_tok":2,"hidden_size":4,"vocab_size":9,%s}`, change)
	}
	for name, test := range map[string]struct{ text, want string }{
		"not JSON":                 {`{`, "not a valid model config"},
		"unknown family":           {`{"model_type":"llama"}`, `model_type "llama" is not a known MoE family`},
		"no experts":               {`{"model_type":"mixtral"}`, "num_local_experts, num_experts, n_routed_experts or moe_num_experts"},
		"missing vocabulary":       {`{"model_type":"mixtral","num_hidden_layers":2,"num_local_experts":8,"hidden_size":4}`, "vocab_size is missing"},
		"top-k above experts":      {qwen(`"num_experts_per_tok":9`), "num_experts_per_tok is 9; allowed is 1 to 8"},
		"too many layers":          {qwen(`"num_hidden_layers":100000`), "num_hidden_layers is 100000; allowed is 1 to 512"},
		"sparse step zero":         {qwen(`"decoder_sparse_step":0`), "decoder_sparse_step is 0"},
		"layer step zero":          {qwen(`"moe_layer_freq":0`), "moe_layer_freq is 0; it must be at least 1"},
		"layer step a word":        {qwen(`"moe_layer_freq":"all"`), `moe_layer_freq is "all"; it must be a number, or one 0 or 1 for each of 2 layers`},
		"too few layer flags":      {qwen(`"moe_layer_freq":[1]`), "moe_layer_freq is [1]; it must be a number, or one 0 or 1 for each of 2 layers"},
		"all layers dense":         {qwen(`"mlp_only_layers":[0,1]`), "declares all 2 layers dense"},
		"groups do not fit":        {qwen(`"n_group":3`), "n_group is 3; it must divide the 8 experts"},
		"too many groups":          {qwen(`"n_group":4,"topk_group":5`), "topk_group is 5; allowed is 1 to n_group = 4"},
		"wrapper of a dense model": {`{"model_type":"vl","text_config":{"model_type":"llama"}}`, `text_config: model_type "llama"`},
		"wrapper in another":       {`{"thinker_config":{"text_config":{"model_type":"llama"}}}`, `thinker_config: text_config: model_type "llama"`},
		"long wrapper":             {fmt.Sprintf(`{"model_type":"%065d","text_config":%s}`, 0, qwen(`"a":1`)), "… is longer than 64 bytes"},
		"experts no integer":       {qwen(`"num_experts":"8"`), "num_experts"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseConfig([]byte(test.text))
			if !IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %v, want an invalid error with %q", err, test.want)
			}
		})
	}
}

// TestServedWithoutPlan checks that a model is valid whose config the operator does not understand.
func TestServedWithoutPlan(t *testing.T) {
	for text, want := range map[string]struct{ layoutAs, reason string }{
		`{"model_type":"llama"}`: {"", `model_type "llama" is not a known MoE family`},
		`{"model_type":"qwen9","num_experts":"many","moe_layers":{"a":1}}`:                                                          {"", `model_type "qwen9" is not a known MoE family`},
		`{"model_type":"qwen9","num_experts":8,"hidden_size":4}`:                                                                    {"qwen3_moe", "num_hidden_layers is missing"},
		`{"model_type":"qwen9_vl","text_config":{"model_type":"qwen9"}}`:                                                            {"", `text_config: model_type "qwen9"`},
		`{"model_type":"mixtral"}`:                                                                                                  {"", "no field of the config contains the number of experts"},
		`{"model_type":"qwen3_moe","num_experts":8,"hidden_size":4}`:                                                                {"", "num_hidden_layers is missing"},
		`{"model_type":"qwen3_moe","num_experts":"8"}`:                                                                              {"", `model_type "qwen3_moe" has a config of an unknown form`},
		`{"num_experts":[8,16],"model_type":"hunyuan_v1_moe"}`:                                                                      {"", "layers with different numbers of experts are not supported"},
		`{"model_type":"vl","text_config":{"model_type":"qwen3_moe","num_experts":8,"num_hidden_layers":2,"moe_layer_freq":"all"}}`: {"", "text_config: hidden_size is missing"},
		`{"model_type":"gemma4","text_config":{"model_type":"gemma4_text","num_hidden_layers":2,"num_experts":8,"top_k_experts":2,"hidden_size":4,"vocab_size":9}}`: {"", "declares all 2 layers dense"},
	} {
		dir := t.TempDir()
		writeFile(t, filepath.Join(dir, configFile), []byte(text))
		writeFile(t, filepath.Join(dir, singleShardFile), safetensorsBytes(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, make([]byte, 4)))
		report, err := InspectAs(dir, want.layoutAs)
		if err != nil || !strings.Contains(report.Unprofilable, want.reason) || report.Unmappable == "" || report.Unpermutable == "" || report.Shards != 1 || report.ModelDigest == "" {
			t.Errorf("%s: report %+v, error %v", text, report, err)
		}
		if strings.Contains(report.Unprofilable, "layoutAs") != (want.layoutAs == "" && report.Family == UnknownFamily) {
			t.Errorf("%s: advice in %q", text, report.Unprofilable)
		}
		if encoded, err := json.Marshal(report); err != nil || len(encoded) > 4096 {
			t.Errorf("%s: report of %d bytes, error %v", text, len(encoded), err)
		}
		if err := report.CheckExpertParallelSize(7); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if _, err := OpenAs(dir, want.layoutAs); !IsInvalid(err) {
			t.Errorf("%s: opened for a plan, error %v", text, err)
		}
	}
}

func TestCheckExpertParallelSize(t *testing.T) {
	report := Report{Experts: 12}
	for size := -1; size <= 13; size++ {
		err := report.CheckExpertParallelSize(size)
		if fits := size > 0 && 12%max(size, 1) == 0; fits != (err == nil) {
			t.Errorf("size %d: %v", size, err)
		}
		if err != nil && !strings.Contains(err.Error(), "12 experts; allowed sizes: 1, 2, 3, 4, 6, 12") {
			t.Errorf("size %d: unhelpful message: %v", size, err)
		}
	}
}
