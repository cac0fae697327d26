// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/plan"
)

// FuzzParseList parses arbitrary lists. The files of an accepted list are below the directory of the plan, and have digests.
func FuzzParseList(f *testing.F) {
	digest := strings.Repeat("a", 64)
	start := `{"format":"semmoe-bundle/1","planDigest":"` + digest + `","files":{"manifest.json":"` + digest + `"`
	for _, text := range []string{
		start + `}}`, start + `,"tokenizer.json":"` + digest + `"}}`, start + `,"../evil":"` + digest + `"}}`, start + `,"/evil":"` + digest + `"}}`,
		start + `,"a/../b":"` + digest + `"}}`, start + `,"x":"y"}}`, `{"format":"semmoe-bundle/2"}`, `not JSON`, `null`,
	} {
		f.Add([]byte(text), digest)
	}
	f.Fuzz(func(t *testing.T, text []byte, planDigest string) {
		l, err := parseList(text, planDigest)
		if err != nil {
			return
		}
		if string(l.PlanDigest) != planDigest || l.Files[plan.ManifestFile] != l.PlanDigest {
			t.Errorf("list of plan %s is accepted for plan %s", l.PlanDigest, planDigest)
		}
		for name, digest := range l.Files {
			path := filepath.Join("/plan", name)
			if !strings.HasPrefix(path, "/plan/") || path == filepath.Join("/plan", File) {
				t.Errorf("%q is written to %s", name, path)
			}
			if _, err := artifact.ParseDigest(string(digest)); err != nil {
				t.Error(err)
			}
		}
		written, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := parseList(written, planDigest); err != nil || !maps.Equal(again.Files, l.Files) {
			t.Errorf("%s becomes %s, %v", text, written, err)
		}
	})
}
