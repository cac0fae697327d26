// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"time"

	"k8s.io/apimachinery/pkg/api/equality"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/calibration/machines"
)

// HardwarePeriod is the polling interval of the ConfigMap with a hardware profile: only the operator's own ConfigMaps
// are watched.
const HardwarePeriod = time.Minute

// HardwareProfile is the hardware profile for which plans are made.
type HardwareProfile struct {
	// Digest is the digest of the ConfigMap's content; empty for a built-in profile.
	Digest string
	// Known reports whether plans can be made.
	Known bool
	// Fault is why the hardware profile in the spec cannot be used; its zero value if it can.
	Fault desired.Finding
}

// hardwareOf returns the state of the profile that was read. A missing or invalid profile changes no plan: the newest
// plan that was made with it stays wanted, and contains a copy of the profile.
func hardwareOf(moed *semmoev1.MoEDeployment, chosen machines.ResolvedProfile, fault *machines.ProfileError, plans []*semmoev1.PlacementPlan) HardwareProfile {
	if fault == nil {
		return HardwareProfile{Digest: chosen.Digest, Known: true}
	}
	unusable := HardwareProfile{Fault: desired.Finding{Reason: fault.Reason, Message: "spec.placement.hardware." + fault.Error()}}
	for _, plan := range plans { // newest first
		if plan.Spec.HardwareDigest != "" && equality.Semantic.DeepEqual(plan.Spec.Hardware, moed.Spec.Placement.Hardware) {
			unusable.Digest, unusable.Known = plan.Spec.HardwareDigest, true
			break
		}
	}
	return unusable
}
