// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// checkExpertForms requires that every expert of a layer has all projections. Some experts may be stored in another
// form, such as unquantised experts in a quantised checkpoint, if the configuration names each of them. The name then
// moves with the expert.
func (c *Checkpoint) checkExpertForms(l *MoELayer) error {
	forms := map[string][]int{} // tensor names of a form, joined, to its experts
	for expert := range c.Config.Experts {
		form := strings.Join(l.form(expert), " ")
		if l.mixed {
			form += separator + c.kinds(l, expert)
		}
		forms[form] = append(forms[form], expert)
	}
	usual := slices.MaxFunc(slices.Sorted(maps.Keys(forms)), func(a, b string) int { return len(forms[a]) - len(forms[b]) })
	f := c.Config.family()
	for _, form := range slices.Sorted(maps.Keys(forms)) {
		names, first := formNames(form), forms[form][0]
		if name := missingProjection(f, names); name != "" {
			// The tensor is named as in the form of the other experts.
			for _, other := range formNames(usual) {
				if isProjection(other, strings.TrimSuffix(name, ".weight")) {
					name = other
					break
				}
			}
			return c.missing(l, Part{Name: name, block: l.block}.ExpertName(first)[len(l.block):])
		}
		for _, expert := range forms[form] {
			if form == usual || c.configurationNames(Part{block: l.block}.ExpertName(expert)) {
				continue
			}
			return c.otherForm(l, expert, forms[usual][0])
		}
	}
	return nil
}

// separator separates the tensor names of a form from the types and shapes.
const separator = "|"

func formNames(form string) []string {
	names, _, _ := strings.Cut(form, separator)
	return strings.Fields(names)
}

// kinds describes the types and shapes of an expert's weights.
func (c *Checkpoint) kinds(l *MoELayer, expert int) string {
	var kinds []string
	for _, name := range l.form(expert) {
		if isWeight(name) {
			weight, _ := c.Tensor(Part{Name: name, block: l.block}.ExpertName(expert))
			kinds = append(kinds, fmt.Sprintf("%s of %s %v", name, weight.DType, weight.Shape))
		}
	}
	return strings.Join(kinds, ", ")
}

// isWeight reports whether a tensor of an expert is a weight. Other tensors, such as the state of a quantizer, may
// differ in length.
func isWeight(name string) bool {
	return strings.HasSuffix(name, "weight") || strings.HasSuffix(name, "_packed")
}

func sameKind(a, b Tensor) bool { return a.DType == b.DType && slices.Equal(a.Shape, b.Shape) }

// form returns the tensors of an expert, sorted.
func (l *MoELayer) form(expert int) []string {
	var names []string
	for name, experts := range l.experts {
		if experts[expert] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// otherForm returns the error of an expert with other tensors than the usual form, which no configuration file names.
// If the expert only lacks tensors, the error is a missing tensor.
func (c *Checkpoint) otherForm(l *MoELayer, expert, usual int) error {
	wanted, has := l.form(usual), l.form(expert)
	lacking := slices.DeleteFunc(slices.Clone(wanted), func(name string) bool { return slices.Contains(has, name) })
	name := func(expert int, tensor string) string { return Part{Name: tensor, block: l.block}.ExpertName(expert) }
	sameTypes := !slices.ContainsFunc(has, func(tensor string) bool {
		a, _ := c.Tensor(name(expert, tensor))
		b, known := c.Tensor(name(usual, tensor))
		return !known || a.DType != b.DType
	})
	stored, other := strings.Join(has, ", "), strings.Join(wanted, ", ")
	if len(lacking) == 0 && slices.Equal(has, wanted) {
		stored, other = c.kinds(l, expert), c.kinds(l, usual)
	} else if sameTypes {
		return c.missing(l, name(expert, lacking[0])[len(l.block):])
	}
	return Invalidf("%s: expert %d of layer %d is stored in another form (%s) than expert %d (%s): to permute the experts, a configuration file must name it in full, as in %q",
		c.listing(), expert, l.Layer, stored, usual, other, name(expert, c.Config.family().Projections[0]))
}

// quantizationFiles lists the files other than config.json that name quantised modules.
var quantizationFiles = []string{"hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json", "quant_model_description.json"}

// configurationNames reports whether a configuration file contains the full name of an expert, or of a module or tensor
// of the expert.
func (c *Checkpoint) configurationNames(expert string) bool {
	texts := [][]byte{c.ConfigText}
	for _, name := range quantizationFiles {
		if text, err := readSmallFile("file", filepath.Join(c.Dir, name)); err == nil {
			texts = append(texts, text)
		}
	}
	return slices.ContainsFunc(texts, func(text []byte) bool {
		return bytes.Contains(text, []byte(`"`+expert+`.`)) || bytes.Contains(text, []byte(`"`+expert+`"`))
	})
}
