// SPDX-License-Identifier: Apache-2.0

package bundle_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/plan/bundle"
)

func TestReadTables(t *testing.T) {
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		text string
		want map[string]string
		says string // empty if the file is valid
	}{
		"none":            {"{}", map[string]string{}, ""},
		"one":             {`{"` + a + `":"` + b + `"}`, map[string]string{a: b}, ""},
		"no JSON":         {`{`, nil, "tables.json: unexpected end"},
		"no object":       {`["` + a + `"]`, nil, "tables.json: json: cannot unmarshal array"},
		"no digest":       {`{"` + a + `":"../` + b[3:] + `"}`, nil, "tables.json: tables of plan " + a + `: digest "../`},
		"a short digest":  {`{"` + a[:16] + `":"` + b + `"}`, nil, `tables.json: plan: digest "` + a[:16]},
		"another version": {`{"` + a + `":{"tables":"` + b + `"}}`, nil, "cannot unmarshal object"},
	} {
		path := filepath.Join(dir, "tables.json")
		if err := os.WriteFile(path, []byte(tc.text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := bundle.ReadTables(path)
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if tc.says == "" && err != nil || tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)) {
			t.Errorf("%s: error %v, want one that contains %q", name, err, tc.says)
		}
	}
	if got, err := bundle.ReadTables(filepath.Join(dir, "absent")); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
}
