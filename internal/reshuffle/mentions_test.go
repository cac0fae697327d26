package reshuffle

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/checkpoint"
)

// mentions is a mapping that turns layer 1 of a small checkpoint around: expert e becomes 11-e.
func mentions(t *testing.T) (*checkpoint.Checkpoint, *mapping) {
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

func TestRenameMentions(t *testing.T) {
	c, m := mentions(t)
	for name, test := range map[string]struct{ in, want string }{
		"module":            {`{"ignore": [ "model.layers.1.mlp.experts.3.down_proj" ]}`, `{"ignore": [ "model.layers.1.mlp.experts.8.down_proj" ]}`},
		"key":               {`{"extra":{"model.layers.1.mlp.experts.0.up_proj":{"bits":8}}}`, `{"extra":{"model.layers.1.mlp.experts.11.up_proj":{"bits":8}}}`},
		"expert itself":     {`["model.layers.1.mlp.experts.3"]`, `["model.layers.1.mlp.experts.8"]`},
		"pattern of one":    {`["model.layers.1.mlp.experts.4.*"]`, `["model.layers.1.mlp.experts.7.*"]`},
		"other layer":       {`["model.layers.0.mlp.experts.3.down_proj"]`, `["model.layers.0.mlp.experts.3.down_proj"]`},
		"other prefix":      {`["model.language_model.layers.1.mlp.experts.3.down_proj"]`, `["model.language_model.layers.1.mlp.experts.8.down_proj"]`},
		"number of Python":  {`{"limit":[0.0,Infinity],"ignore":["model.layers.1.mlp.experts.3.down_proj"]}`, `{"limit":[0.0,Infinity],"ignore":["model.layers.1.mlp.experts.8.down_proj"]}`},
		"gate":              {`["model.layers.1.mlp.gate","lm_head"]`, `["model.layers.1.mlp.gate","lm_head"]`},
		"all experts":       {`["re:.*mlp\\.experts\\.\\d+\\.down_proj$","*.experts.*","model.layers.1.mlp.experts","model.layers.*.mlp.experts*","experts"]`, ``},
		"escapes, brackets": {`{"a\"model.layers.1.mlp.experts.3.w":"<\u00e9>","b":1e5}`, ``},
	} {
		t.Run(name, func(t *testing.T) {
			if test.want == "" {
				test.want = test.in
			}
			got, err := renameMentions(c, m, []byte(test.in))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
	for name, test := range map[string]struct{ in, want string }{
		"ambiguous end":       {`["model.layers.1.mlp.experts.1"]`, "may stand for expert 1 alone or also for expert 10"},
		"part of a name":      {`["experts.3.down_proj"]`, "cannot be rewritten"},
		"set in a pattern":    {`["re:model\\.layers\\.1\\.mlp\\.experts\\.(3|4)\\..*"]`, "cannot be rewritten"},
		"one digit":           {`["re:.*experts\\.\\d\\.up_proj"]`, "cannot be rewritten"},
		"shell pattern":       {`["model.layers.*.mlp.experts.[0-3].*"]`, "cannot be rewritten"},
		"negative look-ahead": {`["re:.*experts\\.(?!3).*"]`, "cannot tell"},
		"not JSON":            {`[`, "not valid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			if out, err := renameMentions(c, m, []byte(test.in)); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %s, %v, want %q", out, err, test.want)
			}
		})
	}
}

// TestMixedPrecision has one expert that is not quantised, and lists that say so: both move.
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
	mustRun(t, Options{Model: out, Permutation: p.Inverse(), Out: back})
	for _, name := range []string{"config.json", "hf_quant_config.json", checkpoint.IndexFile} {
		sameFile(t, filepath.Join(model, name), filepath.Join(back, name))
	}
	sameTensors(t, m.tensors, readAll(t, back))
}
