// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"fmt"
	"time"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/conditions"
	"github.com/semmoe/operator/solver/placement"
)

// action is the result of decide.
type action struct {
	// Publish is true to create the ConfigMaps of the plan, Solve to start or continue its job, and Cancel to stop it.
	Publish, Solve, Cancel bool
	// Fault is the error that prevents a plan; nil without error.
	Fault *conditions.Fault
	// After is the delay of the next reconciliation; 0 if an event triggers it. Publish and Solve determine their own.
	After time.Duration
}

// decide decides the next step: a plan in the store is published, and any other plan is solved once its inputs are
// complete.
func decide(plan *semmoev1.PlacementPlan, o observation) action {
	switch {
	case o.StoreFailure != nil:
		return action{Fault: storeFault(o.StoreFailure), After: storeRetry}
	case o.Solved != nil:
		return action{Publish: true, Cancel: true}
	}
	if o.Profile != nil && o.Profile.Status.Model != nil { // the number of experts is known before the model is profiled
		if err := placement.CheckRanks(int(plan.Spec.ExpertParallelSize), int(o.Profile.Status.Model.Experts)); err != nil {
			return action{Fault: faultOf(invalidRanks(err))}
		}
	}
	if fault := o.hardwareFault(plan); fault != nil {
		return action{Fault: fault, After: hardwareRetry}
	}
	switch {
	case o.Inputs != nil:
		return action{Solve: true}
	case o.Profile == nil:
		return action{Cancel: true, Fault: profileFault("spec.profileRef.name", plan.Spec.ProfileRef.Name)}
	case plan.Spec.PriorProfileRef != nil && o.Prior == nil:
		return action{Cancel: true, Fault: profileFault("spec.priorProfileRef.name", plan.Spec.PriorProfileRef.Name)}
	}
	return action{Cancel: true} // a change of the profile triggers the next reconciliation
}

func profileFault(field, name string) *conditions.Fault {
	return &conditions.Fault{Reason: "ProfileNotFound", Message: fmt.Sprintf("%s: AffinityProfile %s does not exist in this namespace. Create it", field, name)}
}

func storeFault(err error) *conditions.Fault {
	return &conditions.Fault{Reason: "StoreUnavailable", Message: "The artifact store is unavailable and is retried: " + err.Error()}
}

// hardwareFault returns why the plan cannot be solved for its hardware profile; nil if it can.
func (o *observation) hardwareFault(plan *semmoev1.PlacementPlan) *conditions.Fault {
	want := plan.Spec.HardwareDigest
	switch {
	case o.MachinesFault != nil:
		return &conditions.Fault{Reason: o.MachinesFault.Reason, Message: "spec.hardware." + o.MachinesFault.Error(), Stalls: plan.Spec.Hardware.ConfigMap == nil}
	case want != "" && want != o.Machines.Digest:
		return &conditions.Fault{Reason: "HardwareProfileChanged", Message: fmt.Sprintf("spec.hardwareDigest: key %q of ConfigMap %s has digest %s, want %s. Restore the content, or create another plan",
			plan.Spec.Hardware.ConfigMap.Key, plan.Spec.Hardware.ConfigMap.Name, o.Machines.Digest, want)}
	}
	return nil
}
