// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/modelconfig"
)

// MoELayer lists the tensors of a layer that depend on the order of its experts.
type MoELayer struct {
	// Layer is the model layer index.
	Layer int
	// Gate, Fused and Unrecognised are names of tensors, sorted.
	Gate, Fused, Unrecognised []string
	// experts maps each tensor of an expert (by Part.Name) to the experts that have it.
	experts map[string][]bool
	// weights maps the name of each weight of an expert to that of the first expert that was read. mixed reports that the
	// weights of other experts have other shapes or types.
	weights map[string]Tensor
	mixed   bool
	// block is the name prefix of the layer's MoE block.
	block string
	// invalid is the reason why a layer of multi-token prediction cannot be permuted. It is nil for hidden layers.
	invalid error
}

// MoELayers returns the MoE layers of the checkpoint. Hidden layers must be complete, and all MoE layers declared by
// config.json must exist. Layers of multi-token prediction may be absent, incomplete or of another width. Errors are
// *InvalidError and name the tensor.
func (c *Checkpoint) MoELayers() (map[int]*MoELayer, error) {
	layers := map[int]*MoELayer{}
	for _, shard := range c.Shards {
		for name := range shard.Tensors {
			if err := c.addToLayer(layers, name); err != nil {
				return nil, Invalidf("%s: %v", shard.Path, err)
			}
		}
	}
	// A layer with only a dense FFN or a shared expert is not an MoE layer.
	maps.DeleteFunc(layers, func(_ int, l *MoELayer) bool { return len(l.experts)+len(l.Fused)+len(l.Gate) == 0 })
	for _, layer := range c.Config.MoELayers {
		if layers[layer] == nil {
			f := c.Config.family()
			return nil, Invalidf("%s: layer %d has neither gate nor experts, but %s (model_type %s) declares an MoE layer: no tensor is named as in %q",
				c.Dir, layer, configFile, c.Config.ModelType, fmt.Sprintf("layers.%d.%s.weight", layer, strings.TrimPrefix(f.Block+"."+f.Gate, ".")))
		}
	}
	for _, layer := range slices.Sorted(maps.Keys(layers)) {
		slices.Sort(layers[layer].Gate)
		slices.Sort(layers[layer].Fused)
		slices.Sort(layers[layer].Unrecognised)
		if layer >= c.Config.Layers {
			continue
		}
		if err := c.checkComplete(layers[layer]); err != nil {
			return nil, err
		}
	}
	return layers, nil
}

func (c *Checkpoint) addToLayer(layers map[int]*MoELayer, name string) error {
	part := c.Config.Classify(name)
	if part.Role == Other || part.Role == Shared && !modelconfig.RelatesToExperts(part.Name) {
		return nil
	}
	l := layers[part.Layer]
	if l == nil {
		l = &MoELayer{Layer: part.Layer, experts: map[string][]bool{}, weights: map[string]Tensor{}, block: part.block}
		layers[part.Layer] = l
	}
	err := c.addPart(l, part, name)
	if part.Layer < c.Config.Layers {
		return err
	}
	l.invalid = cmp.Or(l.invalid, err)
	return nil
}

func (c *Checkpoint) addPart(l *MoELayer, part Part, name string) error {
	if part.block != l.block {
		return Invalidf("tensor %q and the tensors under %q belong to the same layer %d", name, l.block, part.Layer)
	}
	tensor, _ := c.Tensor(name)
	switch {
	case part.Role == Gate:
		l.Gate = append(l.Gate, name)
	case part.Role == Fused:
		l.Fused = append(l.Fused, name)
	case part.Role == Expert && isOfExpert(c.Config.family(), part.Name, tensor.DType):
		if part.Expert >= c.Config.Experts && part.Expert < c.Config.Experts+c.Config.ZeroExperts {
			return nil // transformers 5 stores weights of zero experts, which do not move
		}
		if part.Expert >= c.Config.Experts {
			return Invalidf("tensor %q: %s declares only %d experts per layer, 0 to %d", name, configFile, c.Config.Experts, c.Config.Experts-1)
		}
		if l.experts[part.Name] == nil {
			l.experts[part.Name] = make([]bool, c.Config.Experts)
		}
		l.experts[part.Name][part.Expert] = true
		if isWeight(part.Name) {
			first, known := l.weights[part.Name]
			if !known {
				l.weights[part.Name] = tensor
			}
			l.mixed = l.mixed || known && !sameKind(first, tensor)
		}
	default:
		l.Unrecognised = append(l.Unrecognised, name)
	}
	return nil
}

// checkComplete requires the gate, and either all projections of every expert of the layer or the fused tensors.
func (c *Checkpoint) checkComplete(l *MoELayer) error {
	f := c.Config.family()
	if len(l.experts) == 0 {
		var names []string
		for _, name := range l.Fused {
			names = append(names, c.Config.Classify(name).Name)
		}
		if name := missingFused(f, names); name != "" && len(l.Unrecognised) > 0 && len(l.Fused) == 0 {
			return c.unrecognised(l.Unrecognised[0])
		} else if name != "" && len(l.Fused) == 0 && len(f.Projections) > 0 {
			return c.missing(l, "experts.0."+f.Projections[0]+".weight")
		} else if name != "" {
			return c.missing(l, name)
		}
	} else if err := c.checkExpertForms(l); err != nil {
		return err
	}
	if gate := l.block + f.Gate + ".weight"; !c.hasGateWeight(l, gate) {
		return c.missing(l, f.Gate+".weight")
	}
	return nil
}

// missing returns the error of a missing tensor of the MoE block.
func (c *Checkpoint) missing(l *MoELayer, name string) error {
	return Invalidf("%s: tensor %q is missing", c.listing(), l.block+name)
}

// unrecognised returns the error of a tensor that may depend on the order of the experts.
func (c *Checkpoint) unrecognised(name string) error {
	return Invalidf("%s: tensor %q is not known for model_type %s: its dependence on the order of the experts is unknown",
		c.shardOf[name].Path, name, c.Config.ModelType)
}

// hasGateWeight reports whether a layer has the gate's weight in any form, such as weight_packed or qweight.
func (c *Checkpoint) hasGateWeight(l *MoELayer, plain string) bool {
	return slices.Contains(l.Gate, plain) || slices.ContainsFunc(l.Gate, func(name string) bool {
		switch c.Config.Classify(name).Name {
		case "weight_packed", "qweight":
			return true
		}
		return false
	})
}

// listing returns the path of the file that lists the tensors.
func (c *Checkpoint) listing() string {
	if c.IndexName != "" {
		return filepath.Join(c.Dir, c.IndexName)
	}
	return c.Shards[0].Path
}

// CheckPermutable requires that the experts of every MoE layer among the hidden layers can be permuted.
func (c *Checkpoint) CheckPermutable() error {
	layers, err := c.MoELayers()
	if err != nil {
		return err
	}
	for _, layer := range c.Config.MoELayers {
		if _, err := c.ExpertAxes(layers[layer]); err != nil {
			return err
		}
	}
	if err := c.CheckOutside(layers, nil); err != nil {
		return err
	}
	if err := c.Config.CheckEntries(c.ConfigText); err != nil {
		return Invalidf("%s: %v", filepath.Join(c.Dir, configFile), err)
	}
	return nil
}

// CheckOutside requires that everything outside of the MoE blocks is known to be independent of the order of the
// experts: the tensors of hidden layers, of the given layers of multi-token prediction and of the whole model, and the
// metadata in the shards' headers.
func (c *Checkpoint) CheckOutside(layers map[int]*MoELayer, predicting []int) error {
	root := strings.TrimSuffix(c.Config.prefix, path.Base(strings.ReplaceAll(c.Config.prefix, ".", "/"))+".")
	for _, l := range layers {
		if c.Config.prefix == "" {
			root, _, _ = strings.Cut(l.block, "layers.")
		}
		break
	}
	for _, shard := range c.Shards {
		for name := range shard.Tensors {
			layer, _, rest := c.Config.cutLayer(name)
			switch {
			case layer >= c.Config.Layers && !slices.Contains(predicting, layer):
			case layer >= 0 && layers[layer] != nil && c.Config.Classify(name).Role != Other: // ExpertAxes checks the block
			case layer >= 0 && !c.Config.independentInLayer(rest), layer < 0 && !c.Config.independent(name, root):
				return c.unrecognised(name)
			}
		}
		for key, value := range shard.Metadata {
			if modelconfig.RelatesToExperts(key) || modelconfig.NamesExpert(value) {
				return Invalidf("%s: __metadata__ %.80q names experts; such checkpoints cannot be permuted", shard.Path, key)
			}
		}
	}
	return nil
}

// ExpertAxes returns the axis of each tensor of a layer that contains values of all its experts. These tensors must be
// gathered to permute the experts. It returns an error for an incomplete layer, and for a layer with a tensor that
// depends on the order of the experts in an unknown way.
func (c *Checkpoint) ExpertAxes(l *MoELayer) (map[string]Axis, error) {
	if l.invalid != nil {
		return nil, Invalidf("%s: %v", c.listing(), l.invalid)
	}
	if len(l.Unrecognised) > 0 {
		return nil, c.unrecognised(l.Unrecognised[0])
	}
	if err := c.checkComplete(l); err != nil {
		return nil, err
	}
	axes := map[string]Axis{}
	for _, name := range slices.Concat(l.Gate, l.Fused) {
		axis, dependent, err := c.axisOf(name)
		if err != nil {
			return nil, err
		}
		if dependent {
			axes[name] = axis
		}
	}
	return axes, nil
}
