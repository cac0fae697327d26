package checkpoint

import (
	"slices"
	"strconv"
	"strings"
)

// family describes the layout of the checkpoints of a model type.
type family struct {
	moeLayers func(rawConfig) []int
	// block and gate are the names of the MoE block and of the gate in the block.
	block, gate string
	// projections are the linear maps of one expert, if every expert has its own tensors.
	projections []string
	// fused lists the tensors of a layer with the experts in dimension 0, for checkpoints with fused experts. The
	// spellings of one entry are alternatives.
	fused [][]string
	// defaultGroups and defaultGroupsPerToken are the defaults of n_group and topk_group in the model's code. 0 means
	// 1.
	defaultGroups, defaultGroupsPerToken int
}

var (
	llamaProjections = []string{"gate_proj", "up_proj", "down_proj"}
	fusedProjections = [][]string{{"gate_up_proj", "gate_up_proj_blocks"}, {"down_proj", "down_proj_blocks"}}
)

// families maps each supported model type to its layout.
var families = map[string]family{
	"qwen2_moe":         qwenFamily,
	"qwen3_moe":         qwenFamily,
	"qwen3_next":        qwenFamily,
	"qwen3_vl_moe_text": qwenFamily,
	"deepseek_v2":       {moeLayers: layersAfterDense, block: "mlp", gate: "gate", projections: llamaProjections, fused: fusedProjections},
	"deepseek_v3": {
		moeLayers: layersAfterDense, block: "mlp", gate: "gate", projections: llamaProjections, fused: fusedProjections,
		defaultGroups: 8, defaultGroupsPerToken: 4,
	},
	"kimi_k2":  {moeLayers: layersAfterDense, block: "mlp", gate: "gate", projections: llamaProjections, fused: fusedProjections},
	"glm4_moe": {moeLayers: layersAfterDense, block: "mlp", gate: "gate", projections: llamaProjections, fused: fusedProjections},
	"mixtral":  {moeLayers: allLayers, block: "block_sparse_moe", gate: "gate", projections: []string{"w1", "w2", "w3"}, fused: fusedProjections},
	"olmoe":    {moeLayers: allLayers, block: "mlp", gate: "gate", projections: llamaProjections, fused: fusedProjections},
	"gpt_oss": {
		moeLayers: allLayers, block: "mlp", gate: "router", projections: llamaProjections,
		fused: append([][]string{{"gate_up_proj_bias"}, {"down_proj_bias"}}, fusedProjections...),
	},
}

var qwenFamily = family{moeLayers: sparseStepLayers, block: "mlp", gate: "gate", projections: llamaProjections, fused: fusedProjections}

func (f family) groups() int         { return max(f.defaultGroups, 1) }
func (f family) groupsPerToken() int { return max(f.defaultGroupsPerToken, 1) }

// Role is the role of a tensor in an MoE layer.
type Role uint8

// The roles. Only Expert, Fused and Gate tensors depend on the order of the experts.
const (
	// Other tensors are not part of an MoE block.
	Other Role = iota
	// Expert tensors belong to one expert.
	Expert
	// Fused tensors contain the values of all experts of a layer.
	Fused
	// Gate tensors belong to the gate.
	Gate
	// Shared tensors belong to a shared expert or to its gate.
	Shared
	// Unrecognised tensors are in an MoE block, or in the dense FFN of a layer without an MoE block, and have none of
	// the roles above.
	Unrecognised
)

// Part describes the part of the model that a tensor or a module belongs to. It depends only on the name.
type Part struct {
	Role Role
	// Layer is the model layer index. Layers of multi-token prediction follow the hidden layers.
	Layer int
	// Expert is the expert's index if Role is Expert.
	Expert int
	// Name is the suffix of the tensor's name after the expert, the gate or "experts", such as up_proj.weight.
	Name string
	// block is the prefix of the name up to and including the MoE block, such as "model.layers.3.mlp.".
	block string
}

// ExpertName returns the name of the same tensor of another expert of the layer.
func (p Part) ExpertName(expert int) string {
	name := p.block + "experts." + strconv.Itoa(expert)
	if p.Name == "" {
		return name
	}
	return name + "." + p.Name
}

// layerPrefixes are the prefixes of the list of layers in known checkpoints: a causal language model, the bare model,
// multimodal wrappers of both generations, and DeepSeek-VL2.
var layerPrefixes = []string{"model.layers.", "layers.", "model.language_model.layers.", "language_model.model.layers.", "language.model.layers."}

// predictionPrefix is the prefix of multi-token-prediction layers that are not in the list of hidden layers.
const predictionPrefix = "mtp.layers."

// Classify returns the part of the model that a tensor or a module belongs to.
func (c *Config) Classify(name string) Part {
	layer, prefix, rest := c.cutLayer(name)
	if layer < 0 {
		return Part{}
	}
	f := families[c.ModelType]
	rest, inBlock := strings.CutPrefix(rest, f.block+".")
	if !inBlock {
		return Part{}
	}
	part := Part{Role: Unrecognised, Layer: layer, Name: rest, block: name[:prefix] + f.block + "."}
	switch first, tail, _ := strings.Cut(rest, "."); first {
	case "experts":
		part.Name = tail
		number, name, _ := strings.Cut(tail, ".")
		if expert, ok := index(number); ok {
			part.Role, part.Expert, part.Name = Expert, expert, name
		} else if f.isFused(tail) {
			part.Role = Fused
		} else {
			part.Name = rest
		}
	case f.gate:
		part.Role, part.Name = Gate, tail
	case "shared_expert", "shared_experts", "shared_expert_gate":
		part.Role = Shared
	}
	return part
}

// cutLayer splits a name into the layer index, the length of the prefix including the layer number and its dot, and the
// rest. The layer is negative if the name is outside of the layers.
func (c *Config) cutLayer(name string) (layer, prefix int, rest string) {
	offset := 0
	rest, ok := strings.CutPrefix(name, predictionPrefix)
	if ok {
		offset = c.Layers
	}
	for i := 0; !ok && i < len(layerPrefixes); i++ {
		rest, ok = strings.CutPrefix(name, layerPrefixes[i])
	}
	if !ok {
		return -1, 0, ""
	}
	number, rest, _ := strings.Cut(rest, ".")
	layer, ok = index(number)
	if !ok {
		return -1, 0, ""
	}
	return layer + offset, len(name) - len(rest), rest
}

// index parses a number in the form in which checkpoints write indices. It rejects a number that would be formatted
// differently, such as 07.
func index(text string) (int, bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 0 && n < 1<<20 && strconv.Itoa(n) == text
}

// isProjection reports whether a tensor of an expert belongs to a projection.
func isProjection(tensor, projection string) bool {
	rest, ok := strings.CutPrefix(tensor, projection)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '_')
}

func (f family) missingProjection(tensors []string) string {
	for _, projection := range f.projections {
		if !slices.ContainsFunc(tensors, func(t string) bool { return isProjection(t, projection) }) {
			return projection + ".weight"
		}
	}
	return ""
}

func (f family) missingFused(tensors []string) string {
	for _, spellings := range f.fused {
		if !slices.ContainsFunc(spellings, func(s string) bool { return slices.Contains(tensors, s) }) {
			return spellings[0]
		}
	}
	return ""
}
