// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
)

func ofBase(name string) func(*semmoev1.AffinityProfile) {
	return func(p *semmoev1.AffinityProfile) { p.Labels = map[string]string{semmoev1.LabelBase: name} }
}

func incomplete(p *semmoev1.AffinityProfile) {
	p.Status.Conditions[0] = metav1.Condition{Type: semmoev1.ConditionReady, Status: metav1.ConditionFalse, Reason: "WaitingForSamples", Message: "few"}
}

// replanOf returns a plan made for drift, of a tier, that replaces the plan with digest current.
func replanOf(name, digest, current string, tier semmoev1.Tier, made time.Time, change ...func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
	return moedtest.PlanOf(name, digest, func(p *semmoev1.PlacementPlan) {
		p.Labels = map[string]string{semmoev1.LabelBase: "base"}
		p.CreationTimestamp = metav1.NewTime(made)
		p.Spec.ProfileRef.Name = "of-" + name
		p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: current + "-full"}
		p.Status.Tier = tier
		for _, c := range change {
			c(p)
		}
	})
}

func worthless(p *semmoev1.PlacementPlan) {
	p.Status.Verdict, p.Status.Tier = semmoev1.VerdictNoGainExpected, ""
}

func unsolved(p *semmoev1.PlacementPlan) { p.Status = semmoev1.PlacementPlanStatus{} }

// The newest plan that should be brought into service determines the wanted layout and the tables. Plans for another
// base do not count.
func TestLineage(t *testing.T) {
	base := moedtest.PlanOf("base", "b0", nil)
	at := func(minutes int) time.Time { return moedtest.Start.Add(time.Duration(minutes) * time.Minute) }
	tables, layout := semmoev1.TierTables, semmoev1.TierLayout
	elsewhere := replanOf("other", "x1", "b0", layout, at(9))
	elsewhere.Labels[semmoev1.LabelBase] = "another"
	manual := func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = semmoev1.ApprovalManual }
	advisory := func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = semmoev1.ApprovalAdvisory }
	approve := func(m *semmoev1.MoEDeployment) {
		manual(m)
		m.Annotations = map[string]string{semmoev1.AnnotationApprove: "t1"}
	}
	approved := func(m *semmoev1.MoEDeployment) {
		manual(m)
		m.Annotations = map[string]string{semmoev1.AnnotationApprove: "l1"}
	}
	taken := func(p *semmoev1.PlacementPlan) {
		p.Annotations = map[string]string{semmoev1.AnnotationFailed + "r1": "LocalityWorse"}
		p.OwnerReferences = []metav1.OwnerReference{{UID: "uid", Controller: ptr.To(true)}}
	}
	untrue := func(p *semmoev1.PlacementPlan) {
		p.Annotations = map[string]string{semmoev1.AnnotationOutputChanged + "r1": "another token"}
	}
	for name, tc := range map[string]struct {
		Change []func(*semmoev1.MoEDeployment)
		plans  []*semmoev1.PlacementPlan
		// in is the layout in service; inUse are the tables in use with it.
		in, inUse            string
		wanted, tables, held string
	}{
		"nothing has drifted":                   {in: "b0-full", wanted: "base"},
		"new tables":                            {plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1))}, in: "b0-full", wanted: "base", tables: "t1"},
		"of another layout":                     {plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b9", tables, at(1))}, in: "b0-full", wanted: "base"},
		"new layout":                            {plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1))}, in: "b0-full", wanted: "l1"},
		"no gain":                               {plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1), worthless)}, in: "b0-full", wanted: "base"},
		"not solved":                            {plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1), unsolved)}, in: "b0-full", wanted: "base"},
		"tables of a new layout":                {plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1)), replanOf("t1", "t1", "l1", tables, at(2))}, in: "l1-full", wanted: "l1", tables: "t1"},
		"a layout after tables":                 {plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1)), replanOf("l1", "l1", "b0", layout, at(2))}, in: "b0-full", wanted: "l1", tables: "t1"},
		"tables after a layout":                 {plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1)), replanOf("t1", "t1", "b0", tables, at(2))}, in: "b0-full", wanted: "base", tables: "t1"},
		"newer tables":                          {plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1)), replanOf("t2", "t2", "b0", tables, at(2))}, in: "b0-full", wanted: "base", tables: "t2"},
		"newer ones without gain":               {plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1)), replanOf("t2", "t2", "b0", tables, at(2), worthless)}, in: "b0-full", wanted: "base", tables: "t1"},
		"of another base":                       {plans: []*semmoev1.PlacementPlan{elsewhere}, in: "b0-full", wanted: "base"},
		"the layout's plan is deleted":          {plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "gone", tables, at(1))}, in: "gone-full", wanted: "base", tables: "t1"},
		"waits for approval":                    {Change: []func(*semmoev1.MoEDeployment){manual}, plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1))}, in: "b0-full", wanted: "base", held: "AwaitingApproval"},
		"approved":                              {Change: []func(*semmoev1.MoEDeployment){approve}, plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1))}, in: "b0-full", wanted: "base", tables: "t1"},
		"approved earlier":                      {Change: []func(*semmoev1.MoEDeployment){manual}, plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1))}, in: "b0-full", inUse: "t1-full", wanted: "base", tables: "t1"},
		"the older ones stay":                   {Change: []func(*semmoev1.MoEDeployment){manual}, plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1)), replanOf("t2", "t2", "b0", tables, at(2))}, in: "b0-full", inUse: "t1-full", wanted: "base", tables: "t1", held: "AwaitingApproval"},
		"advice":                                {Change: []func(*semmoev1.MoEDeployment){advisory}, plans: []*semmoev1.PlacementPlan{replanOf("t1", "t1", "b0", tables, at(1))}, in: "b0-full", wanted: "base", held: "Advisory"},
		"an approved layout first":              {Change: []func(*semmoev1.MoEDeployment){approved}, plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1)), replanOf("l2", "l2", "b0", layout, at(2))}, in: "b0-full", wanted: "l1"},
		"an approved layout before new tables":  {Change: []func(*semmoev1.MoEDeployment){approved}, plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1)), replanOf("t2", "t2", "b0", tables, at(2))}, in: "b0-full", wanted: "l1", held: "AwaitingApproval"},
		"approved, until it serves":             {Change: []func(*semmoev1.MoEDeployment){approved}, plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1)), replanOf("l2", "l2", "b0", layout, at(2))}, in: "l1-full", wanted: "l2"},
		"approved, until another layout serves": {Change: []func(*semmoev1.MoEDeployment){approved}, plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1)), replanOf("l2", "l2", "b0", layout, at(2)), replanOf("l3", "l3", "b0", layout, at(3))}, in: "l2-full", wanted: "l3"},
		"approved, but changes outputs":         {Change: []func(*semmoev1.MoEDeployment){approved}, plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1), untrue), replanOf("l2", "l2", "b0", layout, at(2))}, in: "b0-full", wanted: "l2"},
		"approved, but failed":                  {Change: []func(*semmoev1.MoEDeployment){approved}, plans: []*semmoev1.PlacementPlan{replanOf("l1", "l1", "b0", layout, at(1), taken), replanOf("l2", "l2", "b0", layout, at(2))}, in: "b0-full", wanted: "l2"},
	} {
		moed := moedtest.Deployment(tc.Change...)
		l := lineageOf(base, nil, tc.plans)
		got := l.wanted(moed, base, moedtest.Model, tc.in)
		tables, held := l.tablesFor(moed, nil, moedtest.Model, tc.in, tc.inUse)
		if got.Name != tc.wanted || nameOf(tables) != tc.tables || held.Reason != tc.held {
			t.Errorf("%s: wanted %s with the tables of %q, held %q; want %s, %q, %q", name, got.Name, nameOf(tables), held.Reason, tc.wanted, tc.tables, tc.held)
		}
	}
	if l := lineageOf(nil, nil, []*semmoev1.PlacementPlan{elsewhere}); len(l.plans) != 0 || l.wanted(moedtest.Deployment(), nil, moedtest.Model, "") != nil {
		t.Error("without a plan of the spec there is a lineage")
	}
}

func nameOf(plan *semmoev1.PlacementPlan) string {
	if plan == nil {
		return ""
	}
	return plan.Name
}

// Each step after a drift follows from existing objects, and is taken once.
func TestNextReplan(t *testing.T) {
	refresh := func(mode semmoev1.RefreshMode, dataset *semmoev1.DatasetSpec) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) {
			m.Spec.Profiling = &semmoev1.ProfilingSpec{
				Dataset: dataset, Refresh: mode, LiveSamples: semmoev1.LiveSamplesSequences, Target: semmoev1.ProfilingTargetServing,
				SamplingSpec: semmoev1.SamplingSpec{Requests: 10, Tokens: 1000, RequestTokens: 5},
			}
			m.Spec.Rollout.MinimumGainPercent = ptr.To[int32](2)
		}
	}
	live := refresh(semmoev1.RefreshLive, &semmoev1.DatasetSpec{Path: "/models/d"})
	job := refresh(semmoev1.RefreshJob, &semmoev1.DatasetSpec{Path: "/models/d"})
	off := func(m *semmoev1.MoEDeployment) {
		live(m)
		m.Spec.Drift.MaxReplansPerDay = ptr.To[int32](0)
	}
	base, later := moedtest.PlanOf("base", "b0", nil), moedtest.Start.Add(2*time.Hour)
	begun := moedtest.ProfiledBy("begun", "r1", moedtest.Start, ofBase("base"))
	few := moedtest.ProfiledBy("begun", "r1", moedtest.Start, ofBase("base"), incomplete)
	few.Spec.Target, few.Spec.Live = semmoev1.ProfilingTargetLive, &semmoev1.LiveSpec{Samples: semmoev1.LiveSamplesSequences}
	sending := moedtest.ProfiledBy("begun", "r1", moedtest.Start, ofBase("base"), incomplete)
	sending.Spec = profileFor(moedtest.Deployment(job), moedtest.Model).Spec
	failed := sending.DeepCopy()
	failed.Status.Conditions = append(failed.Status.Conditions, metav1.Condition{Type: semmoev1.ConditionStalled, Status: metav1.ConditionTrue})
	same := moedtest.ProfiledBy("begun", "r0", moedtest.Start, ofBase("base"))
	made := replanOf("made", "t1", "b0", semmoev1.TierTables, moedtest.Start.Add(time.Minute), func(p *semmoev1.PlacementPlan) { p.Spec.ProfileRef.Name = "begun" })
	likeBegun := moedtest.ProfiledBy("like-begun", "r1", moedtest.Start.Add(time.Second), ofBase("base"))
	likeBase := moedtest.ProfiledBy("like-base", "r0", moedtest.Start.Add(time.Second), ofBase("base"))
	solving := made.DeepCopy()
	unsolved(solving)
	stuck := solving.DeepCopy()
	stuck.Status.Conditions = []metav1.Condition{
		{Type: semmoev1.ConditionStalled, Status: metav1.ConditionTrue}, {Type: semmoev1.ConditionReady, Status: metav1.ConditionFalse, Reason: "TooFewRequests", Message: "m"},
	}
	vain := made.DeepCopy()
	worthless(vain)
	drifted, onTarget := DriftSignal{Drifted: true, Now: later}, DriftSignal{OnTarget: true, Now: later}
	for name, tc := range map[string]struct {
		Change   func(*semmoev1.MoEDeployment)
		profiles []*semmoev1.AffinityProfile
		plans    []*semmoev1.PlacementPlan
		drift    DriftSignal
		// profile, plan and abandoned are the expected actions.
		profile semmoev1.ProfilingTarget
		plan    bool
		abandon bool
		say     string
	}{
		"no drift":              {Change: live, drift: DriftSignal{Now: later}},
		"drift":                 {Change: live, drift: drifted, profile: semmoev1.ProfilingTargetLive, say: "Profiling"},
		"by a Job":              {Change: job, drift: drifted, profile: semmoev1.ProfilingTargetServing, say: "Profiling"},
		"by a Job without data": {Change: refresh(semmoev1.RefreshJob, nil), drift: drifted, say: "NoDataset"},
		"paused":                {Change: func(m *semmoev1.MoEDeployment) { live(m); m.Spec.Reconciliation = semmoev1.ReconciliationPaused }, drift: drifted},
		"pinned": {Change: func(m *semmoev1.MoEDeployment) {
			live(m)
			m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "x"}
		}, drift: drifted, say: "Pinned"},
		"profile under way":                 {Change: live, profiles: []*semmoev1.AffinityProfile{few}, drift: drifted, say: "WaitingForSamples"},
		"drift unknown while waiting":       {Change: live, profiles: []*semmoev1.AffinityProfile{few}, drift: DriftSignal{Now: later}, say: "WaitingForSamples"},
		"the drift has passed":              {Change: live, profiles: []*semmoev1.AffinityProfile{few}, drift: onTarget, abandon: true, say: "DriftEnded"},
		"live again, prompts not stored":    {Change: live, profiles: []*semmoev1.AffinityProfile{sending}, drift: drifted, abandon: true},
		"prompts stored again, not live":    {Change: job, profiles: []*semmoev1.AffinityProfile{few}, drift: drifted, abandon: true},
		"a Job under way":                   {Change: job, profiles: []*semmoev1.AffinityProfile{sending}, drift: drifted, say: "WaitingForSamples"},
		"a Job with another image":          {Change: func(m *semmoev1.MoEDeployment) { job(m); m.Spec.Engine.Image = "engine:2" }, profiles: []*semmoev1.AffinityProfile{sending}, drift: drifted, say: "WaitingForSamples"},
		"a Job that has failed":             {Change: job, profiles: []*semmoev1.AffinityProfile{failed}, drift: drifted, say: "WaitingForSamples"},
		"the cause of the failure is fixed": {Change: func(m *semmoev1.MoEDeployment) { job(m); m.Spec.Engine.Image = "engine:2" }, profiles: []*semmoev1.AffinityProfile{failed}, drift: drifted, abandon: true},
		"prompts are no longer stored":      {Change: func(m *semmoev1.MoEDeployment) { live(m); m.Spec.Profiling.LiveSamples = semmoev1.LiveSamplesCounts }, profiles: []*semmoev1.AffinityProfile{few}, drift: drifted, abandon: true},
		"profile complete":                  {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, drift: drifted, plan: true, say: "Replanning"},
		"complete, drift unknown":           {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, drift: DriftSignal{Now: later}, plan: true, say: "Replanning"},
		"data set unchanged":                {Change: job, profiles: []*semmoev1.AffinityProfile{same}, drift: DriftSignal{Drifted: true, Now: moedtest.Start.Add(time.Minute)}, say: "DatasetUnchanged"},
		"data set unchanged, late":          {Change: job, profiles: []*semmoev1.AffinityProfile{same}, drift: drifted, profile: semmoev1.ProfilingTargetServing, say: "Profiling"},
		"disabled while waiting":            {Change: off, profiles: []*semmoev1.AffinityProfile{few}, drift: DriftSignal{Now: later}, abandon: true},
		"disabled, profile complete":        {Change: off, profiles: []*semmoev1.AffinityProfile{begun}, drift: DriftSignal{Now: later}, say: "ReplansDisabled"},
		"unchanged, the drift passed":       {Change: job, profiles: []*semmoev1.AffinityProfile{same}, drift: onTarget},
		"unchanged, live by now":            {Change: live, profiles: []*semmoev1.AffinityProfile{same}, drift: DriftSignal{Drifted: true, Now: moedtest.Start.Add(time.Minute)}, profile: semmoev1.ProfilingTargetLive, say: "Profiling"},
		"unchanged since a re-plan":         {Change: job, profiles: []*semmoev1.AffinityProfile{begun, likeBegun}, plans: []*semmoev1.PlacementPlan{made}, drift: DriftSignal{Drifted: true, Now: moedtest.Start.Add(time.Minute)}, say: "DatasetUnchanged"},
		"as it was before a re-plan":        {Change: job, profiles: []*semmoev1.AffinityProfile{begun, likeBase}, plans: []*semmoev1.PlacementPlan{made}, drift: drifted, plan: true, say: "Replanning"},
		"plan being solved":                 {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, plans: []*semmoev1.PlacementPlan{solving}, drift: drifted, say: "Planning"},
		"plan cannot be solved":             {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, plans: []*semmoev1.PlacementPlan{stuck}, drift: drifted, profile: semmoev1.ProfilingTargetLive, say: "Profiling"},
		"plan cannot be solved, reported":   {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, plans: []*semmoev1.PlacementPlan{stuck}, drift: onTarget, say: "TooFewRequests"},
		"plan in use":                       {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, plans: []*semmoev1.PlacementPlan{made}, drift: onTarget},
		"drift again":                       {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, plans: []*semmoev1.PlacementPlan{made}, drift: drifted, profile: semmoev1.ProfilingTargetLive, say: "Profiling"},
		"plan without gain":                 {Change: live, profiles: []*semmoev1.AffinityProfile{begun}, plans: []*semmoev1.PlacementPlan{vain}, drift: DriftSignal{Now: later}, say: "NoGainExpected"},
	} {
		moed := moedtest.Deployment(tc.Change)
		p := Planning{
			Base: base, Plan: base, Promise: base, Serving: revisions.LayoutOf(base, semmoev1.RealizationEngineMap),
			Profile: moedtest.ProfiledBy("p", "r0", moedtest.Start), ProfileName: "p", Lineage: lineageOf(base, tc.profiles, tc.plans),
		}
		p.Tables, _ = p.Lineage.tablesFor(moed, nil, moedtest.Model, p.Serving.Digest, "")
		step := nextReplan(moed, moedtest.Model, p, tc.drift)
		target := semmoev1.ProfilingTarget("")
		if step.Profile != nil {
			target = step.Profile.Spec.Target
		}
		if target != tc.profile || (step.Plan != nil) != tc.plan || (step.Abandoned != nil) != tc.abandon || step.Say.Reason != tc.say {
			t.Errorf("%s: profile %q, plan %v, abandoned %v, says %q; want %q, %v, %v, %q", name, target, step.Plan != nil, step.Abandoned != nil, step.Say.Reason, tc.profile, tc.plan, tc.abandon, tc.say)
		}
		if again := nextReplan(moed, moedtest.Model, p, tc.drift); step.Profile != nil && again.Profile.Name != step.Profile.Name || step.Plan != nil && again.Plan.Name != step.Plan.Name {
			t.Errorf("%s: the same objects lead to another name", name)
		}
	}
}

// The message of a plan in progress is repeated literally: it may contain addresses of a store.
func TestNextReplanRepeatsWhatPlansSay(t *testing.T) {
	const message = `The plan could not be solved, and is tried again: Get "https://store/v1/ns%2Fplans": EOF`
	base := moedtest.PlanOf("base", "b0", nil)
	failing := replanOf("failing", "l1", "b0", semmoev1.TierLayout, moedtest.Start, unsolved)
	failing.Status.Conditions = []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionFalse, Reason: "SolveFailed", Message: message}}
	p := Planning{Base: base, Serving: revisions.LayoutOf(base, semmoev1.RealizationEngineMap), Lineage: lineageOf(base, nil, []*semmoev1.PlacementPlan{failing})}
	if got, want := nextReplan(moedtest.Deployment(), moedtest.Model, p, DriftSignal{}).Say.Message, "PlacementPlan failing: "+message; got != want {
		t.Errorf("says %q, want %q", got, want)
	}
}

// The names of created objects depend only on their content: repeating a step with the same objects creates the same
// objects.
func TestReplanObjects(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Refresh: semmoev1.RefreshLive, LiveSamples: semmoev1.LiveSamplesCounts, SamplingSpec: semmoev1.SamplingSpec{Requests: 10, Tokens: 1000}}
		m.Spec.Rollout.MinimumGainPercent, m.Spec.Rollout.BatchTokens = ptr.To[int32](3), 8192
		m.Spec.Drift.ThresholdPercent = 10
	})
	base := moedtest.PlanOf("base", "b0", nil)
	tables := replanOf("t1", "t1", "b0", semmoev1.TierTables, moedtest.Start)
	p := Planning{
		Base: base, Plan: base, Promise: tables, Tables: tables, Serving: revisions.LayoutOf(base, semmoev1.RealizationEngineMap),
		Profile: moedtest.ProfiledBy("p", "r0", moedtest.Start), ProfileName: "p",
	}
	now := moedtest.Start.Add(time.Hour)
	onset := now.Add(-10 * time.Minute)
	step := p.newProfileStep(moed, moedtest.Model, DriftSignal{Drifted: true, Since: onset, Now: now})
	live := step.Profile.Spec.Live
	if live.Samples != semmoev1.LiveSamplesCounts || !live.Since.Time.Equal(onset) || live.PriorProfileRef.Name != "p" || step.Profile.Labels[semmoev1.LabelBase] != "base" {
		t.Errorf("profile %+v, labels %v", live, step.Profile.Labels)
	}
	if later := p.newProfileStep(moed, moedtest.Model, DriftSignal{Drifted: true, Now: now.Add(time.Minute)}); later.Profile.Name != step.Profile.Name || !later.Profile.Spec.Live.Since.Time.Equal(now.Add(time.Minute)) {
		t.Errorf("the name follows the time: %s and %s", step.Profile.Name, later.Profile.Name)
	}
	names := map[string]bool{step.Profile.Name: true}
	for name, change := range map[string]func(*Planning){
		"other tables": func(p *Planning) { p.Tables = nil },
		"another layout": func(p *Planning) {
			p.Serving = &revisions.Layout{Digest: "x", ConfigMap: "c", Realization: semmoev1.RealizationEngineMap}
		},
		"another base": func(p *Planning) { p.Base = moedtest.PlanOf("base2", "b2", nil) },
		"one before it": func(p *Planning) {
			p.Lineage.profiles = []*semmoev1.AffinityProfile{moedtest.ProfiledBy("q", "r1", moedtest.Start)}
		},
		"another before it": func(p *Planning) {
			p.Lineage.profiles = []*semmoev1.AffinityProfile{moedtest.ProfiledBy("s", "r1", moedtest.Start)}
		},
	} {
		other := p
		change(&other)
		made := other.newProfileStep(moed, moedtest.Model, DriftSignal{Drifted: true, Now: now}).Profile.Name
		if names[made] {
			t.Errorf("%s results in the same name", name)
		}
		names[made] = true
	}

	plan := p.replanFor(moed, moedtest.ProfiledBy("q", "r1", now, ofBase("base")))
	if got, want := *plan.Spec.Current, (semmoev1.CurrentPlan{PlanDigest: "b0-full", TablesDigest: "t1-full", TargetLARMilli: 360}); got != want {
		t.Errorf("current %+v, want %+v", got, want)
	}
	if plan.Spec.ProfileRef.Name != "q" || plan.Spec.PriorProfileRef.Name != "p" || *plan.Spec.MinimumGainPercent != 3 || plan.Spec.BatchTokens != 8192 || plan.Labels[semmoev1.LabelBase] != "base" {
		t.Errorf("plan %+v", plan.Spec)
	}
	if other := p.replanFor(moed, moedtest.ProfiledBy("q", "r2", now)); other.Name == plan.Name {
		t.Error("another result of the profile results in the same plan")
	}
	// If the number of copies was chosen, the new plan keeps the number of the plan in service.
	moed.Spec.Placement.RedundantExperts, moed.Spec.Placement.RedundantMemoryBytes = ptr.To(intstr.FromString("Auto")), ptr.To(resource.MustParse("8Gi"))
	for copies, want := range map[int32]*intstr.IntOrString{0: nil, 8: ptr.To(intstr.FromInt32(8))} {
		p.Serving.RedundantExperts = copies
		if made := p.replanFor(moed, moedtest.ProfiledBy("q", "r1", now)).Spec; !cmp.Equal(made.RedundantExperts, want) || made.RedundantMemoryBytes != nil {
			t.Errorf("in place of a plan with %d copies one with %v from %v is made", copies, made.RedundantExperts, made.RedundantMemoryBytes)
		}
	}
}

// A pin is used if the plan fits, and else rejected.
func TestPinFault(t *testing.T) {
	pin := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "x"} })
	for name, tc := range map[string]struct {
		Change func(*semmoev1.PlacementPlan)
		want   string
	}{
		"fits":            {nil, ""},
		"another size":    {func(p *semmoev1.PlacementPlan) { p.Spec.ExpertParallelSize = 8 }, "ParallelismMismatch"},
		"other attention": {func(p *semmoev1.PlacementPlan) { p.Spec.Attention = semmoev1.AttentionTensorParallel }, "ParallelismMismatch"},
		"another engine":  {func(p *semmoev1.PlacementPlan) { p.Spec.Engine = semmoev1.EngineVLLM }, "EngineMismatch"},
		"another model":   {func(p *semmoev1.PlacementPlan) { p.Status.ModelDigest = "sha256:x" }, "ModelMismatch"},
		"not ready":       {func(p *semmoev1.PlacementPlan) { p.Status.Conditions[0].Status = metav1.ConditionFalse }, "Published"},
	} {
		if got := pinFault(pin, moedtest.PlanOf("x", "aa", tc.Change), moedtest.Model); got.Reason != tc.want {
			t.Errorf("%s: %q (%s), want %q", name, got.Reason, got.Message, tc.want)
		}
	}
	if got := pinFault(pin, nil, moedtest.Model); got.Reason != reasonPlanNotFound || !strings.Contains(got.Message, `"x"`) {
		t.Errorf("absent: %+v", got)
	}
	held := moedtest.PlanOf("x", "aa", nil)
	for _, change := range []func(*semmoev1.MoEDeployment){
		func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = semmoev1.ApprovalManual },
		func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) },
	} {
		moed := moedtest.Deployment(change)
		if holdBack(moed, held, false).Reason == "" {
			t.Error("a plan without approval is not held")
		}
		if hold := holdBack(moed, held, true); hold.Reason != "" {
			t.Errorf("a pinned plan is held: %+v", hold)
		}
	}
}

// Objects made for drift are kept for a day, and objects that pods or routers use are kept while they are used.
func TestReplansAreRemembered(t *testing.T) {
	base := moedtest.PlanOf("base", "b0", nil)
	now := moedtest.Start.Add(48 * time.Hour)
	young, old := now.Add(-time.Hour), moedtest.Start
	named := replanOf("named", "n1", "b0", semmoev1.TierTables, old)
	plans := []*semmoev1.PlacementPlan{
		base, named, replanOf("young", "y1", "b0", semmoev1.TierLayout, young, worthless), replanOf("old", "o1", "b0", semmoev1.TierLayout, old),
		replanOf("last", "l1", "b0", semmoev1.TierTables, old.Add(time.Hour)), replanOf("pin", "p1", "b0", semmoev1.TierLayout, old),
	}
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "pin"} })
	p := Planning{Base: base, Plan: base, Named: []string{"named"}, ProfileName: "p"}
	p.Lineage.plans = plans[4:5]
	obsolete := obsoletePlans(moed, plans, p, nil, now)
	if len(obsolete) != 1 || obsolete[0].Name != "old" {
		t.Errorf("%d plans are obsolete, want only old", len(obsolete))
	}
	profiles := []*semmoev1.AffinityProfile{
		moedtest.ProfiledBy("p", "r", old), moedtest.ProfiledBy("of-named", "r", old, ofBase("base")), moedtest.ProfiledBy("of-old", "r", old, ofBase("base")), moedtest.ProfiledBy("new", "r", young, ofBase("base")),
	}
	if left := obsoleteProfiles(profiles, p, without(plans, obsolete), now); len(left) != 1 || left[0].Name != "of-old" {
		t.Errorf("%d profiles are obsolete, want only of-old", len(left))
	}
}

// Routers are configured with new tables for the layouts of existing pods, once. A removed layout takes its entry with
// it; removing the last entry keeps the ConfigMap.
func TestReconcileTables(t *testing.T) {
	s := runtime.NewScheme()
	if err := scheme.AddToScheme(s); err != nil {
		t.Fatal(err)
	}
	if err := semmoev1.AddToScheme(s); err != nil {
		t.Fatal(err)
	}
	wrote := 0
	api := fake.NewClientBuilder().WithScheme(s).WithReturnManagedFields().
		WithIndex(&corev1.ConfigMap{}, "metadata.name", func(object client.Object) []string { return []string{object.GetName()} }).Build()
	recorder := events.NewFakeRecorder(10)
	w := childobjects.Writer{Client: countingClient{api, &wrote}, Live: api, Recorder: recorder}
	moed, base := moedtest.Deployment(), moedtest.PlanOf("base", "b0", nil)
	t1, t2 := replanOf("t1", "t1", "b0", semmoev1.TierTables, moedtest.Start), replanOf("t2", "t2", "b0", semmoev1.TierTables, moedtest.Start.Add(time.Minute))
	workloads := []*revisions.Workload{workloadUnder(t, base, 2)}
	live := func() *corev1.ConfigMap {
		t.Helper()
		tables := &corev1.ConfigMap{}
		err := api.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "m-tables"}, tables)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			t.Fatal(err)
		}
		return tables
	}
	snapshot := func(moed *semmoev1.MoEDeployment) *Snapshot {
		return &Snapshot{Now: moedtest.Start, Moed: moed, Report: new(moedtest.Report()), Workloads: workloads, Tables: live(), OtherPlans: new([]*semmoev1.PlacementPlan)}
	}
	decide := func(s *Snapshot, plans ...*semmoev1.PlacementPlan) Decision {
		d := Decision{Planning: Planning{Base: base, Plan: base, Serving: revisions.LayoutOf(base, semmoev1.RealizationEngineMap), Lineage: lineageOf(base, nil, plans)}}
		d.selectTables(s)
		return d
	}
	reconcile := func(moed *semmoev1.MoEDeployment, plans ...*semmoev1.PlacementPlan) Planning {
		t.Helper()
		d := decide(snapshot(moed), plans...)
		for _, write := range d.Writes {
			if err := w.Write(t.Context(), moed, write); err != nil {
				t.Fatal(err)
			}
		}
		return d.Planning
	}
	reported := func() map[string]string { return snapshot(moed).tablesInUse() }
	if reconcile(moed); wrote != 0 {
		t.Errorf("%d writes without new tables", wrote)
	}
	p := reconcile(moed, t1)
	if want := map[string]string{"b0-full": "t1-full"}; !maps.Equal(reported(), want) || p.Tables != t1 || !slices.Equal(p.Named, []string{"t1"}) {
		t.Errorf("tables in use %v, want %v; tables %v, named %v", reported(), want, p.Tables, p.Named)
	}
	if !p.TablesSince.Equal(moedtest.Start) {
		t.Errorf("switched just now, but TablesSince is %v", p.TablesSince)
	}
	if event := <-recorder.Events; !strings.Contains(event, "TablesSwapped") {
		t.Errorf("event %q", event)
	}
	if p := reconcile(moed, t1); wrote != 1 || time.Since(p.TablesSince) > time.Hour {
		t.Errorf("%d writes, want 1; TablesSince %v", wrote, p.TablesSince)
	}
	manual := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = semmoev1.ApprovalManual })
	if p := reconcile(manual, t1, t2); p.Tables != t1 || p.TablesHold.Reason != "AwaitingApproval" || wrote != 1 {
		t.Errorf("tables %s, held %q, %d writes; want those in use until others are approved", nameOf(p.Tables), p.TablesHold.Reason, wrote)
	}
	if p := reconcile(moed, t1, t2); p.Tables != t2 || reported()["b0-full"] != "t2-full" {
		t.Errorf("tables %s, in use %v", nameOf(p.Tables), reported())
	}
	<-recorder.Events
	if reconcile(moed); len(reported()) != 0 || wrote != 3 {
		t.Errorf("tables in use %v after %d writes, want none after 3", reported(), wrote)
	}
	if event := <-recorder.Events; !strings.Contains(event, "TablesReverted") {
		t.Errorf("event %q", event)
	}
	foreign := &corev1.ConfigMap{}
	if err := api.Get(context.Background(), client.ObjectKey{Namespace: "ns", Name: "m-tables"}, foreign); err != nil {
		t.Fatal(err)
	}
	foreign.OwnerReferences = nil
	if err := api.Update(context.Background(), foreign); err != nil {
		t.Fatal(err)
	}
	if d := decide(snapshot(moed), t1); !writes.IsRefused(d.Refused) || !strings.Contains(d.Refused.Error(), "m-tables") || len(d.Writes) != 0 {
		t.Errorf("ConfigMap of another owner: %v, %d writes", d.Refused, len(d.Writes))
	}
	// A ConfigMap that is not in the cache, because it lacks the operator's label, is not changed either.
	foreign.Labels, foreign.Data = nil, map[string]string{"theirs": "1"}
	if err := api.Update(context.Background(), foreign); err != nil {
		t.Fatal(err)
	}
	unseeing := interceptor.NewClient(api, interceptor.Funcs{
		Get: func(_ context.Context, _ client.WithWatch, key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
			return apierrors.NewNotFound(corev1.Resource("configmaps"), key.Name)
		},
	})
	w.Client = countingClient{unseeing, &wrote}
	unseen := snapshot(moed)
	unseen.Tables = nil
	if err := w.Write(t.Context(), moed, decide(unseen, t1).Writes[0]); !writes.IsRefused(err) || !strings.Contains(err.Error(), "m-tables") || wrote != 3 {
		t.Errorf("ConfigMap of another owner that is not in the cache: %v after %d writes", err, wrote)
	}
	unseen.TablesRefused = true
	if d := decide(unseen, t1); len(d.Writes) != 0 || d.Tables != nil {
		t.Errorf("after the refusal: tables %s, %d writes; want those in use", nameOf(d.Tables), len(d.Writes))
	}
}

// countingClient counts apply requests.
type countingClient struct {
	client.Client
	writes *int
}

func (c countingClient) Apply(ctx context.Context, object runtime.ApplyConfiguration, options ...client.ApplyOption) error {
	*c.writes++
	return c.Client.Apply(ctx, object, options...)
}
