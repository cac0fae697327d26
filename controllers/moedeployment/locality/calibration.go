// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/drift"
)

// CalibrationIn returns the calibration in the ConfigMap of the plan with this digest, verified by the plan's manifest;
// nil if the plan has none.
func CalibrationIn(data map[string]string, planDigest string) (*drift.Calibration, error) {
	text, has := data[plan.DriftFile]
	if !has {
		return nil, nil
	}
	if err := checkSum(plan.ManifestFile, data[plan.ManifestFile], planDigest); err != nil {
		return nil, err
	}
	var manifest plan.Manifest
	if err := json.Unmarshal([]byte(data[plan.ManifestFile]), &manifest); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.ManifestFile, err)
	}
	if err := checkSum(plan.DriftFile, text, manifest.Files[plan.DriftFile]); err != nil {
		return nil, err
	}
	calibration := &drift.Calibration{}
	if err := json.Unmarshal([]byte(text), calibration); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.DriftFile, err)
	}
	if err := calibration.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.DriftFile, err)
	}
	return calibration, nil
}

// checkSum returns an error if content does not have the sha256 want.
func checkSum(name, content, want string) error {
	sum := sha256.Sum256([]byte(content))
	if got := hex.EncodeToString(sum[:]); got != want {
		return fmt.Errorf("%s is damaged: its sha256 is %s, want %s", name, got, want)
	}
	return nil
}
