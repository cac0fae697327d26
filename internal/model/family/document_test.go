// SPDX-License-Identifier: Apache-2.0

package family

import (
	"cmp"
	"fmt"
	"strings"
)

// familiesDocument returns the table of families for docs/model-families.md.
func familiesDocument() string {
	var text strings.Builder
	text.WriteString("| model type | gate | experts | SGLang map | micro-batches | TensorRT-LLM map | layout read in |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	for i := range All {
		f := &All[i]
		fmt.Fprintf(&text, "| `%s` | `%s` | %s | %s | %s | %s | %s |\n", f.Type, join(f.Block, f.Gate), f.expertsText(),
			cmp.Or(f.SGLang.mapText(), "no"), cmp.Or(f.SGLang.MicroBatches, "no"), cmp.Or(f.TensorRTLLMMap, "no"), f.Source)
	}
	return text.String()
}

func (s SGLang) mapText() string {
	if s.MapWithoutEffect {
		return s.ReadsMap + ", without effect"
	}
	return s.ReadsMap
}

// expertsText describes the tensors of experts.
func (f *Family) expertsText() string {
	var forms []string
	if len(f.Projections) > 0 {
		forms = append(forms, fmt.Sprintf("`%s`: %s", join(f.Block, "experts.N"), strings.Join(f.Projections, ", ")))
	}
	var fused []string
	for _, spellings := range f.Fused {
		fused = append(fused, spellings[0])
	}
	if path := join(f.Block, f.FusedIn); len(f.Projections) == 0 {
		forms = append(forms, fmt.Sprintf("`%s`: %s of all experts", path, strings.Join(fused, ", ")))
	} else {
		forms = append(forms, "or fused")
	}
	return strings.Join(forms, "; ")
}

func join(parts ...string) string {
	var named []string
	for _, part := range parts {
		if part != "" {
			named = append(named, part)
		}
	}
	return strings.Join(named, ".")
}

// formsDocument returns the table of forms for docs/model-families.md.
func formsDocument() string {
	var text strings.Builder
	text.WriteString("| form | separate experts | fused experts |\n| --- | --- | --- |\n")
	for _, form := range Forms {
		fmt.Fprintf(&text, "| %s | %s | %s |\n", form.Name, suffixes("experts.N.up_proj", form.Separate), suffixes("experts.gate_up_proj", form.Fused))
	}
	return text.String()
}

// suffixes returns the names of the tensors of a projection.
func suffixes(module string, suffixes []string) string {
	if len(suffixes) == 0 {
		return "no"
	}
	var names []string
	for i, suffix := range suffixes {
		if i > 0 {
			module = "…"
		}
		names = append(names, "`"+module+suffix+"`")
	}
	return strings.Join(names, ", ")
}
