package checkpoint

import (
	"bytes"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// MoELayer lists the tensors of a layer that depend on the order of its experts.
type MoELayer struct {
	// Layer is the model layer index.
	Layer int
	// Gate, Fused and Unrecognised are names of tensors, sorted.
	Gate, Fused, Unrecognised []string
	// experts holds, for each tensor that an expert has (by Part.Name), which experts have it.
	experts map[string][]bool
	// block is the name of the layer's MoE block.
	block string
}

// MoELayers finds the MoE layers of the checkpoint and requires that those among the hidden layers are complete, and that
// config.json announces no other. Layers of multi-token prediction are listed as they are: they may be absent. Errors are *InvalidError and name the tensor.
func (c *Checkpoint) MoELayers() (map[int]*MoELayer, error) {
	layers := map[int]*MoELayer{}
	for _, shard := range c.Shards {
		for _, name := range shard.Names() {
			if err := c.addToLayer(layers, name); err != nil {
				return nil, Invalidf("%s: %v", shard.Path, err)
			}
		}
	}
	// A dense FFN and a shared expert alone make no MoE layer.
	maps.DeleteFunc(layers, func(_ int, l *MoELayer) bool { return len(l.experts)+len(l.Fused)+len(l.Gate) == 0 })
	for _, layer := range c.Config.MoELayers {
		if layers[layer] == nil {
			return nil, Invalidf("%s: layer %d has neither gate nor experts; by %s (model_type %s) it is an MoE layer", c.Dir, layer, configFile, c.Config.ModelType)
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
	if part.Role == Other || part.Role == Shared {
		return nil
	}
	l := layers[part.Layer]
	if l == nil {
		l = &MoELayer{Layer: part.Layer, experts: map[string][]bool{}, block: part.block}
		layers[part.Layer] = l
	}
	if part.block != l.block {
		return Invalidf("tensor %q and the tensors under %q are of the same layer %d", name, l.block, part.Layer)
	}
	switch part.Role {
	case Gate:
		l.Gate = append(l.Gate, name)
	case Fused:
		l.Fused = append(l.Fused, name)
	case Unrecognised:
		l.Unrecognised = append(l.Unrecognised, name)
	case Expert:
		if part.Expert >= c.Config.Experts {
			return Invalidf("tensor %q: %s says that a layer has %d experts, 0 to %d", name, configFile, c.Config.Experts, c.Config.Experts-1)
		}
		if l.experts[part.Name] == nil {
			l.experts[part.Name] = make([]bool, c.Config.Experts)
		}
		l.experts[part.Name][part.Expert] = true
	}
	return nil
}

// checkComplete requires the gate, and each tensor that an expert of the layer has of all its experts, or the fused
// tensors instead.
func (c *Checkpoint) checkComplete(l *MoELayer) error {
	f := families[c.Config.ModelType]
	missing := func(name string) error {
		return Invalidf("%s: tensor %q is missing", c.listing(), l.block+name)
	}
	if len(l.experts) == 0 {
		var names []string
		for _, name := range l.Fused {
			names = append(names, c.Config.Classify(name).Name)
		}
		if name := f.missingFused(names); name != "" && len(l.Fused) > 0 {
			return missing("experts." + name)
		} else if name != "" {
			return missing("experts.0." + f.projections[0] + ".weight")
		}
	} else if name := f.missingProjection(slices.Collect(maps.Keys(l.experts))); name != "" {
		return missing("experts.0." + name)
	}
	for _, name := range slices.Sorted(maps.Keys(l.experts)) {
		for expert, has := range l.experts[name] {
			part := Part{Name: name, block: l.block}
			if !has && !c.hasOtherForm(l, part, expert) {
				return missing(part.ExpertName(expert)[len(l.block):])
			}
		}
	}
	if gate := l.block + f.gate + ".weight"; !c.hasGateWeight(l, gate) {
		return missing(f.gate + ".weight")
	}
	return nil
}

// hasGateWeight accepts any form of the weight, such as weight_packed or qweight.
func (c *Checkpoint) hasGateWeight(l *MoELayer, plain string) bool {
	return slices.Contains(l.Gate, plain) || slices.ContainsFunc(l.Gate, func(name string) bool {
		switch c.Config.Classify(name).Name {
		case "weight_packed", "qweight":
			return true
		}
		return false
	})
}

// hasOtherForm reports whether an expert that lacks a tensor is stored in another form than the others on purpose:
// config.json names it, as quantisation ignore lists do, and the projection is there.
func (c *Checkpoint) hasOtherForm(l *MoELayer, lacking Part, expert int) bool {
	if !bytes.Contains(c.ConfigText, []byte(Part{block: l.block}.ExpertName(expert)+".")) {
		return false
	}
	for _, projection := range families[c.Config.ModelType].projections {
		if !isProjection(lacking.Name, projection) {
			continue
		}
		for name, experts := range l.experts {
			if isProjection(name, projection) && experts[expert] {
				return true
			}
		}
	}
	return false
}

// listing is the file that lists the tensors.
func (c *Checkpoint) listing() string {
	if c.HasIndex {
		return filepath.Join(c.Dir, indexFile)
	}
	return c.Shards[0].Path
}

// CheckPermutable requires that the experts of every MoE layer among the hidden layers can be put into another order.
func (c *Checkpoint) CheckPermutable() error {
	layers, err := c.MoELayers()
	if err != nil {
		return err
	}
	for _, layer := range c.Config.MoELayers {
		if _, err := c.ExpertRows(layers[layer]); err != nil {
			return err
		}
	}
	return c.CheckMetadata()
}

// CheckMetadata refuses headers whose free text names experts: what it says would be of another expert afterwards.
func (c *Checkpoint) CheckMetadata() error {
	for _, shard := range c.Shards {
		for key, value := range shard.Metadata {
			if strings.Contains(key+value, ".experts.") {
				return Invalidf("%s: __metadata__ %.80q names experts; such checkpoints cannot be permuted", shard.Path, key)
			}
		}
	}
	return nil
}

// gateForms are the tensors of a gate that are known: those with a row for each expert, and those that describe the whole.
var gateForms = map[string]struct{ rows, whole bool }{
	"weight":                  {rows: true},
	"bias":                    {rows: true},
	"e_score_correction_bias": {rows: true},
	"weight_packed":           {rows: true},
	"weight_scale":            {rows: true, whole: true},
	"weight_scale_inv":        {rows: true, whole: true},
	"weight_scale_2":          {whole: true},
	"weight_global_scale":     {whole: true},
	"input_scale":             {whole: true},
	"input_global_scale":      {whole: true},
}

// ExpertRows lists the tensors of a layer whose dimension 0 is the expert: what must be gathered to permute the
// experts. It refuses a layer that is not complete, or has a tensor of which it cannot tell how it depends on the order of the experts.
func (c *Checkpoint) ExpertRows(l *MoELayer) ([]string, error) {
	if err := c.checkComplete(l); err != nil {
		return nil, err
	}
	if len(l.Unrecognised) > 0 {
		name := l.Unrecognised[0]
		return nil, Invalidf("%s: tensor %q is not known for model_type %s: whether it depends on the order of the experts cannot be told",
			c.shardOf[name].Path, name, c.Config.ModelType)
	}
	var rows []string
	for _, name := range slices.Concat(l.Gate, l.Fused) {
		hasRows, err := c.hasRows(name)
		if err != nil {
			return nil, err
		}
		if hasRows {
			rows = append(rows, name)
		}
	}
	return rows, nil
}

func (c *Checkpoint) hasRows(name string) (bool, error) {
	shard := c.shardOf[name]
	tensor, experts := shard.Tensors[name], int64(c.Config.Experts)
	part := c.Config.Classify(name)
	form, known := gateForms[part.Name]
	if part.Role == Fused {
		form.rows, form.whole, known = true, true, true
	}
	switch {
	case !known:
		return false, Invalidf("%s: gate tensor %q is of a kind whose rows cannot be moved", shard.Path, name)
	case form.rows && len(tensor.Shape) > 0 && tensor.Shape[0] == experts && (tensor.End-tensor.Begin)%experts == 0:
		return true, nil
	case form.whole && tensor.Elements() == 1:
		return false, nil
	}
	return false, Invalidf("%s: tensor %q has shape %v of %s; permuting the experts needs %d rows, one for each expert",
		shard.Path, name, tensor.Shape, tensor.DType, experts)
}
