// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// completeProfile returns a complete profile of the fixtures' model.
func completeProfile() *semmoev1.AffinityProfile {
	return &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Status: semmoev1.AffinityProfileStatus{
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Profiled"}},
		Model:      &semmoev1.ModelStatus{Digest: moedtest.Model}, Result: &semmoev1.ProfileResult{Digest: "d", Tokens: 5},
	}}
}

func TestPlanningConditions(t *testing.T) {
	found := moedtest.Report()
	unknown := checkpoint.Report{Family: checkpoint.UnknownFamily, ModelType: "qwen9", ModelDigest: moedtest.Model, Unprofilable: "model_type qwen9 is not a known MoE family"}
	profile := completeProfile()
	broken := &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Status: semmoev1.AffinityProfileStatus{Conditions: []metav1.Condition{
		{Type: semmoev1.ConditionReady, Status: metav1.ConditionFalse, Reason: "DatasetInvalid", Message: "line 3 is no JSON"},
		{Type: semmoev1.ConditionDegraded, Status: metav1.ConditionTrue, Reason: "DatasetInvalid", Message: "line 3 is no JSON"},
	}}}
	plan, other := moedtest.PlanOf("new", "bb", nil), moedtest.PlanOf("old", "aa", nil)
	pods := []*corev1.Pod{moedtest.Pod("m-r1-0", "r1"), moedtest.Pod("m-r1-1", "r1")}
	serving := func(p planner.Planning) observation {
		return observation{Decision: decision.Decision{Revision: "r1", Planning: p}, Inspection: inspection.State{Report: &found}, Settled: true, Pods: pods, Router: &appsv1.Deployment{Status: appsv1.DeploymentStatus{AvailableReplicas: 1}}}
	}
	sampled := func(o observation, a locality.Assessment) observation {
		o.Drift = a
		return o
	}
	cases := map[string]struct {
		o    observation
		want map[string]string
	}{
		"profile of another model": {serving(planner.Planning{ProfileName: "p", Profile: &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{Model: &semmoev1.ModelStatus{Digest: "other"}}}}),
			map[string]string{"Profiled": "False ModelMismatch", "Degraded": "True ModelMismatch", "Stalled": "False NotStalled", "Ready": "True Serving"}},
		"unknown family": {func() observation { o := serving(planner.Planning{}); o.Inspection.Report = &unknown; return o }(),
			map[string]string{"Profiled": "False ModelNotProfilable", "Planned": "False ModelNotProfilable", "RolledOut": "False NoPlan", "Ready": "True Serving", "Degraded": "False AsExpected", "Stalled": "False NotStalled"}},
		"profile in progress":           {sampled(serving(planner.Planning{ProfileName: "p"}), locality.Assess(locality.Input{})), map[string]string{"Profiled": "False WaitingForProfile", "Planned": "False WaitingForProfile", "RolledOut": "False NoPlan", "LocalityOnTarget": "Unknown NoPlan", "Ready": "True Serving", "Degraded": "False AsExpected"}},
		"broken profile":                {serving(planner.Planning{ProfileName: "p", Profile: broken}), map[string]string{"Profiled": "False DatasetInvalid", "Degraded": "True DatasetInvalid", "Stalled": "False NotStalled", "Ready": "True Serving"}},
		"plan in progress":              {serving(planner.Planning{Profile: profile}), map[string]string{"Profiled": "True Profiled", "Planned": "False WaitingForPlan"}},
		"held":                          {serving(planner.Planning{Profile: profile, Plan: plan, Hold: desired.Finding{Reason: "AwaitingApproval", Message: "m"}}), map[string]string{"Planned": "True Planned", "RolledOut": "False AwaitingApproval"}},
		"an error before the candidate": {serving(planner.Planning{Profile: profile, Plan: plan, Candidate: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)}), map[string]string{"RolledOut": "False WaitingForReplicas"}},
		"in service":                    {serving(planner.Planning{Profile: profile, Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan}), map[string]string{"RolledOut": "True RolledOut", "LocalityOnTarget": "Unknown NotEvaluated"}},
		"on target":                     {sampled(serving(planner.Planning{Profile: profile, Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan}), locality.Assessment{Status: locality.OnTarget, Reason: "OnTarget"}), map[string]string{"LocalityOnTarget": "True OnTarget"}},
		"below":                         {sampled(serving(planner.Planning{Profile: profile, Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan}), locality.Assessment{Status: locality.BelowPromise, Reason: "BelowTarget"}), map[string]string{"LocalityOnTarget": "False BelowTarget", "Ready": "True Serving"}},
		"drifted":                       {sampled(serving(planner.Planning{Profile: profile, Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan}), locality.Assessment{Status: locality.Drifted, Reason: "Drifted"}), map[string]string{"LocalityOnTarget": "False Drifted", "Ready": "True Serving", "Degraded": "False AsExpected"}},
		"next plan in progress": {serving(planner.Planning{Profile: profile, Plan: moedtest.PlanOf("new", "bb", func(p *semmoev1.PlacementPlan) { p.Status.Conditions[0].Status = metav1.ConditionFalse }), Serving: revisions.LayoutOf(other, semmoev1.RealizationEngineMap), Promise: other}),
			map[string]string{"Planned": "False Published", "RolledOut": "False WaitingForPlan"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
				m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, Target: semmoev1.ProfilingTargetServing}
			})
			status := statusOf(moed, tc.o, moedtest.Start)
			for kind, want := range tc.want {
				c := meta.FindStatusCondition(status.Conditions, kind)
				if got := string(c.Status) + " " + c.Reason; got != want {
					t.Errorf("%s is %s (%s), want %s", kind, got, c.Message, want)
				}
			}
		})
	}
}

// For an engine that does not return routed experts, LocalityOnTarget is Unknown with the reason.
// TestInvalidEdit checks that after an edit that cannot be served, the status describes the revision that serves.
func TestInvalidEdit(t *testing.T) {
	found := moedtest.Report()
	profile := completeProfile()
	plan := moedtest.PlanOf("new", "bb", nil)
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, Target: semmoev1.ProfilingTargetServing}
	})
	serving, err := revisions.Render(moed, "r1", found, nil, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	moed.Spec.Parallelism.ExpertParallelSize = 5
	status := statusOf(moed, observation{
		Decision: decision.Decision{
			Invalid: revisions.Invalidf("InvalidExpertParallelSize", "spec.parallelism.expertParallelSize: 5"), Serving: serving,
			InService: planner.Planning{Profile: profile, Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan},
		},
		Inspection: inspection.State{Report: &found}, Settled: true, Pods: []*corev1.Pod{moedtest.Pod("m-r1-0", "r1"), moedtest.Pod("m-r1-1", "r1")},
		Router: &appsv1.Deployment{Status: appsv1.DeploymentStatus{AvailableReplicas: 1}},
	}, moedtest.Start)
	for kind, want := range map[string]string{
		"Ready": "True Serving", "Degraded": "True InvalidExpertParallelSize", "Stalled": "True InvalidExpertParallelSize", "Profiled": "True Profiled", "Planned": "True Planned",
		"RolledOut": "False NotInService",
	} {
		if c := meta.FindStatusCondition(status.Conditions, kind); c == nil || string(c.Status)+" "+c.Reason != want {
			t.Errorf("%s: %+v, want %s", kind, c, want)
		}
	}
	if status.Serving == nil || status.Serving.Revision != "r1" || status.PlanDigest == "" || status.LAR == nil {
		t.Errorf("the status does not describe the serving revision: serving %+v, plan %q, lar %+v", status.Serving, status.PlanDigest, status.LAR)
	}
}

func TestUnmeasurableLocality(t *testing.T) {
	found := moedtest.Report()
	plan := moedtest.PlanOf("new", "bb", nil)
	o := observation{Decision: decision.Decision{Revision: "r1", Planning: planner.Planning{Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan}}, Inspection: inspection.State{Report: &found}}
	moed := moedtest.Deployment(moedtest.EngineOf(semmoev1.EngineTensorRTLLM))
	o.Drift = assess(t, &Reconciler{}, moed, o.Planning, nil, nil, moedtest.Start)
	status := statusOf(moed, o, moedtest.Start)
	c := meta.FindStatusCondition(status.Conditions, semmoev1.ConditionLocalityOnTarget)
	if c.Status != metav1.ConditionUnknown || c.Reason != "RoutedExpertsUnavailable" || !strings.Contains(c.Message, "TensorRTLLM does not return the routed experts of requests") {
		t.Errorf("LocalityOnTarget is %s %s (%s)", c.Status, c.Reason, c.Message)
	}
	if status.LAR == nil || status.LAR.ObservedMilli != nil {
		t.Errorf("status.lar is %+v", status.LAR)
	}
}

// Conditions of a paused deployment do not report work that has not started as in progress.
func TestPausedConditions(t *testing.T) {
	found := moedtest.Report()
	profile := completeProfile()
	plan := moedtest.PlanOf("new", "bb", nil)
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Reconciliation = semmoev1.ReconciliationPaused
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, Target: semmoev1.ProfilingTargetServing}
	})
	for kind, p := range map[string]planner.Planning{
		semmoev1.ConditionProfiled:  {ProfileName: "p"},
		semmoev1.ConditionPlanned:   {Profile: profile},
		semmoev1.ConditionRolledOut: {Profile: profile, Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Promise: plan},
	} {
		status := statusOf(moed, observation{Decision: decision.Decision{Revision: "r1", Planning: p}, Inspection: inspection.State{Report: &found}}, moedtest.Start)
		if c := meta.FindStatusCondition(status.Conditions, kind); c.Status != metav1.ConditionFalse || c.Reason != "Paused" {
			t.Errorf("%s is %s %s (%s), want False Paused", kind, c.Status, c.Reason, c.Message)
		}
	}
}

// A profileRef to a missing profile is an error that needs a user's action. The model serves anyway.
func TestProfileNotFound(t *testing.T) {
	found := moedtest.Report()
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "nowhere"}}
	})
	status := statusOf(moed, observation{Decision: decision.Decision{Revision: "r1", Planning: planner.Planning{ProfileName: "nowhere"}}, Inspection: inspection.State{Report: &found}}, moedtest.Start)
	for _, kind := range []string{semmoev1.ConditionProfiled, semmoev1.ConditionDegraded} {
		if c := meta.FindStatusCondition(status.Conditions, kind); c.Reason != "ProfileNotFound" || !strings.Contains(c.Message, `"nowhere"`) {
			t.Errorf("%s is %s %s (%s)", kind, c.Status, c.Reason, c.Message)
		}
	}
}

// Two warnings with the same advice contain it once: those of SGLang for a model whose map is unverified, without an
// all-to-all backend.
func TestRolledOutGivesAdviceOnce(t *testing.T) {
	const advice = "Set --moe-a2a-backend, for example to deepep"
	found := moedtest.Report()
	adapter, err := registry.For(string(semmoev1.EngineSGLang))
	if err != nil {
		t.Fatal(err)
	}
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = &semmoev1.ProfilingSpec{} })
	warnings := ""
	for _, warning := range adapter.Support(engine.Situation{Realization: engine.EngineMap, Launch: revisions.Launch(moed), Family: found.Family}).Warnings {
		warnings += ". " + warning.Message
	}
	if strings.Count(warnings, advice) != 2 {
		t.Fatalf("the warnings do not share their advice: %q", warnings)
	}
	plan := moedtest.PlanFor400()
	o := observation{Decision: decision.Decision{Planning: planner.Planning{
		Plan: plan, Serving: revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), Warnings: warnings,
	}}, Inspection: inspection.State{Report: &found}}
	message := rolledOutVerdict(moed, o, true).Message
	if strings.Count(message, advice) != 1 || !strings.HasPrefix(message, "All replicas serve under plan ab-full, by the engine's expert map. ") {
		t.Errorf("the message is %q", message)
	}
	for text, want := range map[string]string{"": "", "a": "a", "a. b. a. c": "a. b. c", "a. a": "a"} {
		if got := uniqueSentences(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
