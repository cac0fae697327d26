// SPDX-License-Identifier: Apache-2.0

package family

var (
	llamaProjections = []string{"gate_proj", "up_proj", "down_proj"}
	mixtralNames     = []string{"w1", "w2", "w3"}
	gateUpDown       = [][]string{spellings("gate_up_proj"), spellings("down_proj")}
)

// spellings returns the names of the weights of a fused projection, plain and in the quantized forms.
func spellings(module string) []string {
	return []string{module, module + "_blocks", module + ".weight", module + ".weight_packed", module + "_packed", module + ".qweight"}
}

// The layouts that several families share. mlp is that of most: mlp.gate and mlp.experts.N.
var (
	mlp      = Layout{Block: "mlp", Gate: "gate", Projections: llamaProjections, FusedIn: "experts", Fused: gateUpDown}
	mixtral  = Layout{Block: "block_sparse_moe", Gate: "gate", Projections: mixtralNames, FusedIn: "experts", Fused: gateUpDown}
	granite  = Layout{Block: "block_sparse_moe", Gate: "router.layer", Fused: [][]string{spellings("input_linear"), spellings("output_linear")}}
	harmony  = Layout{Block: "mlp", Gate: "router", Projections: llamaProjections, FusedIn: "experts", Fused: append([][]string{{"gate_up_proj_bias"}, {"down_proj_bias"}}, gateUpDown...)}
	forward  = Layout{Block: "feed_forward", Gate: "gate", Projections: mixtralNames, FusedIn: "experts", Fused: gateUpDown}
	llama4   = Layout{Block: "feed_forward", Gate: "router", Projections: llamaProjections, FusedIn: "experts", Fused: gateUpDown}
	stacked  = Layout{Block: "moe", Gate: "gate", Fused: [][]string{spellings("gate_proj"), spellings("up_proj"), spellings("down_proj")}}
	deepseek = Layout{
		Block: "ffn", Gate: "gate", GateTensors: map[string]Form{"gate.tid2eid": ExpertNumbers}, Projections: mixtralNames, FusedIn: "experts", Fused: gateUpDown,
	}
	nemotron = Layout{
		Block: "mixer", Gate: "gate", Projections: []string{"up_proj", "down_proj"}, FusedIn: "experts", Fused: [][]string{spellings("up_proj"), spellings("down_proj")},
		Around: []string{"fc1_latent_proj", "fc2_latent_proj"},
		Dense:  []string{"in_proj", "out_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "q_proj", "k_proj", "v_proj", "o_proj"},
	}
	gemma = Layout{
		Gate: "router.proj", GateTensors: map[string]Form{"router.scale": Inputs, "router.per_expert_scale": Rows},
		Projections: llamaProjections, FusedIn: "experts", Fused: gateUpDown,
	}
	// Layouts with the names that transformers 5 uses for families whose checkpoints are published with other names. It
	// fuses the experts of a layer: a checkpoint with separate experts under these names is of another family.
	fusedMLP      = Layout{Block: "mlp", Gate: "gate", FusedIn: "experts", Fused: gateUpDown}
	native        = []Layout{fusedMLP}
	nativeHash    = []Layout{{Block: "mlp", Gate: "gate", GateTensors: deepseek.GateTensors, FusedIn: "experts", Fused: gateUpDown}}
	nativeMiniMax = []Layout{withGate(fusedMLP, "gate", "e_score_correction_bias")}
	nativePhi     = []Layout{withGate(fusedMLP, "router")}
	nativeGranite = []Layout{{Block: "block_sparse_moe", Gate: "router", FusedIn: "experts", Fused: gateUpDown}}
)

// withGate returns a layout with the gate at another path of the block, and a correction bias of the gate at these paths.
func withGate(layout Layout, path string, biases ...string) Layout {
	layout.Gate, layout.GateTensors = path, map[string]Form{}
	for _, bias := range biases {
		layout.GateTensors[bias] = Rows
	}
	return layout
}

// Blocks of experts that families share in SGLang.
const (
	DeepSeekBlock = "deepseek"
	GLMBlock      = "glm"
	Qwen2Block    = "qwen2"
	Qwen3Block    = "qwen3"
)

// The sources of the table.
const (
	transformers = "transformers 5.24.0, conversion_mapping.py and models/"
	sglang       = "SGLang 0.5.23, srt/models/"
)

// oldest and newest are the releases of SGLang between which sources were read. Families with newest were read only in
// that release.
const oldest, newest = "0.5.12", "0.5.23"

// OldestSGLang is the oldest release of SGLang whose sources were read. Older releases are refused for other reasons.
const OldestSGLang = oldest

// All is the table, in the order of the documentation.
var All = []Family{
	{Type: "deepseek_v2", Layout: mlp, SGLang: SGLang{ReadsMap: oldest, Block: DeepSeekBlock, MicroBatches: oldest}, Source: transformers + "deepseek_v2"},
	{Type: "deepseek_v3", Layout: mlp, Groups: 8, GroupsPerToken: 4, SGLang: SGLang{ReadsMap: oldest, Block: DeepSeekBlock, MicroBatches: oldest}, TensorRTLLMMap: "1.0.0", Source: transformers + "deepseek_v3"},
	{Type: "deepseek_v32", Layout: mlp, Groups: 8, GroupsPerToken: 4, DenseFirst: 3, SGLang: SGLang{ReadsMap: newest, MicroBatches: newest}, TensorRTLLMMap: "1.3.0", Source: transformers + "deepseek_v32"},
	{Type: "deepseek_v4", Layout: deepseek, OtherLayouts: nativeHash, SGLang: SGLang{ReadsMap: newest, MicroBatches: "0.5.15"}, TensorRTLLMMap: "1.3.0", Source: transformers + "deepseek_v4"},
	{Type: "kimi_k2", Layout: mlp, SGLang: SGLang{ReadsMap: oldest, Block: DeepSeekBlock, MicroBatches: oldest}, TensorRTLLMMap: "1.0.0", Source: sglang + "kimi_k25.py"},
	{Type: "kimi_linear", Layout: mixtral, OtherLayouts: native, DenseFirst: 1, Source: transformers + "kimi_linear"},
	{Type: "glm4_moe", Layout: mlp, SGLang: SGLang{ReadsMap: oldest, Block: GLMBlock, IgnoresTiedEmbeddings: true}, Source: transformers + "glm4_moe"},
	{Type: "glm4_moe_lite", Layout: mlp, DenseFirst: 1, SGLang: SGLang{ReadsMap: newest}, Source: transformers + "glm4_moe_lite"},
	{Type: "glm4v_moe_text", Layout: mlp, DenseFirst: 1, Source: transformers + "glm4v_moe"},
	{Type: "glm_moe_dsa", Layout: mlp, DenseFirst: 3, SGLang: SGLang{ReadsMap: newest, MicroBatches: newest}, TensorRTLLMMap: "1.3.0", Source: transformers + "glm_moe_dsa"},
	{Type: "qwen2_moe", Layout: mlp, SGLang: SGLang{ReadsMap: oldest, Block: Qwen2Block, IgnoresTiedEmbeddings: true}, TensorRTLLMMap: "1.0.0", Source: transformers + "qwen2_moe"},
	{Type: "qwen3_moe", Layout: mlp, SGLang: SGLang{ReadsMap: oldest, Block: Qwen3Block, MicroBatches: oldest, IgnoresTiedEmbeddings: true}, TensorRTLLMMap: "1.0.0", Source: transformers + "qwen3_moe"},
	{Type: "qwen3_next", Layout: mlp, SGLang: SGLang{ReadsMap: oldest, Block: Qwen2Block, IgnoresTiedEmbeddings: true}, Source: transformers + "qwen3_next"},
	{Type: "qwen3_vl_moe_text", Layout: mlp, SGLang: SGLang{ReadsMap: oldest, Block: Qwen3Block, IgnoresTiedEmbeddings: true}, Source: transformers + "qwen3_vl_moe"},
	{Type: "qwen3_omni_moe_text", Layout: mlp, Source: transformers + "qwen3_omni_moe"},
	{Type: "qwen3_5_moe_text", Layout: mlp, SGLang: SGLang{ReadsMap: newest}, TensorRTLLMMap: "1.3.0", Source: transformers + "qwen3_5_moe"},
	{Type: "mixtral", Layout: mixtral, OtherLayouts: native, SGLang: SGLang{IgnoresTiedEmbeddings: true}, TensorRTLLMMap: "1.0.0", Source: transformers + "mixtral"},
	{Type: "minimax_m2", Layout: withGate(mixtral, "gate", "e_score_correction_bias"), OtherLayouts: nativeMiniMax, SGLang: SGLang{ReadsMap: newest}, Source: transformers + "minimax_m2"},
	{Type: "phimoe", Layout: mixtral, OtherLayouts: nativePhi, Source: transformers + "phimoe"},
	{Type: "olmoe", Layout: mlp, SGLang: SGLang{IgnoresTiedEmbeddings: true}, Source: transformers + "olmoe"},
	{Type: "gpt_oss", Layout: harmony, SGLang: SGLang{ReadsMap: oldest, MapWithoutEffect: true, IgnoresTiedEmbeddings: true}, TensorRTLLMMap: "1.3.0", Source: transformers + "gpt_oss"},
	{Type: "mimo_v2", Layout: mlp, DenseFirst: 1, SGLang: SGLang{ReadsMap: newest, MicroBatches: newest}, Source: sglang + "mimo_v2.py"},
	{Type: "mimo_v2_flash", Layout: mlp, DenseFirst: 1, SGLang: SGLang{ReadsMap: newest, MicroBatches: oldest}, Source: transformers + "mimo_v2_flash"},
	{Type: "dots1", Layout: mlp, Source: transformers + "dots1"},
	{Type: "solar_open", Layout: mlp, Source: transformers + "solar_open"},
	{Type: "bailing_moe", Layout: withGate(mlp, "gate", "gate.expert_bias"), SGLang: SGLang{ReadsMap: newest}, Source: sglang + "bailing_moe.py"},
	{Type: "bailing_moe_v2", Layout: withGate(mlp, "gate", "gate.expert_bias"), SGLang: SGLang{ReadsMap: newest}, Source: sglang + "bailing_moe.py"},
	{Type: "ernie4_5_moe", Layout: withGate(mlp, "gate", "moe_statics.e_score_correction_bias"), DenseFirst: 1, Source: transformers + "ernie4_5_moe"},
	{Type: "hunyuan_v1_moe", Layout: withGate(mlp, "gate.wg"), Source: transformers + "hunyuan_v1_moe"},
	{Type: "exaone_moe", Layout: withGate(mlp, "gate", "e_score_correction_bias"), DenseFirst: 1, SGLang: SGLang{ReadsMap: newest}, Source: transformers + "exaone_moe"},
	{Type: "afmoe", Layout: withGate(mlp, "router.gate", "expert_bias"), DenseFirst: 1, Source: transformers + "afmoe"},
	{
		Type: "longcat_flash", Layout: withGate(mlp, "router.classifier", "router.e_score_correction_bias"), Source: transformers + "longcat_flash",
		Unprofilable: "its gate also selects zero experts, which have no weights and which a routing trace cannot contain",
		Unmappable:   "engines do not support the placement of zero experts (SGLang 0.5.23 refuses it)",
	},
	{Type: "llama4_text", Layout: llama4, Source: transformers + "llama4"},
	{Type: "lfm2_moe", Layout: withGate(forward, "gate", "expert_bias"), DenseFirst: 2, Source: transformers + "lfm2_moe"},
	{Type: "granitemoe", Layout: granite, OtherLayouts: nativeGranite, Source: transformers + "granitemoe"},
	{Type: "granitemoeshared", Layout: granite, OtherLayouts: nativeGranite, Source: transformers + "granitemoeshared"},
	{Type: "granitemoehybrid", Layout: granite, OtherLayouts: nativeGranite, Source: transformers + "granitemoehybrid"},
	{Type: "step3p5", Layout: withGate(stacked, "gate", "router_bias"), OtherLayouts: native, DenseFirst: 3, SGLang: SGLang{ReadsMap: newest, ExpertsPerToken: "moe_top_k"}, Source: transformers + "step3p7"},
	{Type: "nemotron_h", Layout: nemotron, SGLang: SGLang{ReadsMap: newest}, TensorRTLLMMap: "1.3.0", Source: transformers + "nemotron_h"},
	{Type: "gemma4_text", Layout: gemma, OptionalBlock: true, SGLang: SGLang{ExpertsPerToken: "top_k_experts"}, Source: transformers + "gemma4"},
}
