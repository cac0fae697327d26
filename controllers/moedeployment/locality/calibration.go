package locality

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/drift"
)

// CalibrationOf reads the calibration of a plan from its ConfigMap. It returns nil if there is none, or if it belongs
// to another plan.
func CalibrationOf(ctx context.Context, c client.Reader, p *semmoev1.PlacementPlan) *drift.Calibration {
	log := logr.FromContextOrDiscard(ctx).WithValues("plan", p.Name)
	configMap := &corev1.ConfigMap{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: p.Namespace, Name: p.Status.ConfigMap}, configMap); err != nil {
		log.V(1).Info("Failed to read the calibration of a plan", "reason", err.Error())
		return nil
	}
	calibration, err := calibrationIn(configMap.Data, p.Status.PlanDigest)
	if err != nil {
		log.Error(err, "The calibration of a plan is invalid", "configMap", configMap.Name)
		return nil
	}
	return calibration
}

// calibrationIn returns the calibration in the ConfigMap of the plan with this digest, verified by the plan's manifest;
// nil if the plan has none.
func calibrationIn(data map[string]string, planDigest string) (*drift.Calibration, error) {
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
