// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/trace"
)

func TestGroups(t *testing.T) {
	for name, test := range map[string]struct {
		config string
		groups int
		want   string
	}{
		"groups":           {`{"n_group": 8}`, 8, ""},
		"no groups":        {`{"n_group": null}`, 1, ""},
		"no n_group":       {`{}`, 1, ""},
		"in a wrapper":     {`{"text_config": {"n_group": 4}}`, 4, ""},
		"in language":      {`{"language_config": {"n_group": 4}}`, 4, ""},
		"of Python":        {`{"n_group": 8, "limit": Infinity}`, 8, ""},
		"wrapped default":  {`{"text_config": {"model_type": "deepseek_v3"}}`, 8, ""},
		"no config":        {"", 0, "model_config is missing in the trace"},
		"no divisor":       {`{"n_group": 5}`, 0, "n_group is 5; it must divide the 16 experts"},
		"no group":         {`{"n_group": 0}`, 0, "n_group is 0"},
		"not a number":     {`{"n_group": "8"}`, 0, "not the JSON of a model configuration"},
		"more than enough": {`{"n_group": 32}`, 0, "n_group is 32"},
	} {
		m := trace.Model{Type: "qwen3_moe", Experts: 16, Config: test.config}
		groups, err := m.Groups()
		switch {
		case test.want == "" && (err != nil || groups != test.groups):
			t.Errorf("%s: %d groups, %v; want %d", name, groups, err, test.groups)
		case test.want != "" && (!trace.IsInvalid(err) || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	// The code of this model type has groups by default.
	m := trace.Model{Type: "deepseek_v3", Experts: 16, Config: "{}"}
	if groups, err := m.Groups(); groups != 8 || err != nil {
		t.Errorf("deepseek_v3 without n_group: %d groups, %v; want 8", groups, err)
	}
}
