// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// The placement settings are an input of the plan. A spec that sets none of them has the same plan as before these
// fields existed.
func TestPlanInputs(t *testing.T) {
	plan := func(change func(*semmoev1.MoEDeployment)) *semmoev1.PlacementPlan {
		return planFor(moedtest.Deployment(change), moedtest.ProfiledBy("q", "r1", time.Unix(0, 0)), semmoev1.RealizationEngineMap, "")
	}
	names := map[string]bool{}
	for what, change := range map[string]func(*semmoev1.MoEDeployment){
		"nothing":   func(*semmoev1.MoEDeployment) {},
		"objective": func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Objective = semmoev1.ObjectiveRankDedup },
		"copies":    func(m *semmoev1.MoEDeployment) { m.Spec.Placement.RedundantExperts = ptr.To(intstr.FromInt32(4)) },
		"copies from memory": func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.RedundantExperts, m.Spec.Placement.RedundantMemoryBytes = ptr.To(intstr.FromString("Auto")), ptr.To(resource.MustParse("8Gi"))
		},
		"copies from more memory": func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.RedundantExperts, m.Spec.Placement.RedundantMemoryBytes = ptr.To(intstr.FromString("Auto")), ptr.To(resource.MustParse("16Gi"))
		},
		"token limit":  func(m *semmoev1.MoEDeployment) { m.Spec.Placement.TokenLoadLimitPercent = ptr.To[int32](110) },
		"expert limit": func(m *semmoev1.MoEDeployment) { m.Spec.Placement.ExpertLoadLimitPercent = ptr.To[int32](110) },
		"algorithm":    func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Solver.Algorithm = "eplb" },
		"nodes": func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.Objective = semmoev1.ObjectiveNodeDedup
			moedtest.TwoPods(m)
		},
	} {
		made := plan(change)
		moed := moedtest.Deployment(change)
		if diff := cmp.Diff(moed.Spec.Placement.LayoutSpec, made.Spec.LayoutSpec); diff != "" {
			t.Errorf("%s: the plan is for something else (-want +got):\n%s", what, diff)
		}
		if want := map[bool]int32{true: 2}[what == "nodes"]; made.Spec.RanksPerNode != want {
			t.Errorf("%s: %d ranks share a node, want %d", what, made.Spec.RanksPerNode, want)
		}
		names[made.Name] = true
	}
	if len(names) != 9 {
		t.Errorf("nine plans have the names %v", names)
	}
	// Equivalent forms of the spec have the same plan: the spec of a plan is immutable.
	none := plan(func(m *semmoev1.MoEDeployment) { m.Spec.Placement.RedundantExperts = ptr.To(intstr.FromInt32(0)) })
	if nothing := plan(func(*semmoev1.MoEDeployment) {}); none.Name != nothing.Name || !cmp.Equal(none.Spec, nothing.Spec) {
		t.Errorf("no copies: plan %+v; without a number %+v", none.Spec, nothing.Spec)
	}
	memory := func(text string) *semmoev1.PlacementPlan {
		return plan(func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.RedundantExperts, m.Spec.Placement.RedundantMemoryBytes = ptr.To(intstr.FromString("Auto")), ptr.To(resource.MustParse(text))
		})
	}
	if a, b := memory("8Gi"), memory("8589934592"); a.Name != b.Name || a.Spec.RedundantMemoryBytes.String() != b.Spec.RedundantMemoryBytes.String() {
		t.Errorf("8Gi: plan %s for %v; as bytes %s for %v", a.Name, a.Spec.RedundantMemoryBytes, b.Name, b.Spec.RedundantMemoryBytes)
	}
	text, err := json.Marshal(planInputs{})
	if err != nil || string(text) != `{"profile":"","result":"","attention":"","ranks":0,"engine":"","solver":{}}` {
		t.Errorf("default inputs are %s, %v: plans of earlier versions would be recreated", text, err)
	}
}

// The engine is started with the plan's redundant experts, whose number is read from the workload if the plan is
// deleted.
func TestCopiesAreServed(t *testing.T) {
	wanted := moedtest.PlanOf("copies", "cc", func(p *semmoev1.PlacementPlan) { p.Spec.RedundantExperts = ptr.To(intstr.FromInt32(4)) })
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.RedundantExperts, m.Spec.Engine.Args = ptr.To(intstr.FromInt32(4)), []string{"--moe-a2a-backend", "deepep"}
	})
	c := choice{moed: moed, report: moedtest.Report(), wanted: wanted}
	serving, candidate, hold := c.chooseLayout()
	if serving == nil || serving.RedundantExperts != 4 || serving.Realization != semmoev1.RealizationEngineMap || candidate != nil {
		t.Fatalf("serving %+v, candidate %+v, hold %+v", serving, candidate, hold)
	}
	c = choice{moed: moed, report: moedtest.Report(), workloads: []*revisions.Workload{workloadUnder(t, wanted, 2)}}
	if inService := c.inService(); inService == nil || *inService != *serving {
		t.Errorf("in service is %+v, want %+v", inService, serving)
	}
	// A chosen number is the one in the status.
	auto := ptr.To(intstr.FromString("Auto"))
	wanted.Spec.RedundantExperts, wanted.Status.RedundantExperts, moed.Spec.Placement.RedundantExperts = auto, 8, auto
	c = choice{moed: moed, report: moedtest.Report(), wanted: wanted}
	if serving, candidate, hold := c.chooseLayout(); serving == nil || serving.RedundantExperts != 8 || candidate != nil {
		t.Errorf("chosen copies: serving %+v, candidate %+v, hold %+v", serving, candidate, hold)
	}
	moed.Spec.Placement.Realization = semmoev1.RealizationReshuffledWeights
	c = choice{moed: moed, report: moedtest.Report(), wanted: wanted}
	if serving, candidate, hold := c.chooseLayout(); serving != nil || candidate != nil || hold.Reason != "UnsupportedByEngine" {
		t.Errorf("a permuted checkpoint with copies: %+v, %+v, %+v", serving, candidate, hold)
	}
}
