// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/placement"
)

// configMap returns the content of the ConfigMap of a plan with these models, and the plan's digest.
func configMap(t *testing.T, m *Model) (data map[string]string, digest string) {
	t.Helper()
	placed := placement.Contiguous([]int{1}, m.Schedule.Model.Experts, m.Schedule.Ranks)
	sum := func(text string) string {
		s := sha256.Sum256([]byte(text))
		return hex.EncodeToString(s[:])
	}
	manifest := plan.Manifest{Files: map[string]string{}}
	data = map[string]string{}
	for name, content := range map[string]any{plan.PlacementFile: placed, plan.ScheduleFile: m.Schedule, plan.HardwareFile: m.Hardware} {
		text, err := json.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		data[name], manifest.Files[name] = string(text), sum(string(text))
	}
	text, err := json.Marshal(manifest)
	if err != nil {
		t.Fatal(err)
	}
	data[plan.ManifestFile] = string(text)
	return data, sum(string(text))
}

func TestRead(t *testing.T) {
	want := model(t)
	data, digest := configMap(t, want)
	got, err := Read(data, digest)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, tc := range map[string]struct{ file, content, want string }{
		"no schedule":         {plan.ScheduleFile, "", ""},
		"no hardware":         {plan.HardwareFile, "", ""},
		"another manifest":    {plan.ManifestFile, "{}", "manifest.json is damaged"},
		"a damaged schedule":  {plan.ScheduleFile, "{}", "schedule.json is damaged"},
		"a damaged placement": {plan.PlacementFile, "", "placement.json is damaged"},
	} {
		changed := maps.Clone(data)
		changed[tc.file] = tc.content
		m, err := Read(changed, digest)
		if m != nil || (err != nil) != (tc.want != "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, error %v", name, m, err)
		}
	}
	invalid := model(t)
	invalid.Schedule.LAR = 2
	data, digest = configMap(t, invalid)
	if _, err := Read(data, digest); err == nil || !strings.Contains(err.Error(), "schedule.json: lar is 2") {
		t.Errorf("an invalid schedule: %v", err)
	}
}
