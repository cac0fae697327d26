// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/model/family"
)

// family returns the layout of the checkpoint: that of its model type, or that which the user names.
func (c *Config) family() *family.Family {
	if c.layout != nil {
		return c.layout
	}
	if f := family.Lookup(cmp.Or(c.LayoutAs, c.ModelType)); f != nil {
		return f
	}
	return &family.Family{}
}

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
	// Name is the suffix of the tensor's name after the expert or the gate, such as up_proj.weight. For other roles and
	// for tensors of the gate in other modules, it is the name in the MoE block.
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

// Classify returns the part of the model that a tensor or a module belongs to.
func (c *Config) Classify(name string) Part {
	layer, prefix, rest := c.cutLayer(name)
	f := c.family()
	if layer < 0 || f.Type == "" {
		return Part{}
	}
	block := prefix
	if f.Block != "" {
		var inBlock bool
		if rest, inBlock = strings.CutPrefix(rest, f.Block+"."); !inBlock {
			return Part{}
		}
		block += len(f.Block) + 1
	}
	part := Part{Role: Unrecognised, Layer: layer, Name: rest, block: name[:block]}
	module, tail, _ := strings.Cut(rest, ".")
	_, ofGate := f.GateTensors[rest]
	switch {
	case ofGate:
		part.Role = Gate
	case rest == f.Gate:
		part.Role, part.Name = Gate, ""
	case strings.HasPrefix(rest, f.Gate+"."):
		part.Role, part.Name = Gate, rest[len(f.Gate)+1:]
	case slices.Contains(family.Shared, module), slices.Contains(f.Around, module):
		part.Role = Shared
	case module == "experts" && isNumbered(tail):
		number, name, _ := strings.Cut(tail, ".")
		part.Role, part.Name = Expert, name
		part.Expert, _ = index(number)
	case isFused(f, rest):
		part.Role = Fused
	case f.Block == "" && module != "experts" && !strings.HasPrefix(f.Gate, module+"."):
		return Part{} // the block is the layer itself, and the tensor belongs to another module of it
	}
	return part
}

// isNumbered reports whether the first component of a name is a number.
func isNumbered(name string) bool {
	number, _, _ := strings.Cut(name, ".")
	_, ok := index(number)
	return ok
}

// cutLayer splits a name into the layer index, the length of the prefix including the layer number and its dot, and the
// rest. The layer is negative if the name is outside of the layers.
func (c *Config) cutLayer(name string) (layer, prefix int, rest string) {
	for _, prefix := range family.PredictionPrefixes {
		if layer, length, rest := cutIndex(name, prefix); layer >= 0 {
			return layer + c.Layers, length, rest
		}
	}
	prefixes := family.LayerPrefixes
	if c.prefix != "" {
		prefixes = []string{c.prefix}
	}
	for _, prefix := range prefixes {
		if layer, length, rest := cutIndex(name, prefix); layer >= 0 {
			return layer, length, rest
		}
	}
	return -1, 0, ""
}

// cutIndex splits a name that begins with a prefix and an index. The index is negative for another name.
func cutIndex(name, prefix string) (layer, length int, rest string) {
	after, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return -1, 0, ""
	}
	number, rest, _ := strings.Cut(after, ".")
	if layer, ok = index(number); !ok {
		return -1, 0, ""
	}
	return layer, len(name) - len(rest), rest
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

func missingProjection(f *family.Family, tensors []string) string {
	for _, projection := range f.Projections {
		if !slices.ContainsFunc(tensors, func(t string) bool { return isProjection(t, projection) }) {
			return projection + ".weight"
		}
	}
	return ""
}

// missingFused returns the name in the block of a fused tensor that is missing, and an empty string if there is none.
func missingFused(f *family.Family, tensors []string) string {
	for _, spellings := range f.Fused {
		if !slices.ContainsFunc(spellings, func(s string) bool { return slices.Contains(tensors, inFused(f, s)) }) {
			return inFused(f, spellings[0])
		}
	}
	return ""
}

// inFused returns the path in the block of a fused tensor.
func inFused(f *family.Family, name string) string {
	if f.FusedIn == "" {
		return name
	}
	return f.FusedIn + "." + name
}
