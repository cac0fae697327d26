// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/result"
	"github.com/semmoe/operator/internal/kube/writes"
)

// While the base plan is unknown, for example after its profile lost its status, new tables stay in use, and objects
// made for drift are kept.
func TestDriftObjectsAreKeptWhileBaseIsUnknown(t *testing.T) {
	base, tables := moedtest.PlanOf("base", "b0", nil), replanOf("t1", "t1", "b0", semmoev1.TierTables, moedtest.Start)
	now := moedtest.Start.Add(48 * time.Hour)
	plans := []*semmoev1.PlacementPlan{tables, base}
	p := Planning{ProfileName: "p", Plans: plans, InUse: plans, Serving: revisions.LayoutOf(base, semmoev1.RealizationEngineMap)}
	profiles := []*semmoev1.AffinityProfile{moedtest.ProfiledBy("of-t1", "r", moedtest.Start, ofBase("base"))}
	if got, hold := p.tablesFor(moedtest.Deployment(), nil, moedtest.Model, "b0-full", "t1-full"); got != tables || hold.Reason != "" {
		t.Errorf("tables %s, hold %+v; want those in use", nameOf(got), hold)
	}
	if got, _ := p.tablesFor(moedtest.Deployment(), nil, moedtest.Model, "b0-full", ""); got != nil {
		t.Errorf("tables %s, want none where none are in use", nameOf(got))
	}
	if left := obsoletePlans(moedtest.Deployment(), p.Plans, p, nil, now); len(left) != 0 {
		t.Errorf("%d plans are obsolete, want none", len(left))
	}
	if left := obsoleteProfiles(profiles, p, nil, now); len(left) != 0 {
		t.Errorf("%d profiles are obsolete, want none", len(left))
	}
	p.Base = base
	if left := obsoleteProfiles(profiles, p, nil, now); len(left) != 1 {
		t.Errorf("%d profiles are obsolete once the base is known, want one", len(left))
	}
}

// A refused deletion of a profile for drift does not affect the decision. The profile stays in the lineage, so that the
// next one has another name.
func TestUndeletableProfileStaysInLineage(t *testing.T) {
	live, other := moedtest.ProfiledBy("live", "r0", time.Time{}), moedtest.ProfiledBy("other", "r1", time.Time{})
	s := &Snapshot{
		Now: moedtest.Start, Moed: moedtest.Deployment(), Profiles: []*semmoev1.AffinityProfile{other, live},
		SpecLatest: new(true), References: NewReferenceSet(moedtest.Deployment(), nil, nil, nil),
	}
	for _, tc := range []struct {
		undeletable map[string]bool
		left        []*semmoev1.AffinityProfile
	}{{nil, nil}, {map[string]bool{"live": true}, []*semmoev1.AffinityProfile{live}}} {
		s.Undeletable = tc.undeletable
		d := Decision{Planning: Planning{Base: moedtest.PlanOf("base", "bb", nil), Lineage: lineage{profiles: s.Profiles}}}
		d.deleteObsolete(s)
		if !slices.Equal(d.Lineage.profiles, tc.left) || len(d.Writes) != 2-len(tc.left) {
			t.Errorf("%v: %d profiles are left after %d deletions", tc.undeletable, len(d.Lineage.profiles), len(d.Writes))
		}
	}
}

// Nothing is deleted before the references of other objects and the latest spec are known.
func TestQuestionsBeforeDeletion(t *testing.T) {
	s := &Snapshot{Now: moedtest.Start, Moed: moedtest.Deployment(), Plans: []*semmoev1.PlacementPlan{moedtest.PlanOf("gone", "gg", nil)}}
	for _, step := range []struct {
		question Question
		answer   func()
	}{
		{ReferencesOfOthers{Pods: true}, func() { s.References = NewReferenceSet(s.Moed, nil, nil, &corev1.PodList{}) }},
		{LatestSpec{}, func() { s.SpecLatest = new(false) }},
		{nil, func() { s.SpecLatest = new(true) }},
	} {
		d := Decision{}
		if d.deleteObsolete(s); d.Question != step.question || len(d.Writes) != 0 {
			t.Errorf("question %#v with %d writes, want %#v with none", d.Question, len(d.Writes), step.question)
		}
		step.answer()
	}
	d := Decision{}
	if d.deleteObsolete(s); d.Question != nil || len(d.Writes) != 1 {
		t.Errorf("question %#v with %d writes, want one deletion", d.Question, len(d.Writes))
	}
}

// An object of another owner with the name of a child does not affect serving, and is reported. Routers read it anyway.
func TestForeignObjectInTheWay(t *testing.T) {
	moed := moedtest.Deployment()
	layout, swapped := moedtest.PlanOf("layout", "aa", nil), moedtest.PlanOf("swapped", "t1", nil)
	tables := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: desired.TablesName(moed)},
		Data:       map[string]string{semmoev1.TablesKey: `{"aa-full":"t1-full"}`},
	}
	p := Decision{Planning: Planning{Serving: revisions.LayoutOf(layout, semmoev1.RealizationEngineMap)}}
	p.selectTables(&Snapshot{Moed: moed, Report: new(moedtest.Report()), Plans: []*semmoev1.PlacementPlan{swapped}, Tables: tables})
	err := p.Refused
	if text := result.PermanentErrorText(err); len(p.Writes) != 0 || !writes.IsRefused(err) || !strings.Contains(text, "ConfigMap m-tables exists and belongs to another owner: delete it") {
		t.Errorf("error %v, reported as %q", err, text)
	}
	if p.Tables != swapped || !slices.Contains(p.Named, swapped.Name) {
		t.Errorf("tables %q, named %v", nameOf(p.Tables), p.Named)
	}
}

// An argument that contradicts a plan ends serving under the plan, as it prevents a new model from serving under it, in
// either order.
func TestContradictedLayout(t *testing.T) {
	change := func(m *semmoev1.MoEDeployment) { m.Spec.Placement.RedundantExperts = ptr.To(intstr.FromInt32(4)) }
	plan := moedtest.PlanOf("copies", "cc", func(p *semmoev1.PlacementPlan) { p.Spec.RedundantExperts = ptr.To(intstr.FromInt32(4)) })
	contradict := func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep", "--ep-dispatch-algorithm", "dynamic"}
	}
	if err := revisions.Validate(moedtest.Deployment(change, contradict)); err != nil {
		t.Fatalf("without a plan the argument is refused already: %v", err)
	}
	for name, workloads := range map[string][]*revisions.Workload{"new": nil, "in service": {workloadUnder(t, plan, 2)}} {
		c := choice{moed: moedtest.Deployment(change, contradict), report: moedtest.Report(), wanted: plan, workloads: workloads}
		serving, candidate, hold := c.chooseLayout()
		if serving != nil || candidate != nil || hold.Reason != "UnsupportedByEngine" || !strings.Contains(hold.Message, "--ep-dispatch-algorithm") {
			t.Errorf("%s: serving %+v, candidate %+v, hold %+v", name, serving, candidate, hold)
		}
	}
}

// No drift plan is made while the spec requests another kind of plan, which could not replace the one in service.
func TestNoReplanOfAnotherKind(t *testing.T) {
	for name, tc := range map[string]struct {
		serving, base func(*semmoev1.PlacementPlan)
		made          bool
	}{
		"alike":        {nil, nil, true},
		"other copies": {nil, func(p *semmoev1.PlacementPlan) { p.Spec.RedundantExperts = ptr.To(intstr.FromInt32(4)) }, false},
		"copies to choose": {nil, func(p *semmoev1.PlacementPlan) {
			p.Spec.RedundantExperts, p.Status.RedundantExperts = ptr.To(intstr.FromString("Auto")), 4
		}, false},
		"no copies chosen":   {nil, func(p *semmoev1.PlacementPlan) { p.Spec.RedundantExperts = ptr.To(intstr.FromString("Auto")) }, true},
		"other objective":    {nil, func(p *semmoev1.PlacementPlan) { p.Spec.Objective = semmoev1.ObjectiveRankDedup }, false},
		"the same objective": {nil, func(p *semmoev1.PlacementPlan) { p.Spec.Objective = semmoev1.ObjectiveActivation }, true},
		"any objective":      {func(p *semmoev1.PlacementPlan) { p.Spec.Objective = semmoev1.ObjectiveRankDedup }, nil, true},
	} {
		moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Refresh: semmoev1.RefreshLive, LiveSamples: semmoev1.LiveSamplesSequences}
			m.Spec.Rollout.MinimumGainPercent = ptr.To[int32](2)
		})
		serving, base := moedtest.PlanOf("serving", "s0", tc.serving), moedtest.PlanOf("base", "b0", tc.base)
		p := Planning{
			Base: base, Plan: base, Promise: serving, Serving: revisions.LayoutOf(serving, semmoev1.RealizationEngineMap), Plans: []*semmoev1.PlacementPlan{serving, base},
			Profile: moedtest.ProfiledBy("p", "r0", moedtest.Start), ProfileName: "p",
		}
		step := nextReplan(moed, moedtest.Model, p, DriftSignal{Drifted: true, Now: moedtest.Start})
		if made := step.Profile != nil; made != tc.made || !made && (step.Say.Reason != "LayoutMismatch" || !strings.Contains(step.Say.Message, "plan b0")) {
			t.Errorf("%s: a profile is made: %v, want %v; says %+v", name, made, tc.made, step.Say)
		}
	}
}
