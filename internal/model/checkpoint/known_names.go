// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"regexp"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/model/family"
	"github.com/semmoe/operator/solver/modelconfig"
)

// This file lists the tensor names with a known dependence on the order of the experts. Other names are refused.

// CheckEntries refuses a JSON configuration that may name experts by number. Errors are *InvalidError and name the
// entry.
func (c *Config) CheckEntries(text []byte) error {
	check := modelconfig.CheckExpertEntries
	if c.LayoutAs != "" {
		check = modelconfig.CheckForeignEntries
	}
	// A list may have entries for the zero experts as well.
	for _, experts := range slices.Compact([]int{c.Experts, c.Experts + c.ZeroExperts}) {
		if err := check(text, experts, c.Layers); err != nil {
			return Invalidf("%v", err)
		}
	}
	return nil
}

// tensorSuffix matches the suffixes that quantisation formats append to the name of a projection. No suffix contains an
// expert number.
var tensorSuffix = regexp.MustCompile(`^(?:[._](?:weight|bias|blocks|scales?(?:_2)?|inv|packed|input|output|global|zero|point|shape|offset|g_idx|` +
	`qweight|qzeros|deq|quant|second|pre|smooth|quantizer|_?amax|_?pre_quant_scale|_?scale))*$`)

// identity matches the names of tensors that may contain the number of their expert.
var identity = regexp.MustCompile(`(?:^|[._])(?:ids?|idx|index|indices|number|order|position|rank|slot|map)(?:$|[._])`)

// isOfExpert reports whether a tensor belongs only to the expert with the number before the name. Another number in the
// name, or the integers of a tensor with an unknown name, could be numbers of other experts.
func isOfExpert(f *family.Family, name string, dtype DType) bool {
	if len(f.Projections) == 0 {
		return false // the layout has no separate experts
	}
	isInteger := slices.Contains([]DType{"I16", "U16", "I32", "U32", "I64", "U64"}, dtype)
	module, rest, _ := strings.Cut(name, ".")
	for _, projection := range f.Projections {
		if suffix, ok := strings.CutPrefix(module, projection); ok && tensorSuffix.MatchString(suffix) {
			return !modelconfig.RelatesToExperts(rest) && !hasNumber(rest)
		}
	}
	return name != "" && !isInteger && !identity.MatchString(name) && !strings.ContainsAny(module, "0123456789") && !modelconfig.RelatesToExperts(name) && !hasNumber(rest)
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

// fusedModules lists the projections that contain all experts of a layer in one tensor of "experts", with the experts in
// dimension 0.
var fusedModules = []string{"gate_up_proj", "down_proj", "gate_proj", "up_proj"}

// isFused reports whether a name in the block denotes a tensor with all experts of a layer.
func isFused(f *family.Family, name string) bool {
	modules := slices.Concat(f.Fused...)
	if f.FusedIn != "" {
		var inside bool
		if name, inside = strings.CutPrefix(name, f.FusedIn); !inside || name == "" {
			return inside
		}
		if name, inside = strings.CutPrefix(name, "."); !inside {
			return false
		}
		modules = append(modules, slices.Concat(fusedModules, f.Projections)...)
	}
	return slices.ContainsFunc(modules, func(module string) bool {
		suffix, ok := strings.CutPrefix(name, module)
		return ok && tensorSuffix.MatchString(suffix)
	})
}

// independentInLayer reports whether a tensor of a layer, outside of its MoE block, is known to be independent of the
// order of the experts.
func (c *Config) independentInLayer(name string) bool {
	module, rest, _ := strings.Cut(name, ".")
	f := c.family()
	switch {
	case modelconfig.RelatesToExperts(rest):
		return false
	case slices.Contains(family.LayerModules, module):
		return true
	case module == f.Block || module == "mlp": // the dense FFN of a layer without experts
		projection, _, _ := strings.Cut(rest, ".")
		return slices.Contains(ffnProjections, projection) || slices.Contains(f.Projections, projection) || slices.Contains(f.Dense, projection)
	}
	return strings.HasSuffix(module, "norm") && !modelconfig.RelatesToExperts(module)
}

// ffnProjections are the linear maps of a dense FFN.
var ffnProjections = []string{"gate_proj", "up_proj", "down_proj", "gate_up_proj"}

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
	if c.prefix != "" {
		rest = strings.TrimPrefix(name, root)
	}
	for {
		module, below, _ := strings.Cut(rest, ".")
		switch {
		case slices.Contains(family.OtherModels, module):
			return true
		case slices.Contains(family.RootModules, module), strings.HasSuffix(module, "norm"):
			return !modelconfig.RelatesToExperts(rest)
		case slices.Contains(family.RootPrefixes, module):
			rest = below
			continue
		}
		return c.Wrapper != "" && root != "" && root != "model." && !strings.HasPrefix(name, root) && !modelconfig.RelatesToExperts(name)
	}
}
