package checkpoint

import (
	"slices"
	"strconv"
	"strings"
)

// family says how the checkpoints of a model type are laid out.
type family struct {
	moeLayers func(rawConfig) []int
	// block and gate are the names of the MoE block and of the gate inside it.
	block, gate string
	// projections are the linear maps of one expert where every expert has tensors of its own.
	projections []string
	// fused are the tensors of a layer whose dimension 0 is the expert, where the checkpoint stores those instead; the
	// spellings of one entry are alternatives.
	fused [][]string
	// defaultGroups and defaultGroupsPerToken are what the model's code takes n_group and topk_group to be when
	// config.json is silent; 0 means 1.
	defaultGroups, defaultGroupsPerToken int
}

var (
	llamaProjections = []string{"gate_proj", "up_proj", "down_proj"}
	fusedProjections = [][]string{{"gate_up_proj", "gate_up_proj_blocks"}, {"down_proj", "down_proj_blocks"}}
)

// families holds each known model type.
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

// Role is what a tensor is in an MoE layer.
type Role uint8

// The roles. Only tensors of Expert, Fused and Gate depend on the order of the experts.
const (
	// Other tensors are no part of an MoE block.
	Other Role = iota
	// Expert tensors belong to one expert.
	Expert
	// Fused tensors hold all experts of a layer.
	Fused
	// Gate tensors belong to the gate.
	Gate
	// Shared tensors belong to a shared expert or to its gate.
	Shared
	// Unrecognised tensors are in an MoE block, or in the dense FFN of a layer without one, and are none of the above.
	Unrecognised
)

// Part tells which part of the model a tensor or a module is, from its name alone.
type Part struct {
	Role Role
	// Layer is the model layer index; layers of multi-token prediction follow the hidden layers.
	Layer int
	// Expert is the expert's index, where Role is Expert.
	Expert int
	// Name is what follows the expert, the gate or the experts in the tensor's name, such as up_proj.weight.
	Name string
	// block is the name up to the MoE block's end, such as "model.layers.3.mlp.".
	block string
}

// ExpertName is the name that the same tensor has for another expert of its layer.
func (p Part) ExpertName(expert int) string {
	name := p.block + "experts." + strconv.Itoa(expert)
	if p.Name == "" {
		return name
	}
	return name + "." + p.Name
}

// layerPrefixes are the names under which known checkpoints keep their list of layers: a causal language model, the
// bare model below it, multimodal wrappers of either generation, and DeepSeek-VL2.
var layerPrefixes = []string{"model.layers.", "layers.", "model.language_model.layers.", "language_model.model.layers.", "language.model.layers."}

// predictionPrefix holds the multi-token-prediction layers where they do not follow the hidden layers in the same list.
const predictionPrefix = "mtp.layers."

// Classify tells which part of the model a tensor, or a module, is.
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

// cutLayer splits a name into its layer, the length of the prefix with the layer's number and dot, and the rest; the
// layer is negative where the name is outside of the layers.
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

// index reads a number as checkpoints write indices; one that would not be written back in the same way is none.
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
