// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/observation/stepsizes"
)

// The status contains the batch sizes of the plan and those that engines report, or why engines report none and what to
// do.
func TestBatchTokensStatus(t *testing.T) {
	decoding, others := []int32{48, 48, 64, 64, 64, 64, 96, 1024}, []int32{48, 48, 64, 64, 64, 64, 96, 1536}
	prompts := []int32{64, 64, 64, 64, 2048, 4096, 8192, 8192}
	defaults := []int32{4096, 16384, 65536}
	now := metav1.NewTime(moedtest.Start)
	earlier := ptr.To(metav1.NewTime(moedtest.Start.Add(-time.Hour)))
	reported := &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Observed: decoding, PrefillMilli: ptr.To[int32](10), ObservedTime: earlier}
	counted := func(sizes []int32) stepsizes.Sum { return stepsizes.Sum{Sizes: sizes, Steps: 1e4, PrefillMilli: 50} }
	answered := []lar.Report{{}}
	for name, tc := range map[string]struct {
		change   func(*semmoev1.MoEDeployment)
		plan     func(*semmoev1.PlacementPlan)
		previous *semmoev1.BatchTokensStatus
		o        observation
		want     *semmoev1.BatchTokensStatus
		message  string
	}{
		"no plans":    {change: func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = nil }},
		"nothing yet": {want: &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Reason: "NotReported"}, message: "No request router"},
		"number": {
			change: func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.BatchTokens = 512 },
			want:   &semmoev1.BatchTokensStatus{Source: "Spec", Sizes: []int32{512}},
		},
		"number, sizes read for shuffled tokens": {
			change: func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.BatchTokens = 512 },
			o:      observation{Decision: decision.Decision{Reports: answered, Steps: counted(decoding)}},
			want:   &semmoev1.BatchTokensStatus{Source: "Spec", Sizes: []int32{512}, Observed: decoding, PrefillMilli: ptr.To[int32](50), ObservedTime: &now},
		},
		"first plan": {
			plan: func(*semmoev1.PlacementPlan) {}, o: observation{Decision: decision.Decision{Reports: answered, Steps: counted(decoding)}},
			want: &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Observed: decoding, PrefillMilli: ptr.To[int32](50), ObservedTime: &now},
		},
		"plan for observed sizes": {
			plan: func(p *semmoev1.PlacementPlan) { p.Spec.ObservedBatchTokens = prompts }, o: observation{Decision: decision.Decision{Reports: answered, Steps: counted(decoding)}},
			want: &semmoev1.BatchTokensStatus{Source: "Observed", Sizes: prompts, Observed: decoding, PrefillMilli: ptr.To[int32](50), ObservedTime: &now},
		},
		"nearly as reported": {plan: func(*semmoev1.PlacementPlan) {}, previous: reported, o: observation{Decision: decision.Decision{Reports: answered, Steps: counted(others)}}, want: reported},
		"just reported": {
			plan: func(*semmoev1.PlacementPlan) {}, o: observation{Decision: decision.Decision{Reports: answered, Steps: counted(prompts)}},
			previous: &semmoev1.BatchTokensStatus{Observed: decoding, ObservedTime: &now},
			want:     &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Observed: decoding, ObservedTime: &now},
		},
		"moved, plan is held": {
			plan: func(*semmoev1.PlacementPlan) {}, previous: reported,
			o: observation{Decision: decision.Decision{Reports: answered, Steps: counted(decoding), Drift: locality.Assessment{BatchesMoved: true, BatchHold: desired.Finding{Reason: "ReplanCooldown", Message: "until then"}}}},
			want: &semmoev1.BatchTokensStatus{
				Source: "Default", Sizes: defaults, Observed: decoding, PrefillMilli: ptr.To[int32](10), ObservedTime: earlier, Reason: "ReplanCooldown",
			},
			message: "until then",
		},
		"too few": {o: observation{Decision: decision.Decision{Reports: answered}}, want: &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Reason: "TooFewSteps"}, message: "fewer than 512"},
		"unreadable": {
			previous: reported, o: observation{Decision: decision.Decision{Reports: answered, Steps: stepsizes.Sum{Pod: "m-0", Pods: 1, Problem: "/metrics answers 404"}}},
			want:    &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Reason: "MetricsUnreadable"},
			message: "The steps of pod m-0 cannot be read: /metrics answers 404. If the metric is off, add --enable-metrics to spec.engine.args; or set spec.rollout.batchTokens",
		},
		"no metric": {
			change: func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = semmoev1.EngineTensorRTLLM },
			want:   &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Reason: "NoMetric"}, message: "set spec.rollout.batchTokens",
		},
		"no router": {
			change: func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone },
			want:   &semmoev1.BatchTokensStatus{Source: "Default", Sizes: defaults, Reason: "NoRouter"}, message: "set spec.rollout.batchTokens",
		},
	} {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = &semmoev1.ProfilingSpec{} })
			if tc.change != nil {
				tc.change(moed)
			}
			var plan *semmoev1.PlacementPlan
			if tc.plan != nil {
				plan = moedtest.PlanOf("p", "ab", tc.plan)
			}
			got := batchTokensStatus(tc.previous, moed, plan, tc.o, moedtest.Start)
			if got != nil {
				if !strings.Contains(got.Message, tc.message) || (got.Message == "") != (tc.message == "") {
					t.Errorf("says %q, want %q", got.Message, tc.message)
				}
				got.Message = ""
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// The policies that hold a plan for drift also hold a plan for other batch sizes, independent of the drift status.
func TestBatchReplanIsHeld(t *testing.T) {
	in := locality.Input{Now: moedtest.Start, Spec: moedtest.Deployment().Spec.Drift, Plan: moedtest.PlanOf("p", "ab", nil), BatchesMoved: true}
	in.Plan.CreationTimestamp = metav1.NewTime(moedtest.Start.Add(-2 * time.Hour))
	if a := locality.Assess(in); a.Status != locality.Unknown || !a.BatchesMoved || a.BatchHold.Reason != "" {
		t.Errorf("a plan that is two hours old: %+v", a)
	}
	in.Replans = []time.Time{moedtest.Start.Add(-time.Minute)}
	if a := locality.Assess(in); !a.BatchesMoved || a.BatchHold.Reason != "ReplanCooldown" {
		t.Errorf("a minute after another plan: %+v", a)
	}
	in.Plan = nil
	if a := locality.Assess(in); a.BatchesMoved {
		t.Errorf("without a plan: %+v", a)
	}
}
