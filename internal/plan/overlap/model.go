// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/schedule"
)

// Read returns the models in the ConfigMap of the plan with this digest, verified by the plan's manifest. It returns nil
// if the plan has no schedule, or the ConfigMap has no room for it.
func Read(data map[string]string, planDigest string) (*Model, error) {
	if data[plan.ScheduleFile] == "" || data[plan.HardwareFile] == "" {
		return nil, nil
	}
	var manifest plan.Manifest
	if err := decode(data, plan.ManifestFile, planDigest, &manifest); err != nil {
		return nil, err
	}
	m, placed := &Model{Schedule: &schedule.Schedule{}, Hardware: &hardware.Profile{}}, &placement.Placement{}
	for _, file := range []struct {
		name  string
		into  any
		check func() error
	}{
		{plan.PlacementFile, placed, placed.Validate},
		{plan.ScheduleFile, m.Schedule, func() error { return m.Schedule.Check(placed.Ranks) }},
		{plan.HardwareFile, m.Hardware, m.Hardware.Check},
	} {
		if err := decode(data, file.name, manifest.Files[file.name], file.into); err != nil {
			return nil, err
		}
		if err := file.check(); err != nil {
			return nil, fmt.Errorf("%s: %w", file.name, err)
		}
	}
	m.SlotsPerRank = placed.SlotsPerRank
	return m, nil
}

// decode verifies the SHA-256 digest of a file and decodes its JSON.
func decode(data map[string]string, file, digest string, into any) error {
	text := data[file]
	if got, _, err := artifact.DigestOf(strings.NewReader(text)); err != nil || string(got) != digest {
		return fmt.Errorf("%s is damaged: its sha256 is %s, the plan has %s", file, got, digest)
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}
