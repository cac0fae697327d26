// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// reversed returns a small checkpoint and a mapping that reverses layer 1: expert e becomes 11-e.
func reversed(t *testing.T) (*checkpoint.Checkpoint, *mapping) {
	t.Helper()
	m := generators["qwen3_moe"](1)
	c, err := checkpoint.Open(m.write(t, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	p := &Permutation{[]LayerPermutation{{1, []int{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}}}}
	mapping, err := newMapping(c, p)
	if err != nil {
		t.Fatal(err)
	}
	return c, mapping
}

func TestRename(t *testing.T) {
	c, m := reversed(t)
	for name, test := range map[string]struct{ in, want string }{
		"module":            {`{"ignore": [ "model.layers.1.mlp.experts.3.down_proj" ]}`, `{"ignore": [ "model.layers.1.mlp.experts.8.down_proj" ]}`},
		"key":               {`{"extra":{"model.layers.1.mlp.experts.0.up_proj":{"bits":8}}}`, `{"extra":{"model.layers.1.mlp.experts.11.up_proj":{"bits":8}}}`},
		"whole expert":      {`["model.layers.1.mlp.experts.3"]`, `["model.layers.1.mlp.experts.8"]`},
		"pattern of one":    {`["model.layers.1.mlp.experts.4.*"]`, `["model.layers.1.mlp.experts.7.*"]`},
		"other layer":       {`["model.layers.0.mlp.experts.3.down_proj"]`, `["model.layers.0.mlp.experts.3.down_proj"]`},
		"other prefix":      {`["model.language_model.layers.1.mlp.experts.3.down_proj"]`, `["model.language_model.layers.1.mlp.experts.8.down_proj"]`},
		"number of Python":  {`{"limit":[0.0,Infinity],"ignore":["model.layers.1.mlp.experts.3.down_proj"]}`, `{"limit":[0.0,Infinity],"ignore":["model.layers.1.mlp.experts.8.down_proj"]}`},
		"gate":              {`["model.layers.1.mlp.gate","lm_head"]`, `["model.layers.1.mlp.gate","lm_head"]`},
		"all experts":       {`["re:.*mlp\\.experts\\.\\d+\\.down_proj$","*.experts.*","model.layers.1.mlp.experts","model.layers.*.mlp.experts*","experts"]`, ``},
		"list of all":       {`{"modules":[["self_attn.q_proj"],` + listed("mlp.experts.", ".up_proj", 0, 12) + `]}`, ``},
		"mixed list of all": {`["lm_head",` + listed("mlp.experts.", ".up_proj", 0, 12)[1:], ``},
		"list of more":      {listed("mlp.experts.", ".up_proj", 0, 14), ``},
		"list of experts":   {listed("experts.", "", 0, 12), ``},
		"escapes, brackets": {`{"a\"model.layers.1.self_attn.3.w":"<\u00e9>","b":1e5}`, ``},
	} {
		t.Run(name, func(t *testing.T) {
			if test.want == "" {
				test.want = test.in
			}
			got, err := newExpertRenamer(c, m).rename(t.Context(), []byte(test.in))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
	for name, test := range map[string]struct{ in, want string }{
		"ambiguous end":                 {`["model.layers.1.mlp.experts.1"]`, "may match only expert 1 or also expert 10"},
		"part of a name":                {`["experts.3.down_proj"]`, "cannot be rewritten"},
		"set in a pattern":              {`["re:model\\.layers\\.1\\.mlp\\.experts\\.(3|4)\\..*"]`, "cannot be rewritten"},
		"one digit":                     {`["re:.*experts\\.\\d\\.up_proj"]`, "cannot be rewritten"},
		"shell pattern":                 {`["model.layers.*.mlp.experts.[0-3].*"]`, "cannot be rewritten"},
		"negative look-ahead":           {`["re:.*experts\\.(?!3).*"]`, "failed to parse it as a regular expression"},
		"incomplete list":               {listed("mlp.experts.", ".up_proj", 1, 13), "cannot be rewritten"},
		"two lists of half the experts": {`[` + listed("mlp.experts.", ".up_proj", 0, 6) + `,` + listed("mlp.experts.", ".up_proj", 6, 12) + `]`, "cannot be rewritten"},
		"list of different modules":     {`["mlp.experts.0.down_proj",` + listed("mlp.experts.", ".up_proj", 1, 12)[1:], "cannot be rewritten"},
		"list of all, and one expert":   {`{"a":` + listed("mlp.experts.", ".up_proj", 0, 12) + `,"b":["mlp.experts.3.up_proj"]}`, "cannot be rewritten"},
		"list of patterns":              {listed("mlp.experts.", "[12].up_proj", 0, 12), "cannot be rewritten"},
		"not JSON":                      {`[`, "not valid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			if out, err := newExpertRenamer(c, m).rename(t.Context(), []byte(test.in)); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %s, %v, want %q", out, err, test.want)
			}
		})
	}
}

// listed returns a JSON array of names that differ only in the expert number.
func listed(before, behind string, from, to int) string {
	var names []string
	for expert := from; expert < to; expert++ {
		names = append(names, strconv.Quote(before+strconv.Itoa(expert)+behind))
	}
	return "[" + strings.Join(names, ",") + "]"
}

// TestOtherModules checks that entries that match no expert in any interpretation are ruled out by their words.
func TestOtherModules(t *testing.T) {
	c, m := reversed(t)
	names := newExpertNames(c, m)
	for entry, other := range map[string]bool{
		"model.layers.1.self_attn*":                   true,
		"model.layers.1.mlp.shared_experts*":          true,
		`re:.*self_attn\..*1`:                         true,
		`re:model.layers.1.self_attn\.(?!q_proj).*`:   true,
		`model.layers.1.self_attn[1-3]`:               true,
		"*.shared_experts.1.*":                        true,
		"model.layers.1.mlp.expertsX*":                false, // any number of X
		"model.layers.1.mlp.experts_?":                false,
		"model.layers.1.mlp.experts_{0,1}":            false,
		"self_attn.1|experts.3":                       false,
		"(self_attn)?experts.3":                       false,
		`re:model.layers.1.(self_attn|mlp.experts.3)`: false,
		"model.layers.1.mlp.expert":                   false,
		"model*1*experts":                             false,
		"mlpXexperts.3*":                              true,
		"mlp.experts.3*":                              false,
		"*":                                           false,
	} {
		if got := names.isAnyAbsent(requiredWords(entry)); got != other {
			t.Errorf("%s: %t, want %t, by %q", entry, got, other, requiredWords(entry))
		}
		matches, err := interpretations(entry)
		if err != nil {
			continue // not a Go regular expression
		}
		for _, match := range matches {
			if i := slices.IndexFunc(names.all, match); other && i >= 0 {
				t.Errorf("%s matches %s", entry, names.all[i])
			}
		}
	}
	if out, err := newExpertRenamer(c, m).rename(t.Context(), []byte(`["re:model.layers.1.self_attn.(?!q_proj).*"]`)); err != nil {
		t.Errorf("%s, %v", out, err)
	}
}

// TestRenameCancelled checks that cancellation during the comparison of entries is not reported as an invalid
// checkpoint.
func TestRenameCancelled(t *testing.T) {
	c, m := reversed(t)
	writeFile(t, filepath.Join(c.Dir, "hf_quant_config.json"), []byte(`["*experts*"]`))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := findFiles(ctx, os.DirFS(c.Dir), c, m); !errors.Is(err, context.Canceled) || checkpoint.IsInvalid(err) {
		t.Errorf("error %v", err)
	}
}

// TestMixedPrecision has one expert that is not quantised and lists that name it. The expert and its name in the lists
// move.
func TestMixedPrecision(t *testing.T) {
	m := generators["deepseek_v3 in FP8, with groups and multi-token prediction"](1)
	const special = "model.layers.1.mlp.experts.7.up_proj"
	delete(m.tensors, special+".weight_scale_inv")
	m.add(special+".weight", "BF16", 2, 4)
	m.config["quantization_config"] = map[string]any{"ignored_layers": []string{special, "lm_head"}}
	p := m.permutation(m.layers...)
	model := m.write(t, 40)
	writeFile(t, filepath.Join(model, "hf_quant_config.json"), []byte(`{"exclude_modules": ["`+special+`"]}`))
	base := t.TempDir()
	out, back := filepath.Join(base, "out"), filepath.Join(base, "back")
	mustRun(t, Options{Model: model, Permutation: p, Out: out})
	c, err := checkpoint.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	moved := "model.layers.1.mlp.experts." + strconv.Itoa(invert(p.Layers[0].NewToOld)[7]) + ".up_proj"
	if x, _ := c.Tensor(moved + ".weight"); x.DType != "BF16" || !strings.Contains(string(c.ConfigText), `"`+moved+`"`) {
		t.Errorf("%s is %s; config %s", moved, x.DType, c.ConfigText)
	}
	mustRun(t, Options{Model: out, Permutation: inverseOf(p), Out: back})
	for _, name := range []string{"config.json", "hf_quant_config.json", checkpoint.IndexFile} {
		sameFile(t, filepath.Join(model, name), filepath.Join(back, name))
	}
	sameTensors(t, m.tensors, readAll(t, back))
}
