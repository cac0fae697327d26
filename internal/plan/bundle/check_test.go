// SPDX-License-Identifier: Apache-2.0

package bundle_test

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// mounted writes a ConfigMap in the form of a mounted volume.
func mounted(t *testing.T, data map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for key, value := range data {
		if err := os.WriteFile(filepath.Join(dir, key), []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestCheck(t *testing.T) {
	a := encoded(t, 1)
	for name, test := range map[string]struct {
		engine string
		change func(data map[string]string)
		digest string
		want   string
	}{
		"sound":                 {},
		"other plan":            {digest: strings.Repeat("0", 64), want: "contains plan " + a.Digest},
		"malformed digest":      {digest: "x", want: "plan digest"},
		"no manifest":           {change: func(d map[string]string) { delete(d, "manifest.json") }, want: "check that the ConfigMap of the plan is mounted"},
		"changed manifest":      {change: func(d map[string]string) { d["manifest.json"] += " " }, want: "want " + a.Digest},
		"no placement":          {change: func(d map[string]string) { delete(d, "placement.json") }, want: "placement.json"},
		"changed placement":     {change: func(d map[string]string) { d["placement.json"] += " " }, want: "placement.json is damaged"},
		"changed map":           {change: func(d map[string]string) { d["sglang.json"] = "{}" }, want: "engine/sglang.json is damaged"},
		"no map for the engine": {engine: "VLLM"},
		"another engine":        {engine: "TensorRTLLM"},
		"no permutation":        {change: func(d map[string]string) { delete(d, "gate-permutation.json") }},
		"neither map nor permutation": {engine: "VLLM", change: func(d map[string]string) { delete(d, "gate-permutation.json") },
			want: "neither an expert map nor gate-permutation.json"},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := bundle.ConfigMapData(a, cmp.Or(test.engine, "SGLang"))
			if err != nil {
				t.Fatal(err)
			}
			if test.change != nil {
				test.change(data)
			}
			if test.digest == "" {
				test.digest = a.Digest
			}
			m, err := bundle.Check(mounted(t, data), test.digest)
			if test.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				if err := m.CheckModel(model(), model().ModelDigest, 4); err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v does not contain %q", err, test.want)
			}
		})
	}
	t.Run("plan directory", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "plan")
		if err := plan.Write(dir, a, []byte("{}\n")); err != nil {
			t.Fatal(err)
		}
		if _, err := bundle.Check(dir, a.Digest); err != nil {
			t.Error(err)
		}
		corrupt(t, filepath.Join(dir, plan.TablesFile))
		if _, err := bundle.Check(dir, a.Digest); err == nil || !strings.Contains(err.Error(), plan.TablesFile) {
			t.Errorf("damaged tables: error = %v", err)
		}
	})
}

func TestFits(t *testing.T) {
	a := encoded(t, 1)
	data, err := bundle.ConfigMapData(a, "SGLang")
	if err != nil {
		t.Fatal(err)
	}
	m, err := bundle.Check(mounted(t, data), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	other := strings.Repeat("cd", 32)
	for name, test := range map[string]struct {
		change func(*checkpoint.Report)
		digest string
		ranks  int
		want   string
	}{
		"another model":       {digest: other, want: "is for model"},
		"no model":            {digest: "-", want: "is for model"},
		"checkpoint replaced": {change: func(r *checkpoint.Report) { r.ModelDigest = other }, want: "changed after it was profiled"},
		"experts":             {change: func(r *checkpoint.Report) { r.Experts = 32 }, want: "places 16 experts; the model has 32"},
		"layers":              {change: func(r *checkpoint.Report) { r.Layers = 5 }, want: "4 layers; the model has 5"},
		"MoE layers":          {change: func(r *checkpoint.Report) { r.MoELayers = []int{0, 1, 2} }, want: "[1 2 3]"},
		"EP size":             {ranks: 8, want: "EP size 4; the engine has 8"},
	} {
		t.Run(name, func(t *testing.T) {
			report, digest, ranks := model(), model().ModelDigest, 4
			if test.change != nil {
				test.change(&report)
			}
			if test.digest != "" {
				digest = test.digest
			}
			if test.ranks != 0 {
				ranks = test.ranks
			}
			if err := m.CheckModel(report, digest, ranks); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v does not contain %q", err, test.want)
			}
		})
	}
	m.Manifest.ModelDigest = ""
	if err := m.CheckModel(model(), "", 4); err == nil || !strings.Contains(err.Error(), "its routing trace has no model_digest") {
		t.Errorf("plan without a model digest: error = %v", err)
	}
}
