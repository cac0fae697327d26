// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"context"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
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
	calibration, err := locality.CalibrationIn(configMap.Data, p.Status.PlanDigest)
	if err != nil {
		log.Error(err, "The calibration of a plan is invalid", "configMap", configMap.Name)
		return nil
	}
	return calibration
}
