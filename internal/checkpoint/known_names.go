package checkpoint

import (
	"regexp"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/modelconfig"
)

// This file lists the names of tensors whose dependence on the order of the experts is known. Any other name is refused.

// CheckEntries refuses a JSON configuration that may name experts by number. Errors are *InvalidError and name the entry.
func (c *Config) CheckEntries(text []byte) error {
	if err := modelconfig.CheckExpertEntries(text, c.Experts, c.Layers); err != nil {
		return Invalidf("%v", err)
	}
	return nil
}

// tensorSuffix matches what quantisation formats append to the name of a projection. None of these holds the number of an expert.
var tensorSuffix = regexp.MustCompile(`^(?:[._](?:weight|bias|blocks|scales?(?:_2)?|inv|packed|input|output|global|zero|point|shape|offset|g_idx|` +
	`qweight|qzeros|deq|quant|second|pre|smooth|quantizer|_?amax|_?pre_quant_scale|_?scale))*$`)

// isOfExpert reports whether a tensor belongs to the expert whose number is before the name, whatever its content. A further number could
// be that of another expert.
func (f family) isOfExpert(name string) bool {
	module, rest, _ := strings.Cut(name, ".")
	for _, projection := range f.projections {
		if suffix, ok := strings.CutPrefix(module, projection); ok && tensorSuffix.MatchString(suffix) {
			return !modelconfig.SpeaksOfExperts(rest) && !hasNumber(rest)
		}
	}
	return name != "" && !strings.ContainsAny(module, "0123456789") && !modelconfig.SpeaksOfExperts(name) && !hasNumber(rest)
}

// hasNumber reports whether a component of a name is a number, other than that of a step of a sequential quantiser.
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

// fusedModules are the projections of all experts of a layer in one tensor, whose dimension 0 is the expert.
var fusedModules = []string{"gate_up_proj", "down_proj", "gate_proj", "up_proj"}

// isFused reports whether a name after "experts." is that of a tensor with all experts of a layer.
func (f family) isFused(name string) bool {
	return name == "" || slices.ContainsFunc(slices.Concat(fusedModules, f.projections), func(module string) bool {
		suffix, ok := strings.CutPrefix(name, module)
		return ok && tensorSuffix.MatchString(suffix)
	})
}

// layerModules are the modules of a layer besides its MoE block and its norms. The last four are of multi-token prediction.
var layerModules = []string{"self_attn", "linear_attn", "rotary_emb", "eh_proj", "embed_tokens", "shared_head", "final_layernorm"}

// independentInLayer reports whether a tensor of a layer, outside of its MoE block, is known not to depend on the order of the experts.
func (c *Config) independentInLayer(name string) bool {
	module, rest, _ := strings.Cut(name, ".")
	f := families[c.ModelType]
	switch {
	case modelconfig.SpeaksOfExperts(name) && module != f.block, modelconfig.SpeaksOfExperts(rest):
		return false
	case module == f.block || module == "mlp": // the dense FFN of a layer without experts
		projection, _, _ := strings.Cut(rest, ".")
		return slices.Contains(slices.Concat(llamaProjections, []string{"gate_up_proj"}), projection)
	}
	return strings.HasSuffix(module, "norm") || slices.Contains(layerModules, module)
}

var (
	// rootModules are the modules of a language model besides its layers.
	rootModules = []string{"embed_tokens", "norm", "lm_head", "rotary_emb", "score"}
	// otherModels are modules of encoders, of speech, and of multi-token prediction: models of their own around the language model.
	otherModels = []string{
		"visual", "vision", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "multi_modal_projector", "mm_projector", "projector", "mlp1",
		"aligner", "image_newline", "view_seperator", "view_separator", "resampler", "talker", "code2wav", "token2wav", "mtp",
	}
	// rootPrefixes are names of modules that only hold others.
	rootPrefixes = []string{"model", "language_model", "language", "thinker"}
)

// Independent reports whether a tensor, by its name, is known not to depend on the order of the experts. The name is that of a causal
// language model, such as adapters use.
func (c *Config) Independent(name string) bool {
	if c.Classify(name).Role == Shared {
		return !modelconfig.SpeaksOfExperts(name)
	}
	if layer, _, rest := c.cutLayer(name); layer >= 0 {
		return c.independentInLayer(rest)
	}
	return c.independent(name, "")
}

// independent reports whether a tensor outside of the layers is known not to depend on the order of the experts. In a multimodal model, root
// is the prefix of the language model's names; what is not below it belongs to another model.
func (c *Config) independent(name, root string) bool {
	rest := name
	for {
		module, below, _ := strings.Cut(rest, ".")
		switch {
		case slices.Contains(otherModels, module):
			return true
		case slices.Contains(rootModules, module):
			return !modelconfig.SpeaksOfExperts(rest)
		case slices.Contains(rootPrefixes, module):
			rest = below
			continue
		}
		return c.Wrapper != "" && root != "" && root != "model." && !strings.HasPrefix(name, root) && !modelconfig.SpeaksOfExperts(name)
	}
}
