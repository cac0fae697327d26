// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"testing"
	"time"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// The hardware profile is an input of the plan, by name and content. The default is the operator's own profile.
func TestPlansAreForHardware(t *testing.T) {
	profile := moedtest.ProfiledBy("q", "r1", time.Unix(0, 0))
	plan := func(of *semmoev1.HardwareReference, digest string) *semmoev1.PlacementPlan {
		return planFor(moedtest.Deployment(moedtest.OnHardware(of)), profile, semmoev1.RealizationEngineMap, digest)
	}
	plain, first, second, other := plan(nil, ""), plan(moedtest.Hardware("gpus"), "aa"), plan(moedtest.Hardware("gpus"), "bb"), plan(moedtest.Hardware("others"), "aa")
	if own := plan(&semmoev1.HardwareReference{BuiltIn: hardware.Default}, ""); own.Name != plain.Name || own.Spec.Hardware != nil {
		t.Errorf("the operator's own profile makes plan %s for %+v; without one it is %s", own.Name, own.Spec.Hardware, plain.Name)
	}
	names := map[string]bool{}
	for _, p := range []*semmoev1.PlacementPlan{plain, first, second, other} {
		names[p.Name] = true
	}
	if len(names) != 4 {
		t.Errorf("four plans have the names %v", names)
	}
	if first.Spec.Hardware.ConfigMap.Name != "gpus" || first.Spec.HardwareDigest != "aa" {
		t.Errorf("spec %+v", first.Spec)
	}
}

// A missing or invalid ConfigMap changes no plan: the plan that was made with it stays wanted.
func TestMissingHardwareProfile(t *testing.T) {
	moed := moedtest.Deployment(moedtest.OnHardware(moedtest.Hardware("gpus")))
	fault := &machines.ProfileError{Reason: machines.NotFound}
	made := func(name string, of *semmoev1.HardwareReference, digest string) *semmoev1.PlacementPlan {
		return moedtest.PlanOf(name, "aa", func(p *semmoev1.PlacementPlan) { p.Spec.Hardware, p.Spec.HardwareDigest = of, digest })
	}
	plans := []*semmoev1.PlacementPlan{made("other", moedtest.Hardware("others"), "cc"), made("newest", moedtest.Hardware("gpus"), "bb"), made("old", moedtest.Hardware("gpus"), "aa"), made("plain", nil, "")}
	for name, test := range map[string]struct {
		fault  *machines.ProfileError
		plans  []*semmoev1.PlacementPlan
		digest string
		known  bool
	}{
		"read":          {nil, plans, "dd", true},
		"gone":          {fault, plans, "bb", true},
		"never existed": {fault, plans[:1], "", false},
	} {
		got := hardwareOf(moed, machines.ResolvedProfile{Digest: "dd"}, test.fault, test.plans)
		if got.Digest != test.digest || got.Known != test.known || (got.Fault.Reason != "") != (test.fault != nil) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
