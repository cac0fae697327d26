// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

const (
	qwen    = "qwen3_moe"
	gptOSS  = "gpt_oss"
	fused   = "qwen3_vl_moe, fused"
	mixtral = "mixtral in GPTQ"
	deepDS  = "deepseek_v3 in FP8, with groups and multi-token prediction"
	quant   = "hf_quant_config.json"
	layer1  = "model.layers.1."
	experts = layer1 + "mlp.experts."
)

// change changes a generated checkpoint.
type change func(t *testing.T, m *model, files map[string]string)

func withTensor(name string, shape ...int64) change {
	return func(_ *testing.T, m *model, _ map[string]string) { m.add(name, "F32", shape...) }
}

func withFile(name, content string) change {
	return func(_ *testing.T, _ *model, files map[string]string) { files[name] = content }
}

func withConfig(text string) change {
	return func(t *testing.T, m *model, _ map[string]string) {
		if err := json.Unmarshal([]byte(text), &m.config); err != nil {
			t.Fatal(err)
		}
	}
}

// withOneOf gives one expert of layer 1 another storage format: the others have the given tensors, this one has plain
// weights.
func withOneOf(form map[string]checkpoint.DType, special int, ignored ...string) change {
	return func(_ *testing.T, m *model, _ map[string]string) {
		for name := range m.tensors {
			if strings.HasPrefix(name, experts) {
				delete(m.tensors, name)
			}
		}
		m.experts(layer1+"mlp.", form, "gate_proj", "up_proj", "down_proj")
		maps.DeleteFunc(m.tensors, func(name string, _ tensor) bool {
			return strings.HasPrefix(name, fmt.Sprintf("%s%d.", experts, special))
		})
		for _, projection := range []string{"gate_proj", "up_proj", "down_proj"} {
			m.add(fmt.Sprintf("%s%d.%s.weight", experts, special, projection), "BF16", 2, 4)
		}
		if ignored != nil {
			m.config["quantization_config"] = map[string]any{"ignore": ignored}
		}
	}
}

// adapterFile returns the content of a safetensors file of an adapter.
func adapterFile(t *testing.T, tensors ...string) string {
	m := newModel(3, "olmoe", nil)
	m.tensors = map[string]tensor{}
	for _, name := range tensors {
		m.add("base_model.model."+name, "F32", 2, 4)
	}
	return string(m.encode(t, slices.Sorted(maps.Keys(m.tensors))))
}

// TestUnknownOrder adds content to a checkpoint that may depend on the order of its experts in an unknown way. Each
// case is refused with an error that names the content, and nothing is written.
func TestUnknownOrder(t *testing.T) {
	nvfp4 := map[string]checkpoint.DType{"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}
	awq := map[string]checkpoint.DType{"qweight": "I32", "qzeros": "I32", "scales": "F16"}
	numbers := func(n int) string { return strings.TrimSuffix(strings.Repeat("0.5,", n), ",") }
	for name, test := range map[string]struct {
		from   string
		change change
		want   string
	}{
		// An expert number in another place of a name.
		"list of quantisers":          {fused, withTensor("model.language_model.layers.1.mlp.experts.gate_up_proj_weight_quantizers.3._amax", 1), "gate_up_proj_weight_quantizers.3._amax"},
		"number after the projection": {qwen, withTensor(experts+"w1.3.weight", 2, 4), "experts.w1.3.weight"},
		"number in the module":        {qwen, withTensor(layer1+"mlp.expert_3.w1", 2, 4), "expert_3.w1"},
		"range of experts":            {qwen, withTensor(experts+"0_3.weight", testExperts, 4), "experts.0_3.weight"},
		"number at the end":           {mixtral, withTensor(layer1+"block_sparse_moe.w1_e12", 2, 4), "w1_e12"},
		"two numbers":                 {qwen, withTensor(experts+"3.up_proj.7.weight", 2, 4), "experts.3.up_proj.7.weight"},
		"padded number":               {qwen, withTensor(experts+"e03.scale", 1), "experts.e03.scale"},
		"numbered biases of all":      {gptOSS, withTensor(experts+"down_projs.4.bias", testExperts), "down_projs.4.bias"},
		"unknown, with rows":          {gptOSS, withTensor(experts+"importance", testExperts), "experts.importance"},
		// Per-expert tensors outside of the MoE block.
		"bias of a router":           {qwen, withTensor(layer1+"router.expert_bias", testExperts), "router.expert_bias"},
		"statistics of the model":    {qwen, withTensor("model.expert_stats", testLayers, testExperts), "model.expert_stats"},
		"scales of a layer":          {deepDS, withTensor(layer1+"expert_scales", testExperts), "layers.1.expert_scales"},
		"scales, transposed":         {qwen, withTensor(layer1+"load", 4, testExperts), "layers.1.load"},
		"several of each":            {qwen, withTensor(layer1+"routing_table", testExperts*4), "routing_table"},
		"below the attention":        {qwen, withTensor(layer1+"self_attn.router_bias", testExperts), "self_attn.router_bias"},
		"dense layer":                {deepDS, withTensor("model.layers.0.moe_statistics", testExperts), "moe_statistics"},
		"keyed by layer":             {qwen, withTensor("model.balance.1", testExperts), "model.balance.1"},
		"next to the shared experts": {deepDS, withTensor(layer1+"mlp.shared_experts.expert_offsets", testExperts), "expert_offsets"},
		// Configuration.
		"map keyed by expert":     {qwen, withConfig(`{"approximate_experts":{"0":[3]}}`), "approximate_experts"},
		"nested map":              {qwen, withConfig(`{"layer_overrides":{"1":{"3":{"bits":4}}}}`), "layer_overrides.1"},
		"list as long as experts": {qwen, withConfig(`{"lora_scale":[` + numbers(testExperts) + `]}`), "lora_scale"},
		"a list for each layer":   {qwen, withConfig(`{"usage":[[` + numbers(testExperts) + `]]}`), "usage[]"},
		"a flat list":             {qwen, withConfig(`{"usage":[` + numbers(testLayers*testExperts) + `]}`), "usage"},
		"one expert":              {qwen, withConfig(`{"fallback_expert":3}`), "fallback_expert"},
		"experts in a text":       {qwen, withConfig(`{"hot_experts":"3, 7, 9"}`), "hot_experts"},
		"a list of numbers":       {qwen, withConfig(`{"pinned":[3,7]}`), "pinned"},
		"members by expert":       {qwen, withConfig(`{"temperatures":` + keyed("lane_%d", testExperts) + `}`), "temperatures"},
		"a name of another form":  {qwen, withConfig(`{"offload":["layers/1/expert_3"]}`), "layers/1/expert_3"},
		"pattern in ignore":       {qwen, withConfig(`{"quantization_config":{"ignore":["re:.*experts\\.3\\..*"]}}`), `experts`},
		"in a quantisation file":  {qwen, withFile(quant, `{"quantization":{"skip":{"1":[3]}}}`), quant},
		"generation config":       {qwen, withFile("generation_config.json", `{"expert_mask":[`+numbers(testExperts)+`]}`), "generation_config.json: expert_mask"},
		"another JSON file":       {qwen, withFile("serving.json", `{"layers":[{"pruned":[3,5]}]}`), "serving.json"},
		"a YAML file":             {qwen, withFile("offload.yaml", "cpu:\n  model.layers.1.mlp.experts.3.up_proj: true\n"), "offload.yaml"},
		"below a folder":          {qwen, withFile("extra/placement.yml", "ranks:\n  0: [1, 2]\n"), "extra/placement.yml"},
		"metadata of a shard": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			m.metadata = map[string]string{"expert_order": "3 1 2"}
		}, "expert_order"},
		"metadata of the index": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			m.indexMetadata = map[string]any{"expert_order": []int{3, 1, 2}}
		}, "model.safetensors.index.json: expert_order"},
		"unknown module in a config": {mixtral, withConfig(`{"quantization_config":{"ignore":["model.layers.1.block_sparse_moe.w1_e3"]}}`), "w1_e3"},
		// Files.
		"adapter of experts": {qwen, func(t *testing.T, _ *model, files map[string]string) {
			files["adapter_model.safetensors"] = adapterFile(t, experts+"3.up_proj.lora_A.weight")
		}, "adapter_model.safetensors"},
		"adapter of a gate, nested": {qwen, func(t *testing.T, _ *model, files map[string]string) {
			files["lora/adapter_model.safetensors"] = adapterFile(t, layer1+"mlp.gate.lora_A.weight")
		}, "lora/adapter_model.safetensors"},
		"adapter that is a pickle": {qwen, withFile("adapter_model.bin", "PK"), "adapter_model.bin"},
		"adapter of other name": {qwen, func(t *testing.T, _ *model, files map[string]string) {
			files["code_lora.safetensors"] = adapterFile(t, experts+"gate_up_proj.lora_B.weight")
		}, "code_lora.safetensors"},
		"importance matrix":      {qwen, withFile("imatrix.dat", "\x01\x00\x00\x00"), "imatrix.dat"},
		"array of numbers":       {qwen, withFile("bias.npy", "\x93NUMPY\x01\x00"), "bias.npy"},
		"statistics as a pickle": {qwen, withFile("expert_distribution.pt", "PK"), "expert_distribution.pt"},
		"statistics of EPLB":     {qwen, withFile("eplb_stats.json", `{"logical_count":[[`+numbers(testExperts)+`]]}`), "eplb_stats.json"},
		"scales of a KV cache":   {qwen, withFile("kv_cache_scales.json", `{"kv_cache":{"scaling_factor":{"0":{"0":1.5}}}}`), "kv_cache_scales.json"},
		"a file about experts":   {qwen, withFile("token_to_expert.json", `{"layer_1":[0,1]}`), "token_to_expert.json"},
		"NaN in a JSON file":     {qwen, withFile("serving.json", `{"limit":NaN,"pinned":[3,7]}`), "serving.json: pinned"},
		"mark before JSON":       {qwen, withFile("serving.json", "\xef\xbb\xbf"+`{"pinned":[3,7]}`), "serving.json: pinned"},
		"JSON with a comment":    {qwen, withFile("serving.json", "// hot ones\n"+`{"routing":{"hot":[3,7]}}`), "serving.json"},
		"second YAML document":   {qwen, withFile("serving.yaml", "a: 1\n---\npinned: [3, 7]\n"), "serving.yaml"},
		"lines of JSON":          {qwen, withFile("placement.jsonl", `{"layer":1,"pinned_experts":[3,7]}`), "placement.jsonl"},
		"table":                  {qwen, withFile("placement.csv", "layer,expert,rank\n1,3,0\n"), "placement.csv"},
		"settings of a gate":     {qwen, withFile("serve.toml", "[moe]\npinned = [3, 7]\n"), "serve.toml"},
		"list of names":          {qwen, withFile("offload.txt", experts+"3.up_proj\n"), "offload.txt"},
		"environment":            {qwen, withFile("serve", "PINNED_EXPERTS=3,7\n"), "serve"},
		"settings":               {qwen, withFile("serve.toml", "[expert_3]\noffload = true\n"), "serve.toml"},
		"weights of a router":    {qwen, withFile("router_bias.safetensors", "x"), "router_bias.safetensors"},
		// Experts in different forms.
		"one int4 expert is plain":  {qwen, withOneOf(packed, 7), "expert 7 of layer 1 is stored in another form"},
		"one NVFP4 expert is plain": {qwen, withOneOf(nvfp4, 0, "lm_head"), "expert 0 of layer 1 is stored in another form"},
		"one AWQ expert is plain":   {qwen, withOneOf(awq, 3, "re:.*experts\\.3\\..*"), "expert 3 of layer 1 is stored in another form"},
		"one GPTQ expert is plain":  {qwen, withOneOf(gptq, 11, "experts.11"), "expert 11 of layer 1 is stored in another form"},
		"one FP8 expert is plain":   {qwen, withOneOf(map[string]checkpoint.DType{"weight": "F8_E4M3", "weight_scale_inv": "F32"}, 5), "expert 5 of layer 1 is stored in another form"},
		"one MXFP4 expert is plain": {qwen, withOneOf(map[string]checkpoint.DType{"weight": "U8", "weight_scale": "U8"}, 2), "expert 2 of layer 1 is stored in another form"},
		"one W8A8 expert is plain":  {qwen, withOneOf(map[string]checkpoint.DType{"weight": "I8", "weight_scale": "BF16", "weight_offset": "BF16"}, 9, "experts.8"), "expert 9 of layer 1 is stored in another form"},
	} {
		t.Run(name, func(t *testing.T) {
			m := generators[test.from](1)
			files := map[string]string{}
			test.change(t, m, files)
			dir := m.write(t, 1<<20)
			for name, content := range files {
				writeFile(t, filepath.Join(dir, name), []byte(content))
			}
			parent := t.TempDir()
			_, err := Run(t.Context(), Options{Model: dir, Permutation: m.permutation(m.layers...), Out: filepath.Join(parent, "out")})
			if !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if written, err := os.ReadDir(parent); err != nil || len(written) > 0 {
				t.Errorf("written: %v, %v", written, err)
			}
		})
	}
}

func keyed(key string, n int) string {
	var members []string
	for i := range n {
		members = append(members, fmt.Sprintf("%q:1.5", fmt.Sprintf(key, i)))
	}
	return "{" + strings.Join(members, ",") + "}"
}

// TestKnownOrder adds content to a checkpoint that does not depend on the order of its experts, or that is rewritten
// with it. Such a checkpoint is permuted, and the inverse permutation restores every byte.
func TestKnownOrder(t *testing.T) {
	nvfp4 := map[string]checkpoint.DType{"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}
	listed := func(expert int) []string {
		var names []string
		for _, projection := range []string{"gate_proj", "up_proj", "down_proj"} {
			names = append(names, fmt.Sprintf("%s%d.%s", experts, expert, projection))
		}
		return names
	}
	for name, test := range map[string]struct {
		from   string
		change change
	}{
		"quantised attention":   {qwen, withTensor(layer1+"self_attn.q_proj.weight_scale", testExperts)},
		"scales of a KV cache":  {qwen, withTensor(layer1+"self_attn.attn.k_scale", 1)},
		"encoder with experts":  {fused, withTensor("model.visual.blocks.3.mlp.experts.1.weight", testExperts)},
		"projector":             {"kimi_k2 in a wrapper, packed", withTensor("mm_projector.proj.0.weight", testExperts, 2)},
		"another wrapped model": {"kimi_k2 in a wrapper, packed", withTensor("speech.decoder.weight", testExperts, 2)},
		"quantiser of an expert": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			for e := range testExperts {
				m.add(fmt.Sprintf("%s%d.up_proj.weight_quantizer.0._amax", experts, e), "F32", 1)
			}
		}},
		"scales of fused experts": {fused, withTensor("model.language_model.layers.1.mlp.experts.gate_up_proj_scale_inv", testExperts, 2, 2)},
		"FNUZ": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			m.experts(layer1+"mlp.", map[string]checkpoint.DType{"weight": "F8_E4M3FNUZ"}, "up_proj")
		}},
		"draft of another width": {deepDS, func(_ *testing.T, m *model, _ map[string]string) {
			m.add("model.layers.3.mlp.experts.40.up_proj.weight", "BF16", 2, 4)
			m.add("model.layers.3.mlp.extra", "BF16", 40)
			m.add("model.layers.3.oddity", "BF16", 40)
			m.layers = []int{1, 2}
		}},
		"narrower draft": {deepDS, func(_ *testing.T, m *model, _ map[string]string) {
			maps.DeleteFunc(m.tensors, func(name string, _ tensor) bool {
				for e := 6; e < testExperts; e++ {
					if strings.HasPrefix(name, fmt.Sprintf("model.layers.3.mlp.experts.%d.", e)) {
						return true
					}
				}
				return false
			})
			m.layers = []int{1, 2}
		}},
		"draft without experts": {deepDS, func(_ *testing.T, m *model, _ map[string]string) {
			maps.DeleteFunc(m.tensors, func(name string, _ tensor) bool { return strings.HasPrefix(name, "model.layers.3.mlp.") })
			m.add("model.layers.3.mlp.up_proj.weight", "BF16", 16, testHidden)
			m.layers = []int{1, 2}
		}},
		"FNUZ with block scales": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			m.experts(layer1+"mlp.", map[string]checkpoint.DType{"weight": "F8_E4M3FNUZ", "weight_scale_inv": "F32"}, "gate_proj", "up_proj", "down_proj")
		}},
		"FNUZ of the other kind": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			m.experts(layer1+"mlp.", map[string]checkpoint.DType{"weight": "F8_E5M2FNUZ"}, "gate_proj", "up_proj", "down_proj")
		}},
		"gate with block scales": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			delete(m.tensors, layer1+"mlp.gate.weight")
			m.add(layer1+"mlp.gate.weight", "F8_E4M3", testExperts, testHidden)
			m.add(layer1+"mlp.gate.weight_scale", "BF16", testExperts, 1)
		}},
		"gate with one row of blocks": {qwen, withTensor(layer1+"mlp.gate.weight_scale_inv", 1, 2)},
		"packed gate": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			delete(m.tensors, layer1+"mlp.gate.weight")
			m.add(layer1+"mlp.gate.weight_packed", "I32", testExperts, 1)
			m.add(layer1+"mlp.gate.weight_scale", "BF16", testExperts, 1)
			m.add(layer1+"mlp.gate.weight_zero_point", "I32", 2, 1)
			m.add(layer1+"mlp.gate.weight_shape", "I64", 2)
		}},
		"gate in GPTQ": {qwen, func(_ *testing.T, m *model, _ map[string]string) {
			delete(m.tensors, layer1+"mlp.gate.weight")
			m.add(layer1+"mlp.gate.qweight", "I32", 2, testExperts) // 8 bits
			m.add(layer1+"mlp.gate.qzeros", "I32", 1, testExperts/4)
			m.add(layer1+"mlp.gate.scales", "F16", 1, testExperts)
			m.add(layer1+"mlp.gate.g_idx", "I32", testHidden)
		}},
		"one int4 expert is plain":   {qwen, withOneOf(packed, 7, listed(7)...)},
		"one NVFP4 expert is plain":  {qwen, withOneOf(nvfp4, 0, listed(0)...)},
		"one GPTQ expert is plain":   {qwen, withOneOf(gptq, 11, listed(11)...)},
		"names in another file":      {qwen, withFile("layers.json", `{"offload":["model.layers.1.mlp.experts.3.up_proj"],"model.layers.1.mlp.experts.4.up_proj":{"bits":8}}`)},
		"description of msModelSlim": {qwen, withFile("quant_model_description.json", `{"model_quant_type":"W8A8","`+experts+`3.up_proj.weight":"FLOAT"}`)},
		"patterns of all":            {qwen, withConfig(`{"quantization_config":{"ignore":["re:.*mlp\\.experts\\.[0-9]+\\..*","lm_head","re:.*mlp.gate$"]}}`)},
		"usual members": {qwen, withConfig(`{"moe_layer_freq":1,"mlp_only_layers":[],"router_aux_loss_coef":0.001,"eos_token_id":[3,4],"layer_types":["a","b","c"],
			"rope_scaling":{"short_factor":[1,1,1,1,1,1,1,1,1,1,1,1]},"id2label":{"0":"LABEL_0","1":"LABEL_1"},"moe_intermediate_size":8,"decoder_sparse_step":1,
			"num_experts_per_tok":2,"norm_topk_prob":true,"_name_or_path":"/data/moe-expert-3","shared_expert_intermediate_size":4,"router_jitter_noise":0,"ep_size":1}`)},
		"YAML that begins with a separator": {qwen, withFile("serving.yaml", "# settings\n---\nname: a\n")},
		"lines of other JSON":               {qwen, withFile("notes.jsonl", `{"loss":1.5}`)},
		"JSON with a mark":                  {qwen, withFile("serving.json", "\xef\xbb\xbf"+`{"name":"a"}`)},
		"documents and tokenizers": {qwen, func(_ *testing.T, _ *model, files map[string]string) {
			maps.Copy(files, map[string]string{
				"README.md": "expert 3 of 12", "tokenizer.json": `{"model":{"vocab":{"0":1,"expert":3}}}`, "vocab.json": `{"0":0,"1":1}`, "chat_template.jinja": "expert 3",
				"tokenizer_config.json": `{"added_tokens_decoder":{"3":{}}}`, "modeling_moe.py": "experts = [3]", "LICENSE": "text", "preprocessor_config.json": `{"image_mean":[0,1,0]}`,
				"expert.png": "\x89PNG\x00", "tokenizer.model": "\x00\x01", "generation_config.json": `{"eos_token_id":[1,2],"top_k":3,"suppress_tokens":[1,2,3]}`,
				"params.json": `{"dim":8,"moe":{"num_experts_per_tok":2,"num_experts":12}}`, "configuration.json": `{"framework":"pytorch","task":"chat"}`,
			})
		}},
		"an adapter of attention": {qwen, func(t *testing.T, _ *model, files map[string]string) {
			files["lora/adapter_config.json"] = `{"peft_type":"LORA","r":8,"target_modules":["q_proj","v_proj"]}`
			files["lora/adapter_model.safetensors"] = adapterFile(t, layer1+"self_attn.q_proj.lora_A.weight", layer1+"self_attn.q_proj.lora_B.weight")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := generators[test.from](1)
			files := map[string]string{}
			test.change(t, m, files)
			dir, base := m.write(t, 7), t.TempDir()
			for name, content := range files {
				writeFile(t, filepath.Join(dir, name), []byte(content))
			}
			p, out, back := m.permutation(m.layers...), filepath.Join(base, "out"), filepath.Join(base, "back")
			mustRun(t, Options{Model: dir, Permutation: p, Out: out, Verify: true})
			mustRun(t, Options{Model: out, Permutation: inverseOf(p), Out: back, Verify: true})
			sameTensors(t, m.tensors, readAll(t, back))
			moved := 0
			for name, x := range readAll(t, out) {
				if !slices.Equal(x.data, m.tensors[name].data) {
					moved++
				}
			}
			if moved == 0 {
				t.Error("no tensor moved")
			}
			for _, name := range append(slices.Sorted(maps.Keys(files)), checkpoint.ConfigFile, checkpoint.IndexFile) {
				sameFile(t, filepath.Join(dir, name), filepath.Join(back, name))
			}
		})
	}
}

// TestLinksOutOfTheModel has links to files that are not part of the model, next to links inside a hub cache.
func TestLinksOutOfTheModel(t *testing.T) {
	for name, test := range map[string]struct {
		dir, target string
		want        string
	}{
		"to another directory": {"model", "../secret", "outside of"},
		"absolute":             {"model", "/etc/hostname", "outside of"},
		"out of the hub cache": {"hub/models--a--b/snapshots/1234", "../../../../secret", "outside of"},
		"hub cache":            {"hub/models--a--b/snapshots/1234", "../../blobs/5678", ""},
		"to another snapshot":  {"hub/models--a--b/snapshots/1234", "../5678/README.md", ""},
		"to itself":            {"model", "README.txt", "loop"},
		"to a directory":       {"model", "../hub", ""},
		"inside":               {"model", "sub/README.md", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m, root := generators[qwen](1), t.TempDir()
			for _, file := range []string{"secret", "hub/models--a--b/blobs/5678", "hub/models--a--b/snapshots/5678/README.md", "model/sub/README.md"} {
				writeFile(t, filepath.Join(root, file), []byte("text"))
			}
			dir := filepath.Join(root, test.dir)
			if err := os.CopyFS(dir, os.DirFS(m.write(t, 1<<20))); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(test.target, filepath.Join(dir, "README.txt")); err != nil {
				t.Fatal(err)
			}
			out := filepath.Join(t.TempDir(), "out")
			_, err := Run(t.Context(), Options{Model: dir, Permutation: m.permutation(1), Out: out})
			if info, _ := os.Stat(filepath.Join(dir, "README.txt")); info != nil && info.IsDir() && err == nil {
				if _, err := os.Lstat(filepath.Join(out, "README.txt")); !os.IsNotExist(err) {
					t.Errorf("a link to a directory was followed: %v", err)
				}
			} else if test.want == "" && err == nil {
				sameFile(t, filepath.Join(dir, "README.txt"), filepath.Join(out, "README.txt"))
			} else if test.want == "" || !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), "README.txt") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if _, err := os.Lstat(out); test.want != "" && !os.IsNotExist(err) {
				t.Errorf("the output exists: %v", err)
			}
		})
	}
}

// TestLinkedShard has a shard that is a link to a file outside of the model.
func TestLinkedShard(t *testing.T) {
	m := generators[qwen](1)
	dir, shard := m.write(t, 30), filepath.Join(t.TempDir(), "shard")
	name := filepath.Join(dir, "model-00001.safetensors")
	if err := os.Rename(name, shard); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(shard, name); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), Options{Model: dir, Permutation: m.permutation(1), Out: filepath.Join(t.TempDir(), "out")}); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), name+" is a link to") {
		t.Errorf("error %v", err)
	}
}

// TestSpecialOutputFiles has FIFOs in place of files of an output. Opening a FIFO would block.
func TestSpecialOutputFiles(t *testing.T) {
	m := generators[qwen](1)
	dir, p := m.write(t, 1<<20), m.permutation(1)
	for _, name := range []string{manifestFile, checkpoint.ConfigFile, checkpoint.IndexFile, "model-00001.safetensors"} {
		out := filepath.Join(t.TempDir(), "out")
		mustRun(t, Options{Model: dir, Permutation: p, Out: out})
		if err := os.Remove(filepath.Join(out, name)); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(filepath.Join(out, name), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Run(t.Context(), Options{Model: dir, Permutation: p, Out: out}); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
