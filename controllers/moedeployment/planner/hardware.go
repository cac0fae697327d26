package planner

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/calibration/machines"
)

// HardwarePeriod is how often the ConfigMap with a hardware profile is looked at: only the operator's own are watched.
const HardwarePeriod = time.Minute

// HardwareProfile is what plans are told of the machines that serve.
type HardwareProfile struct {
	// Digest is that of the ConfigMap's content; empty for a profile that is built in.
	Digest string
	// Known tells that plans can be asked for.
	Known bool
	// Fault is why the profile that the spec names cannot be used; its zero value where it can.
	Fault desired.Finding
}

// hardware reads the hardware profile that the spec names.
func (pl *Planner) hardware(ctx context.Context, moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan) (HardwareProfile, error) {
	chosen, err := machines.Read(ctx, pl.Live, moed.Namespace, moed.Spec.Placement.Hardware)
	fault := machines.IsFault(err)
	if err != nil && fault == nil {
		return HardwareProfile{}, err
	}
	return hardwareOf(moed, chosen, fault, plans), nil
}

// hardwareOf is the profile that was read. One that is gone or broken changes no plan: the newest that was made with it stays wanted, and
// carries it.
func hardwareOf(moed *semmoev1.MoEDeployment, chosen machines.Chosen, fault *machines.FaultError, plans []*semmoev1.PlacementPlan) HardwareProfile {
	if fault == nil {
		return HardwareProfile{Digest: chosen.Digest, Known: true}
	}
	unusable := HardwareProfile{Fault: desired.Finding{Reason: fault.Reason, Message: "spec.placement.hardware." + fault.Error()}}
	for _, plan := range plans { // the newest first
		if plan.Spec.HardwareDigest != "" && equality.Semantic.DeepEqual(plan.Spec.Hardware, moed.Spec.Placement.Hardware) {
			unusable.Digest, unusable.Known = plan.Spec.HardwareDigest, true
			break
		}
	}
	return unusable
}
