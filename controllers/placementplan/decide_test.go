// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"errors"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/calibration/machines"
)

func TestDecide(t *testing.T) {
	profile := func(experts int32) *semmoev1.AffinityProfile {
		return &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{Model: &semmoev1.ModelStatus{Experts: experts}}}
	}
	inConfigMap := &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: "gpus", Key: "hardware.json"}}
	fault := machines.AsProfileError(func() error { _, err := machines.Resolve(inConfigMap, "n", nil); return err }())
	away := errors.New("connection refused")
	for name, tc := range map[string]struct {
		change func(*semmoev1.PlacementPlan)
		o      observation
		want   action
		reason string // of the fault
	}{
		"the store does not answer":  {nil, observation{StoreFailure: away, Profile: profile(32), Inputs: &solveInputs{}, Solved: &solved{}}, action{After: storeRetry}, "StoreUnavailable"},
		"the plan is in the store":   {nil, observation{Solved: &solved{}}, action{Publish: true, Cancel: true}, ""},
		"the inputs are complete":    {nil, observation{Profile: profile(32), Inputs: &solveInputs{}}, action{Solve: true}, ""},
		"the model is not profiled":  {nil, observation{Profile: profile(32)}, action{Cancel: true}, ""},
		"the model is not inspected": {nil, observation{Profile: &semmoev1.AffinityProfile{}}, action{Cancel: true}, ""},
		"no such profile":            {nil, observation{}, action{Cancel: true}, "ProfileNotFound"},
		"no such prior profile": {func(p *semmoev1.PlacementPlan) { p.Spec.PriorProfileRef = &semmoev1.ProfileReference{Name: "before"} },
			observation{Profile: profile(32)}, action{Cancel: true}, "ProfileNotFound"},
		"ranks that do not fit": {nil, observation{Profile: profile(30)}, action{}, "InvalidExpertParallelSize"},
		"no such hardware profile": {func(p *semmoev1.PlacementPlan) { p.Spec.Hardware = inConfigMap },
			observation{Profile: profile(32), MachinesFault: fault}, action{After: hardwareRetry}, machines.NotFound},
		"the hardware profile has changed": {func(p *semmoev1.PlacementPlan) { p.Spec.Hardware, p.Spec.HardwareDigest = inConfigMap, "aa" },
			observation{Profile: profile(32), Inputs: &solveInputs{}, Machines: machines.ResolvedProfile{Digest: "bb"}}, action{After: hardwareRetry}, "HardwareProfileChanged"},
	} {
		t.Run(name, func(t *testing.T) {
			plan := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ExpertParallelSize: 4}}
			if tc.change != nil {
				tc.change(plan)
			}
			got := decide(plan, tc.o)
			reason := ""
			if got.Fault != nil {
				reason = got.Fault.Reason
			}
			if got.Fault = nil; got != tc.want || reason != tc.reason {
				t.Errorf("action %+v with fault %q, want %+v with %q", got, reason, tc.want, tc.reason)
			}
		})
	}
}
