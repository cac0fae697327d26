// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"maps"
	"strings"
	"testing"

	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/plan"
)

// A calibration is used only if it belongs to the plan: an edited or truncated one counts as missing.
func TestCalibrationIn(t *testing.T) {
	data, digest := moedtest.WithCalibration(t, moedtest.Calibration())
	invalid := moedtest.Calibration()
	invalid.Ranks = 3
	bad, badDigest := moedtest.WithCalibration(t, invalid)
	changed := func(key, text string) map[string]string {
		c := maps.Clone(data)
		c[key] = text
		return c
	}
	for name, tc := range map[string]struct {
		data   map[string]string
		digest string
		found  bool
		err    string
	}{
		"as published":     {data, digest, true, ""},
		"none":             {map[string]string{plan.ManifestFile: data[plan.ManifestFile]}, digest, false, ""},
		"of another plan":  {data, strings.Repeat("0", 64), false, "manifest.json is damaged"},
		"edited":           {changed(plan.DriftFile, "{}"), digest, false, "drift.json is damaged"},
		"edited manifest":  {changed(plan.ManifestFile, "{}"), digest, false, "manifest.json is damaged"},
		"no manifest":      {changed(plan.ManifestFile, ""), digest, false, "manifest.json"},
		"unusable content": {bad, badDigest, false, "3 ranks need 9"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := CalibrationIn(tc.data, tc.digest)
			if (c != nil) != tc.found || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("calibration %v, error %v; want %v, %q", c, err, tc.found, tc.err)
			}
		})
	}
}
