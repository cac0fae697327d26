package checkpoint

import (
	"bytes"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// checkExpertForms requires that every expert of a layer has all projections. Experts may be stored in different forms, such as some
// unquantised ones in a quantised checkpoint, where the configuration names each expert of another form: then its name moves with it.
func (c *Checkpoint) checkExpertForms(l *MoELayer) error {
	forms := map[string][]int{} // experts by the names of their tensors
	for expert := range c.Config.Experts {
		form := strings.Join(l.form(expert), " ")
		forms[form] = append(forms[form], expert)
	}
	usual := slices.MaxFunc(slices.Sorted(maps.Keys(forms)), func(a, b string) int { return len(forms[a]) - len(forms[b]) })
	f := families[c.Config.ModelType]
	for _, form := range slices.Sorted(maps.Keys(forms)) {
		names, first := strings.Fields(form), forms[form][0]
		if name := f.missingProjection(names); name != "" {
			// The form of the other experts decides the name of the tensor.
			for _, other := range strings.Fields(usual) {
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

// form lists the tensors of an expert, sorted.
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

// otherForm is the error of an expert that has other tensors than the usual ones, and that no configuration names. If the expert only lacks
// some tensors, these are missing.
func (c *Checkpoint) otherForm(l *MoELayer, expert, usual int) error {
	wanted, has := l.form(usual), l.form(expert)
	lacking := slices.DeleteFunc(slices.Clone(wanted), func(name string) bool { return slices.Contains(has, name) })
	name := func(expert int, tensor string) string { return Part{Name: tensor, block: l.block}.ExpertName(expert) }
	sameTypes := !slices.ContainsFunc(has, func(tensor string) bool {
		a, _ := c.Tensor(name(expert, tensor))
		b, known := c.Tensor(name(usual, tensor))
		return !known || a.DType != b.DType
	})
	if sameTypes {
		return c.missing(l, name(expert, lacking[0])[len(l.block):])
	}
	return Invalidf("%s: expert %d of layer %d is stored in another form (%s) than expert %d (%s), and no configuration file names it in full, as in %q: which experts have which form must be known to move them",
		c.listing(), expert, l.Layer, strings.Join(has, ", "), usual, strings.Join(wanted, ", "), name(expert, families[c.Config.ModelType].projections[0]))
}

// quantizationFiles are the files besides config.json that name quantised modules.
var quantizationFiles = []string{"hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json", "quant_model_description.json"}

// configurationNames reports whether a configuration file has the full name of an expert, or of a module or tensor below it.
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
