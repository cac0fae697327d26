// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// workloadUnder returns the workload of a revision under the plan, which may be nil.
func workloadUnder(t *testing.T, plan *semmoev1.PlacementPlan, replicas int32) *revisions.Workload {
	t.Helper()
	var under *revisions.Layout
	if plan != nil {
		under = revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	}
	workload, err := revisions.Render(moedtest.Deployment(), "r1", moedtest.Report(), under, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	*workload.Replicas() = replicas
	return workload
}

// trial marks a workload as not proven.
func trial(workload *revisions.Workload) *revisions.Workload {
	metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationRollout, semmoev1.RolloutCanary)
	return workload
}

// olderWorkload returns a workload whose pods do not record their engine.
func olderWorkload(t *testing.T, plan *semmoev1.PlacementPlan) *revisions.Workload {
	t.Helper()
	workload := workloadUnder(t, plan, 2)
	delete(workload.Template().Annotations, semmoev1.AnnotationEngine)
	return workload
}

func TestChooseLayout(t *testing.T) {
	old, fresh := moedtest.PlanOf("old", "aa", nil), moedtest.PlanOf("new", "bb", nil)
	waiting := moedtest.PlanOf("new", "bb", func(p *semmoev1.PlacementPlan) { p.Status.Conditions[0].Status = metav1.ConditionFalse })
	otherModel := moedtest.PlanOf("new", "bb", func(p *semmoev1.PlacementPlan) { p.Status.ModelDigest = "sha256:other" })
	gone := moedtest.PlanOf("gone", "cc", nil)
	lost := moedtest.PlanOf("new", "bb", func(p *semmoev1.PlacementPlan) { p.Status = semmoev1.PlacementPlanStatus{} })
	noGain := moedtest.PlanOf("new", "bb", func(p *semmoev1.PlacementPlan) { p.Status.Verdict = semmoev1.VerdictNoGainExpected })
	failedOnce := moedtest.PlanOf("new", "bb", func(p *semmoev1.PlacementPlan) {
		p.OwnerReferences = ownership.ControllerReference(moedtest.Deployment(), "MoEDeployment")
		p.Annotations = map[string]string{semmoev1.AnnotationFailed + "r0": "MoreFailures: 9 of 10"} // with another pod template
	})
	failedElsewhere := moedtest.PlanOf("new", "bb", func(p *semmoev1.PlacementPlan) {
		p.Annotations = map[string]string{semmoev1.AnnotationFailed + "r0": "MoreFailures: 9 of 10"}
	})
	approval := func(mode semmoev1.ApprovalMode) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = mode }
	}
	approve := func(m *semmoev1.MoEDeployment) { m.Annotations = map[string]string{semmoev1.AnnotationApprove: "bb"} }
	cases := map[string]struct {
		Change    []func(*semmoev1.MoEDeployment)
		wanted    *semmoev1.PlacementPlan
		workloads []*revisions.Workload
		want      *semmoev1.PlacementPlan
		try       *semmoev1.PlacementPlan
		hold      string
	}{
		"no plan yet":                     {},
		"ready":                           {wanted: fresh, want: fresh},
		"not ready":                       {wanted: waiting},
		"not ready, the old one stays":    {wanted: waiting, workloads: []*revisions.Workload{workloadUnder(t, old, 2)}, want: old},
		"ready, replaces the old one":     {wanted: fresh, workloads: []*revisions.Workload{workloadUnder(t, old, 2)}, want: old, try: fresh},
		"ready, the first plan":           {wanted: fresh, workloads: []*revisions.Workload{workloadUnder(t, nil, 2)}, try: fresh},
		"on its canary":                   {wanted: fresh, workloads: []*revisions.Workload{trial(workloadUnder(t, fresh, 1)), workloadUnder(t, old, 1)}, want: old, try: fresh},
		"the canary has the only replica": {wanted: fresh, workloads: []*revisions.Workload{trial(workloadUnder(t, fresh, 1)), workloadUnder(t, old, 0)}, want: old, try: fresh},
		"only the canary is left":         {wanted: fresh, workloads: []*revisions.Workload{trial(workloadUnder(t, fresh, 1))}, try: fresh},
		"on its canary, withdrawn":        {Change: []func(*semmoev1.MoEDeployment){approval(semmoev1.ApprovalManual)}, wanted: fresh, workloads: []*revisions.Workload{trial(workloadUnder(t, fresh, 1)), workloadUnder(t, old, 1)}, want: old, hold: "AwaitingApproval"},
		"failed":                          {wanted: failedOnce, workloads: []*revisions.Workload{workloadUnder(t, old, 2)}, want: old, hold: "RolledBack"},
		"failed, and nothing serves":      {wanted: failedOnce, hold: "RolledBack"},
		"failed for another owner":        {wanted: failedElsewhere, workloads: []*revisions.Workload{workloadUnder(t, old, 2)}, want: old, try: fresh},
		"failed, but in service":          {wanted: failedOnce, workloads: []*revisions.Workload{workloadUnder(t, fresh, 2)}, want: fresh},
		"of another checkpoint":           {wanted: otherModel},
		"no gain":                         {wanted: noGain, hold: "NoGainExpected"},
		"no gain, the old one stays":      {wanted: noGain, workloads: []*revisions.Workload{workloadUnder(t, old, 2)}, want: old, hold: "NoGainExpected"},
		"advisory":                        {Change: []func(*semmoev1.MoEDeployment){approval(semmoev1.ApprovalAdvisory), approve}, wanted: fresh, hold: "Advisory"},
		"manual":                          {Change: []func(*semmoev1.MoEDeployment){approval(semmoev1.ApprovalManual)}, wanted: fresh, hold: "AwaitingApproval"},
		"manual, approved":                {Change: []func(*semmoev1.MoEDeployment){approval(semmoev1.ApprovalManual), approve}, wanted: fresh, want: fresh},
		"manual, in service already":      {Change: []func(*semmoev1.MoEDeployment){approval(semmoev1.ApprovalManual)}, wanted: fresh, workloads: []*revisions.Workload{workloadUnder(t, fresh, 1)}, want: fresh},
		"one replica, no surge":           {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) }}, wanted: fresh, hold: "RolloutInterruptsService"},
		"one replica, no surge, approved": {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) }, approve}, wanted: fresh, want: fresh},
		"one replica, surge": {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) {
			m.Spec.Replicas = ptr.To[int32](1)
			m.Spec.Rollout.MaxSurge = ptr.To[int32](1)
		}}, wanted: fresh, want: fresh},
		"no router, approved":                 {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone }, approve}, wanted: fresh, want: fresh},
		"endpoint picker":                     {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker }}, wanted: fresh, want: fresh},
		"no router":                           {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone }}, wanted: fresh, hold: "NoRouter"},
		"EP size changed: no plan fits":       {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 8 }}, wanted: fresh, workloads: []*revisions.Workload{workloadUnder(t, old, 2)}},
		"engine changed: no plan fits":        {Change: []func(*semmoev1.MoEDeployment){moedtest.EngineOf(semmoev1.EngineVLLMAscend)}, wanted: fresh, workloads: []*revisions.Workload{workloadUnder(t, old, 2)}},
		"a workload of an older version":      {wanted: waiting, workloads: []*revisions.Workload{olderWorkload(t, old)}, want: old},
		"a workload without replicas":         {wanted: waiting, workloads: []*revisions.Workload{workloadUnder(t, nil, 2), workloadUnder(t, old, 0)}},
		"none has replicas: the newest":       {wanted: waiting, workloads: []*revisions.Workload{workloadUnder(t, old, 0), workloadUnder(t, gone, 0)}, want: old},
		"none has replicas, newest unplanned": {wanted: waiting, workloads: []*revisions.Workload{workloadUnder(t, nil, 0), workloadUnder(t, old, 0)}},
		"scaled to zero and back": {
			Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) }},
			wanted: fresh, workloads: []*revisions.Workload{workloadUnder(t, fresh, 0)}, want: fresh,
		},
		"a workload of a deleted plan":          {wanted: waiting, workloads: []*revisions.Workload{workloadUnder(t, gone, 2)}, want: gone},
		"a workload of a plan with lost status": {wanted: lost, workloads: []*revisions.Workload{workloadUnder(t, fresh, 2)}, want: fresh},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := choice{moed: moedtest.Deployment(tc.Change...), report: moedtest.Report(), wanted: tc.wanted, workloads: tc.workloads}
			serving, candidate, hold := c.chooseLayout()
			if waits := strings.Contains(hold.Message, semmoev1.AnnotationApprove+"="); waits != (hold.Pending != "") || waits && !strings.Contains(hold.Message, "="+hold.Pending+" ") {
				t.Errorf("the pending plan is %q: %s", hold.Pending, hold.Message)
			}
			var want, try *revisions.Layout
			if tc.want != nil {
				want = revisions.LayoutOf(tc.want, semmoev1.RealizationEngineMap)
			}
			if tc.try != nil {
				try = revisions.LayoutOf(tc.try, semmoev1.RealizationEngineMap)
			}
			if diff := cmp.Diff([]*revisions.Layout{want, try}, []*revisions.Layout{serving, candidate}); diff != "" || hold.Reason != tc.hold {
				t.Errorf("holds because of %q, want %q; serving layout and candidate (-want +got):\n%s", hold.Reason, tc.hold, diff)
			}
			if strings.Contains(hold.Message, "%!") {
				t.Errorf("message %q", hold.Message)
			}
		})
	}
}

// Scaling to one replica during a promotion does not stop the promotion: the previous revision may have no replica
// left. It does stop a canary.
func TestOneReplicaDuringPromotion(t *testing.T) {
	old, fresh := moedtest.PlanOf("old", "aa", nil), moedtest.PlanOf("new", "bb", nil)
	moed, layout := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) }), revisions.LayoutOf(fresh, semmoev1.RealizationEngineMap)
	for step, hold := range map[string]string{semmoev1.RolloutCanary: "RolloutInterruptsService", semmoev1.RolloutPromoting: ""} {
		moving := workloadUnder(t, fresh, 2)
		moving.Labels[semmoev1.LabelRevision] = revisions.Of(moed, moedtest.Report(), layout)
		metav1.SetMetaDataAnnotation(moving.ObjectMeta, semmoev1.AnnotationRollout, step)
		c := choice{moed: moed, report: moedtest.Report(), wanted: fresh, workloads: []*revisions.Workload{moving, workloadUnder(t, old, 0)}}
		serving, candidate, got := c.chooseLayout()
		if serving == nil || serving.Digest != old.Status.PlanDigest || got.Reason != hold || (candidate == nil) != (hold != "") {
			t.Errorf("%s: serving %+v, candidate %+v, held because of %q, want %q", step, serving, candidate, got.Reason, hold)
		}
	}
}

// A plan from token counts has no forecast, and its messages contain no empty figures.
func TestTextsOfCounts(t *testing.T) {
	moed := moedtest.Deployment()
	for _, verdict := range []semmoev1.Verdict{semmoev1.VerdictGain, semmoev1.VerdictNoGainExpected} {
		plan := &semmoev1.PlacementPlan{Status: semmoev1.PlacementPlanStatus{Plan: "6020771edb47c715", Verdict: verdict}}
		moed.Spec.Placement.Approval = semmoev1.ApprovalManual
		for _, text := range []string{PlannedText(plan), holdBack(moed, plan, false).Message} {
			if !strings.Contains(text, "token counts, which contain no local activation rate") || strings.Contains(text, "of ;") || strings.Contains(text, " versus  ") {
				t.Errorf("%s: %q", verdict, text)
			}
		}
	}
}

// A layout with changed outputs is not tried again. The other realization is, else the previous layout,
// else none. Another image is another revision.
func TestChooseLayoutProvenLossless(t *testing.T) {
	old, fresh := moedtest.PlanOf("old", "aa", nil), moedtest.PlanOf("new", "bb", nil)
	byMap := func(p *semmoev1.PlacementPlan) *revisions.Layout {
		return revisions.LayoutOf(p, semmoev1.RealizationEngineMap)
	}
	byWeights := func(p *semmoev1.PlacementPlan) *revisions.Layout {
		return revisions.LayoutOf(p, semmoev1.RealizationReshuffledWeights)
	}
	realization := func(r semmoev1.Realization) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Realization = r }
	}
	otherImage := func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "engine:2" }
	grouped, olmoe, wrapped, fixed := moedtest.Report(), moedtest.Report(), moedtest.Report(), moedtest.Report()
	grouped.Groups = 4
	olmoe.Family = "olmoe"
	wrapped.Wrapper = "internvl_chat"
	fixed.Unpermutable = "the gate is quantised"
	gptOSS := moedtest.Report()
	gptOSS.Family = "gpt_oss"
	deepEP := func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"} }
	forEngine := func(p *semmoev1.PlacementPlan, engine semmoev1.EngineType) *semmoev1.PlacementPlan {
		p = p.DeepCopy()
		p.Spec.Engine = engine
		return p
	}
	inService := func(l *revisions.Layout, revision string) []*revisions.Workload {
		under, err := revisions.Render(moedtest.Deployment(), revision, moedtest.Report(), l, revisions.Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		*under.Replicas() = 2
		return []*revisions.Workload{under}
	}
	revision := func(l *revisions.Layout, change ...func(*semmoev1.MoEDeployment)) string {
		return revisions.Of(moedtest.Deployment(change...), moedtest.Report(), l)
	}
	cases := map[string]struct {
		Change    []func(*semmoev1.MoEDeployment)
		report    *checkpoint.Report
		wanted    *semmoev1.PlacementPlan
		workloads []*revisions.Workload
		changed   []string
		answers   answers
		release   string
		want      *revisions.Layout
		try       bool // want is the candidate, and no plan serves
		hold      string
		why       string
	}{
		"no baseline outputs yet":                     {wanted: fresh, answers: answers{Missing: "soon"}, hold: "AwaitingBaselineOutputs"},
		"no baseline outputs yet, the old plan stays": {wanted: fresh, answers: answers{Missing: "soon"}, workloads: inService(byMap(old), "r1"), want: byMap(old), hold: "AwaitingBaselineOutputs"},
		"plan in service needs no outputs":            {wanted: fresh, answers: answers{Missing: "soon"}, workloads: inService(byMap(fresh), "r1"), want: byMap(fresh)},
		"no replica left to produce them":             {wanted: fresh, answers: answers{Missing: "soon", Stranded: true}, workloads: inService(byMap(fresh), "r1"), hold: "AwaitingBaselineOutputs"},
		"weights requested":                           {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationReshuffledWeights)}, wanted: fresh, want: byWeights(fresh)},
		"the map changes outputs":                     {wanted: fresh, changed: []string{revision(byMap(fresh))}, want: byWeights(fresh), why: "because outputs change with the engine's expert map: reported"},
		"the map changes outputs, in service":         {wanted: fresh, changed: []string{revision(byMap(fresh))}, workloads: inService(byMap(fresh), revision(byMap(fresh))), want: byWeights(fresh), try: true, why: "outputs change"},
		"on a canary without replicas":                {wanted: fresh, answers: answers{Missing: "soon"}, workloads: append(inService(nil, "r1"), trial(inService(byMap(fresh), revision(byMap(fresh)))[0])), want: byMap(fresh), try: true},
		"changed outputs with another image":          {Change: []func(*semmoev1.MoEDeployment){otherImage}, wanted: fresh, changed: []string{revision(byMap(fresh))}, want: byMap(fresh)},
		"both change outputs":                         {wanted: fresh, changed: []string{revision(byMap(fresh)), revision(byWeights(fresh))}, workloads: inService(byMap(old), "r1"), want: byMap(old), hold: "OutputChanged"},
		"both, and the old plan with this image": {Change: []func(*semmoev1.MoEDeployment){otherImage}, wanted: fresh, workloads: inService(byMap(old), "r1"),
			changed: []string{revision(byMap(fresh), otherImage), revision(byWeights(fresh), otherImage), revision(byMap(old), otherImage)}, hold: "OutputChanged"},
		"only the map is allowed":           {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationEngineMap)}, wanted: fresh, changed: []string{revision(byMap(fresh))}, hold: "OutputChanged"},
		"weights stay in service":           {wanted: fresh, workloads: inService(byWeights(fresh), "r1"), want: byWeights(fresh), why: "in service already"},
		"the map is requested instead":      {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationEngineMap)}, wanted: fresh, workloads: inService(byWeights(fresh), "r1"), want: byMap(fresh)},
		"weights behind an endpoint picker": {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker }}, workloads: inService(byWeights(fresh), "r1")},
		"weights requested behind an endpoint picker": {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationReshuffledWeights), func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker
		}}, wanted: fresh, hold: "UnsupportedByEngine"},
		"weights without a router":        {Change: []func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone }}, workloads: inService(byWeights(fresh), "r1")},
		"engine without a map":            {Change: []func(*semmoev1.MoEDeployment){moedtest.EngineOf(semmoev1.EngineVLLM)}, wanted: forEngine(fresh, semmoev1.EngineVLLM), want: byWeights(fresh), why: "because VLLM accepts no expert map"},
		"engine without a map, asked for": {Change: []func(*semmoev1.MoEDeployment){moedtest.EngineOf(semmoev1.EngineVLLM), realization(semmoev1.RealizationEngineMap)}, wanted: forEngine(fresh, semmoev1.EngineVLLM), hold: "UnsupportedByEngine"},
		"model whose map is ignored":      {report: &olmoe, wanted: fresh, want: byWeights(fresh), why: "because SGLang ignores an expert map"},
		"wrapper whose map is ignored":    {report: &wrapped, wanted: fresh, want: byWeights(fresh), why: "because SGLang ignores an expert map for multimodal models"},
		"a map known to be wrong":         {wanted: fresh, release: "0.5.17", want: byWeights(fresh), why: "because SGLang before 0.5.23 loads the experts of models of type qwen3_moe by the map and selects experts without it"},
		"a map that is right":             {wanted: fresh, release: "0.5.23", want: byMap(fresh)},
		"a map with a backend":            {Change: []func(*semmoev1.MoEDeployment){deepEP}, wanted: fresh, release: "0.5.17", want: byMap(fresh)},
		"a wrong map asked for":           {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationEngineMap)}, wanted: fresh, release: "0.5.17", hold: "UnsupportedByEngine"},
		"a map without effect":            {report: &gptOSS, wanted: fresh, want: byWeights(fresh), why: "because The checked releases of SGLang load the experts of gpt_oss models in the default order"},
		"a wrong map that serves":         {wanted: fresh, release: "0.5.17", workloads: inService(byMap(fresh), revision(byMap(fresh))), want: byMap(fresh)},
		"a wrong map that serves, asked for": {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationEngineMap)}, wanted: fresh, release: "0.5.17",
			workloads: inService(byMap(fresh), revision(byMap(fresh), realization(semmoev1.RealizationEngineMap))), want: byMap(fresh)},
		"a wrong map for a changed spec":                     {Change: []func(*semmoev1.MoEDeployment){otherImage}, wanted: fresh, release: "0.5.17", workloads: inService(byMap(fresh), revision(byMap(fresh))), want: byWeights(fresh), try: true, why: "because SGLang before 0.5.23"},
		"groups that the plan breaks":                        {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationReshuffledWeights)}, report: &grouped, wanted: fresh, hold: "UnsupportedByEngine"},
		"experts that cannot move":                           {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationReshuffledWeights)}, report: &fixed, wanted: fresh, hold: "UnsupportedByEngine"},
		"experts that cannot move, no plan yet":              {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationReshuffledWeights)}, report: &fixed, hold: "UnsupportedByEngine"},
		"experts that cannot move, engine without a map":     {Change: []func(*semmoev1.MoEDeployment){moedtest.EngineOf(semmoev1.EngineVLLM)}, report: &fixed, hold: "UnsupportedByEngine"},
		"experts that cannot move, map allowed":              {report: &fixed, wanted: fresh, want: byMap(fresh)},
		"experts that cannot move, map allowed, no plan yet": {report: &fixed},
		"groups, no plan yet":                                {Change: []func(*semmoev1.MoEDeployment){realization(semmoev1.RealizationReshuffledWeights)}, report: &grouped},
		"groups, and the map has no limits":                  {report: &grouped, wanted: fresh, want: byMap(fresh)},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := choice{moed: moedtest.Deployment(tc.Change...), report: moedtest.Report(), release: engine.ParseRelease(tc.release), wanted: tc.wanted, workloads: tc.workloads, changed: map[string]string{}, answers: tc.answers}
			if tc.report != nil {
				c.report = *tc.report
			}
			for _, r := range tc.changed {
				c.changed[r] = "reported"
			}
			got, candidate, hold := c.chooseLayout()
			if tc.try && got == nil {
				got = candidate
			}
			if diff := cmp.Diff(tc.want, got); diff != "" || hold.Reason != tc.hold {
				t.Errorf("holds because of %q (%s), want %q; layout (-want +got):\n%s", hold.Reason, hold.Message, tc.hold, diff)
			}
			if why := c.why(got); (why == "") != (tc.why == "") || !strings.Contains(why, tc.why) {
				t.Errorf("why is %q, want one with %q", why, tc.why)
			}
		})
	}
}

// Neither image, resources nor the number of replicas change the profile, so none of them causes a second profile.
func TestProfileInputs(t *testing.T) {
	profiling := func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{
			Dataset:      &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "d", Key: "k"}},
			SamplingSpec: semmoev1.SamplingSpec{Requests: 100, Tokens: 10000, RequestTokens: 512}, Target: semmoev1.ProfilingTargetServing,
		}
	}
	base := profileFor(moedtest.Deployment(profiling), moedtest.Model)
	cases := map[string]struct {
		Change func(*semmoev1.MoEDeployment)
		same   bool
	}{
		"image":    {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "engine:2" }, true},
		"EP size":  {func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 8 }, true},
		"replicas": {func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](9) }, true},
		"template": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{NodeSelector: map[string]string{"a": "b"}}}
		}, true},
		"data set": {func(m *semmoev1.MoEDeployment) { m.Spec.Profiling.Dataset.ConfigMap.Name = "e" }, false},
		"tokens":   {func(m *semmoev1.MoEDeployment) { m.Spec.Profiling.Tokens = 20000 }, false},
		"model":    {func(m *semmoev1.MoEDeployment) { m.Spec.Model.Path = "/models/x" }, false},
		"layout":   {func(m *semmoev1.MoEDeployment) { m.Spec.Model.LayoutAs = "qwen3_moe" }, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := profileFor(moedtest.Deployment(profiling, tc.Change), moedtest.Model); (got.Name == base.Name) != tc.same {
				t.Errorf("profile %s, before the change %s, want equal: %v", got.Name, base.Name, tc.same)
			}
		})
	}
	if profileFor(moedtest.Deployment(profiling), "sha256:other").Name == base.Name {
		t.Error("another checkpoint gives the same profile")
	}
	if profileFor(moedtest.Deployment(), moedtest.Model) != nil {
		t.Error("a spec without profiling requests a profile")
	}
}

// A running profile is recreated only for changes that affect its Job.
func TestOutdated(t *testing.T) {
	profiling := func(target semmoev1.ProfilingTarget) func(m *semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) {
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, Target: target}
		}
	}
	template := func(change func(*corev1.PodSpec)) func(m *semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine"}}}}
			change(&m.Spec.Template.Spec)
		}
	}
	cases := map[string]struct {
		Change             func(*semmoev1.MoEDeployment)
		serving, dedicated bool
		givenUp            bool // target Serving, after a permanent failure
	}{
		"nothing":       {func(*semmoev1.MoEDeployment) {}, false, false, false},
		"image":         {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "engine:2" }, false, true, true},
		"EP size":       {func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 8 }, false, true, true},
		"environment":   {template(func(s *corev1.PodSpec) { s.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "1"}} }), false, true, false},
		"node selector": {template(func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{"a": "b"} }), true, true, true},
		"pull secrets":  {template(func(s *corev1.PodSpec) { s.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}} }), true, true, true},
		"engine's port": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Port = 9090 }, true, true, true},
	}
	for name, tc := range cases {
		givenUp := map[semmoev1.ProfilingTarget]bool{semmoev1.ProfilingTargetServing: tc.givenUp, semmoev1.ProfilingTargetDedicated: tc.dedicated}
		for target, want := range map[semmoev1.ProfilingTarget]bool{semmoev1.ProfilingTargetServing: tc.serving, semmoev1.ProfilingTargetDedicated: tc.dedicated} {
			live, wanted := profileFor(moedtest.Deployment(profiling(target)), moedtest.Model), profileFor(moedtest.Deployment(profiling(target), tc.Change), moedtest.Model)
			if got := outdated(live, wanted); got != want {
				t.Errorf("%s, target %s: outdated %v, want %v", name, target, got, want)
			}
			live.Status.Conditions = []metav1.Condition{{Type: semmoev1.ConditionStalled, Status: metav1.ConditionTrue}}
			if got := outdated(live, wanted); got != givenUp[target] {
				t.Errorf("%s, target %s: a profile that was given up is outdated: %v, want %v", name, target, got, givenUp[target])
			}
			live.Status.Conditions = []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue}}
			if outdated(live, wanted) {
				t.Errorf("%s, target %s: a complete profile is outdated", name, target)
			}
		}
	}
}

// Plans that a workload references are kept, regardless of the spec: deleting one would remove the ConfigMap of
// pods.
func TestObsolete(t *testing.T) {
	used, wanted, gone := moedtest.PlanOf("used", "aa", nil), moedtest.PlanOf("wanted", "bb", nil), moedtest.PlanOf("gone", "cc", nil)
	plans := []*semmoev1.PlacementPlan{used, wanted, gone}
	workloads := []*revisions.Workload{workloadUnder(t, used, 0)}
	obsolete := obsoletePlans(moedtest.Deployment(), plans, Planning{Plan: wanted}, workloads, moedtest.Start)
	if len(obsolete) != 1 || obsolete[0] != gone {
		t.Errorf("obsolete are %d plans, want the one that nothing names", len(obsolete))
	}
	profiles := []*semmoev1.AffinityProfile{{ObjectMeta: metav1.ObjectMeta{Name: "p"}}, {ObjectMeta: metav1.ObjectMeta{Name: "q"}}}
	if left := obsoleteProfiles(profiles, Planning{}, without(plans, obsolete), moedtest.Start); len(left) != 1 || left[0].Name != "q" {
		t.Errorf("obsolete profiles are %v, want q: a plan that is kept names p", left)
	}
	if left := obsoletePlans(moedtest.Deployment(), plans, Planning{ProfileName: "p"}, nil, moedtest.Start); len(left) != 0 {
		t.Errorf("%d plans are obsolete of a profile that is not complete, want none", len(left))
	}
	if left := obsoletePlans(moedtest.Deployment(), plans, Planning{ProfileName: "q"}, nil, moedtest.Start); len(left) != 3 {
		t.Errorf("%d plans of another profile are obsolete, want all", len(left))
	}
	if left := obsoletePlans(moedtest.Deployment(), plans, Planning{}, nil, moedtest.Start); len(left) != 3 {
		t.Errorf("without profiling and workloads %d plans are obsolete, want all", len(left))
	}
}

// Ranks on several nodes activate the same experts as on one node.
func TestPodsPerReplicaMakeNoOtherProfile(t *testing.T) {
	profiled := func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Target: semmoev1.ProfilingTargetServing, Dataset: &semmoev1.DatasetSpec{}}
	}
	if diff := cmp.Diff(profileFor(moedtest.Deployment(profiled), "m"), profileFor(moedtest.Deployment(profiled, moedtest.TwoPods), "m")); diff != "" {
		t.Errorf("two pods per replica are another profile (-one +two):\n%s", diff)
	}
}

// tokenPlan returns a plan for tokens that are not shuffled.
func tokenPlan(name, digest string) *semmoev1.PlacementPlan {
	return moedtest.PlanOf(name, digest, func(p *semmoev1.PlacementPlan) {
		p.Spec.Attention, p.Spec.TokenShuffle = semmoev1.AttentionTensorParallel, semmoev1.TokenShuffleDisabled
		p.Status.Forecast = &semmoev1.PlanForecast{LARMilli: 250, BaselineMilli: 250, LARSummary: "25.0%", BaselineSummary: "25.0%", RemoteRanksMilli: 1800, BaselineRemoteRanksMilli: 2300}
	})
}

// A plan without token shuffling is made for few messages. A plan with token shuffling keeps its former name, so that
// an upgrade causes no new solve.
func TestPlansForTokens(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{Result: &semmoev1.ProfileResult{Digest: "d"}}}
	profile.Name = "p"
	of := func(change ...func(*semmoev1.MoEDeployment)) *semmoev1.PlacementPlan {
		return planFor(moedtest.Deployment(change...), profile, semmoev1.RealizationEngineMap, "")
	}
	plain, stay, move := of(), of(moedtest.Tokens), of(moedtest.Shuffled)
	if plain.Spec.TokenShuffle != "" || stay.Spec.TokenShuffle != semmoev1.TokenShuffleDisabled || move.Spec.TokenShuffle != "" {
		t.Errorf("tokenShuffle of the plans is %q, %q and %q", plain.Spec.TokenShuffle, stay.Spec.TokenShuffle, move.Spec.TokenShuffle)
	}
	if plain.Name != "m-b9e28e5c" || stay.Name == move.Name {
		t.Errorf("their names are %s, %s and %s", plain.Name, stay.Name, move.Name)
	}
	for name, tc := range map[string]struct {
		Change func(*semmoev1.MoEDeployment)
		plan   *semmoev1.PlacementPlan
		fits   bool
	}{
		"tokens not shuffled":                           {moedtest.Tokens, stay, true},
		"tokens not shuffled, plan for shuffled tokens": {moedtest.Tokens, move, false},
		"tokens shuffled":                               {moedtest.Shuffled, move, true},
		"tokens shuffled, plan for unshuffled tokens":   {moedtest.Shuffled, stay, false},
		"requests, a plan for requests":                 {nil, plain, true},
		"requests, a plan for shuffled tokens":          {nil, move, false},
		"requests, a plan for unshuffled tokens":        {nil, stay, false},
		"tokens, a plan for requests":                   {moedtest.Shuffled, plain, false},
	} {
		moed := moedtest.Deployment()
		if tc.Change != nil {
			tc.Change(moed)
		}
		if err := CheckPin(moed, tc.plan); (err == nil) != tc.fits {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A plan for tokens is rolled out if there is an all-to-all backend, continues to serve, and is dropped when it no
// longer fits.
func TestChooseLayoutForTokens(t *testing.T) {
	old, fresh := tokenPlan("old", "aa"), tokenPlan("new", "bb")
	under := func(plan *semmoev1.PlacementPlan, change func(*semmoev1.MoEDeployment)) []*revisions.Workload {
		made, err := revisions.Render(moedtest.Deployment(change), "r1", moedtest.Report(), revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), revisions.Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		*made.Replicas() = 2
		return []*revisions.Workload{made}
	}
	of := func(plan *semmoev1.PlacementPlan) *revisions.Layout {
		return revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	}
	for name, tc := range map[string]struct {
		Change    func(*semmoev1.MoEDeployment)
		workloads []*revisions.Workload
		want, try *revisions.Layout
		hold      string
		says      string
	}{
		"the first":             {Change: moedtest.Tokens, want: of(fresh)},
		"in service":            {Change: moedtest.Tokens, workloads: under(fresh, moedtest.Tokens), want: of(fresh)},
		"replaces another plan": {Change: moedtest.Tokens, workloads: under(old, moedtest.Tokens), want: of(old), try: of(fresh)},
		"no router needed":      {Change: func(m *semmoev1.MoEDeployment) { moedtest.Tokens(m); m.Spec.Routing.Mode = semmoev1.RoutingModeNone }, want: of(fresh)},
		"no all-to-all":         {Change: func(m *semmoev1.MoEDeployment) { moedtest.Tokens(m); m.Spec.Engine.Args = nil }, hold: "UnsupportedByEngine", says: "spec.parallelism.attention is TensorParallel"},
		"waits for approval": {Change: func(m *semmoev1.MoEDeployment) {
			moedtest.Tokens(m)
			m.Spec.Placement.Approval = semmoev1.ApprovalManual
		}, hold: "AwaitingApproval", says: "on 1.80 other ranks, versus 2.30 without the plan"},
		"another size":          {Change: func(m *semmoev1.MoEDeployment) { moedtest.Tokens(m); m.Spec.Parallelism.ExpertParallelSize = 8 }, workloads: under(old, moedtest.Tokens)},
		"attention of requests": {Change: func(*semmoev1.MoEDeployment) {}, workloads: under(old, moedtest.Tokens)},
	} {
		t.Run(name, func(t *testing.T) {
			c := choice{moed: moedtest.Deployment(tc.Change), report: moedtest.Report(), wanted: fresh, workloads: tc.workloads}
			serving, candidate, hold := c.chooseLayout()
			if diff := cmp.Diff([]*revisions.Layout{tc.want, tc.try}, []*revisions.Layout{serving, candidate}); diff != "" || hold.Reason != tc.hold || !strings.Contains(hold.Message, tc.says) {
				t.Errorf("holds because of %q (%s), want %q; serving layout and candidate (-want +got):\n%s", hold.Reason, hold.Message, tc.hold, diff)
			}
		})
	}
}

// New tables do not reach engines that shuffle tokens if a pod with the placement does not follow the tables in use.
func TestNewTablesNeedPodsThatFollowThem(t *testing.T) {
	tables := replanOf("new", "bb", "b0", semmoev1.TierTables, moedtest.Start)
	pods := func(plan string, follow bool) *revisions.Workload {
		set := &appsv1.StatefulSet{}
		set.Spec.Template.Annotations = map[string]string{semmoev1.AnnotationPlanDigest: plan}
		if follow {
			set.Spec.Template.Annotations[semmoev1.AnnotationFollowTables] = "true"
		}
		return revisions.StatefulSet(set)
	}
	advisory := func(m *semmoev1.MoEDeployment) {
		moedtest.Shuffled(m)
		m.Spec.Placement.Approval = semmoev1.ApprovalAdvisory
	}
	for name, tc := range map[string]struct {
		change    func(*semmoev1.MoEDeployment)
		workloads []*revisions.Workload
		want      string
	}{
		"pods of an earlier version": {moedtest.Shuffled, []*revisions.Workload{pods("b0-full", true), pods("b0-full", false)}, "TablesRequireRestart"},
		"pods of another placement":  {moedtest.Shuffled, []*revisions.Workload{pods("b0-full", true), pods("a0-full", false)}, ""},
		"pods that follow":           {moedtest.Shuffled, []*revisions.Workload{pods("b0-full", true)}, ""},
		"no pods yet":                {moedtest.Shuffled, nil, ""},
		"advice":                     {advisory, []*revisions.Workload{pods("b0-full", true)}, "Advisory"},
		"requests with ranks":        {nil, []*revisions.Workload{pods("b0-full", false)}, ""},
	} {
		var changes []func(*semmoev1.MoEDeployment)
		if tc.change != nil {
			changes = append(changes, tc.change)
		}
		if hold := holdTables(moedtest.Deployment(changes...), tc.workloads, tables); hold.Reason != tc.want {
			t.Errorf("%s: %+v", name, hold)
		}
	}
}

// A profile's pods use the template's pull secrets. Only a Job with its own engine gets the engine's variables.
func TestProfilePullSecrets(t *testing.T) {
	for target, token := range map[semmoev1.ProfilingTarget]bool{semmoev1.ProfilingTargetServing: false, semmoev1.ProfilingTargetDedicated: true} {
		moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				ImagePullSecrets: []corev1.LocalObjectReference{{Name: "registry"}},
				Containers:       []corev1.Container{{Name: semmoev1.EngineContainer, Env: []corev1.EnvVar{{Name: "HF_TOKEN", Value: "secret"}}}},
			}}
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/data.jsonl"}, Target: target}
		})
		text, err := json.Marshal(profileFor(moed, "sha256:abc").Spec.Template)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), `"registry"`) || strings.Contains(string(text), "HF_TOKEN") != token {
			t.Errorf("%s: %s", target, text)
		}
	}
}
