package checkpoint

import (
	"regexp"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/modelconfig"
)

// This file lists the tensor names with a known dependence on the order of the experts. Other names are refused.

// CheckEntries refuses a JSON configuration that may name experts by number. Errors are *InvalidError and name the
// entry.
func (c *Config) CheckEntries(text []byte) error {
	if err := modelconfig.CheckExpertEntries(text, c.Experts, c.Layers); err != nil {
		return Invalidf("%v", err)
	}
	return nil
}

// tensorSuffix matches the suffixes that quantisation formats append to the name of a projection. No suffix contains an
// expert number.
var tensorSuffix = regexp.MustCompile(`^(?:[._](?:weight|bias|blocks|scales?(?:_2)?|inv|packed|input|output|global|zero|point|shape|offset|g_idx|` +
	`qweight|qzeros|deq|quant|second|pre|smooth|quantizer|_?amax|_?pre_quant_scale|_?scale))*$`)

// isOfExpert reports whether a tensor belongs only to the expert with the number before the name. Another number in the
// name could be that of another expert.
func (f family) isOfExpert(name string) bool {
	module, rest, _ := strings.Cut(name, ".")
	for _, projection := range f.projections {
		if suffix, ok := strings.CutPrefix(module, projection); ok && tensorSuffix.MatchString(suffix) {
			return !modelconfig.RelatesToExperts(rest) && !hasNumber(rest)
		}
	}
	return name != "" && !strings.ContainsAny(module, "0123456789") && !modelconfig.RelatesToExperts(name) && !hasNumber(rest)
}

// hasNumber reports whether a component of a name is a number, other than a step of a sequential quantiser.
func hasNumber(name string) bool {
	before := ""
	for part := range strings.SplitSeq(name, ".") {
		if strings.Trim(part, "0123456789_-") == "" && part != "" && !strings.HasSuffix(before, "_quantizer") {
			return true
		}
		before = part
	}
	return false
}

// fusedModules lists the projections that contain all experts of a layer in one tensor, with the experts in dimension
// 0.
var fusedModules = []string{"gate_up_proj", "down_proj", "gate_proj", "up_proj"}

// isFused reports whether the part of a name after "experts." denotes a tensor with all experts of a layer.
func (f family) isFused(name string) bool {
	return name == "" || slices.ContainsFunc(slices.Concat(fusedModules, f.projections), func(module string) bool {
		suffix, ok := strings.CutPrefix(name, module)
		return ok && tensorSuffix.MatchString(suffix)
	})
}

// layerModules lists the modules of a layer other than its MoE block and its norms. The last four belong to multi-token
// prediction.
var layerModules = []string{"self_attn", "linear_attn", "rotary_emb", "eh_proj", "embed_tokens", "shared_head", "final_layernorm"}

// independentInLayer reports whether a tensor of a layer, outside of its MoE block, is known to be independent of the
// order of the experts.
func (c *Config) independentInLayer(name string) bool {
	module, rest, _ := strings.Cut(name, ".")
	f := families[c.ModelType]
	switch {
	case modelconfig.RelatesToExperts(name) && module != f.block, modelconfig.RelatesToExperts(rest):
		return false
	case module == f.block || module == "mlp": // the dense FFN of a layer without experts
		projection, _, _ := strings.Cut(rest, ".")
		return slices.Contains(slices.Concat(llamaProjections, []string{"gate_up_proj"}), projection)
	}
	return strings.HasSuffix(module, "norm") || slices.Contains(layerModules, module)
}

var (
	// rootModules lists the modules of a language model other than its layers.
	rootModules = []string{"embed_tokens", "norm", "lm_head", "rotary_emb", "score"}
	// otherModels lists modules of encoders, speech models and multi-token prediction: separate models next to the
	// language model.
	otherModels = []string{
		"visual", "vision", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "multi_modal_projector", "mm_projector", "projector", "mlp1",
		"aligner", "image_newline", "view_seperator", "view_separator", "resampler", "talker", "code2wav", "token2wav", "mtp",
	}
	// rootPrefixes lists modules that only contain other modules.
	rootPrefixes = []string{"model", "language_model", "language", "thinker"}
)

// Independent reports whether a tensor is known, by its name, to be independent of the order of the experts. The name
// is that of a causal language model, as in adapters.
func (c *Config) Independent(name string) bool {
	if c.Classify(name).Role == Shared {
		return !modelconfig.RelatesToExperts(name)
	}
	if layer, _, rest := c.cutLayer(name); layer >= 0 {
		return c.independentInLayer(rest)
	}
	return c.independent(name, "")
}

// independent reports whether a tensor outside of the layers is known to be independent of the order of the experts. In
// a multimodal model, root is the prefix of the language model's names. Names without this prefix belong to another
// model.
func (c *Config) independent(name, root string) bool {
	rest := name
	for {
		module, below, _ := strings.Cut(rest, ".")
		switch {
		case slices.Contains(otherModels, module):
			return true
		case slices.Contains(rootModules, module):
			return !modelconfig.RelatesToExperts(rest)
		case slices.Contains(rootPrefixes, module):
			rest = below
			continue
		}
		return c.Wrapper != "" && root != "" && root != "model." && !strings.HasPrefix(name, root) && !modelconfig.RelatesToExperts(name)
	}
}
