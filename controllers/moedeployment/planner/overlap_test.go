// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/plan/overlap"
)

var (
	largeSteps = []int32{65536, 131072}
	smallSteps = []int32{256, 512}
)

// overlapCase is a deployment with plan aa, and what was chosen for it.
type overlapCase struct {
	t *testing.T
	s *Snapshot
	d *Decision
}

// newOverlap returns a deployment of an engine whose plan was made for large batches, and does not serve yet.
func newOverlap(t *testing.T, engine semmoev1.EngineType) *overlapCase {
	t.Helper()
	report := moedtest.Report()
	moed := moedtest.Deployment(moedtest.OverlapAuto(engine))
	c := &overlapCase{t, &Snapshot{
		Now: moedtest.Start, Moed: moed, Report: &report, OverlapModels: map[string]OverlapModelOf{},
		StoredOutputs: []*corev1.ConfigMap{{ObjectMeta: metav1.ObjectMeta{Name: revisions.AnswersName(moed, moedtest.Model)}}},
	}, &Decision{}}
	c.d.Plan = c.plan("aa", largeSteps)
	return c
}

func (c *overlapCase) plan(digest string, sizes []int32) *semmoev1.PlacementPlan {
	return moedtest.PlanOf("plan-"+digest, digest, func(p *semmoev1.PlacementPlan) {
		p.Spec.Engine, p.Spec.ObservedBatchTokens = c.s.Moed.Spec.Engine.Type, sizes
		c.s.OverlapModels[p.Status.PlanDigest] = OverlapModelOf{Model: moedtest.OverlapModel(c.t)}
	})
}

// decide decides on the layout.
func (c *overlapCase) decide() {
	c.t.Helper()
	c.d = &Decision{Planning: Planning{Plan: c.d.Plan, Lineage: c.d.Lineage}}
	if c.d.decideLayout(c.s); c.d.Err != nil || c.d.Question != nil {
		c.t.Fatalf("question %#v, error %v", c.d.Question, c.d.Err)
	}
}

// serve brings what was decided into service.
func (c *overlapCase) serve() *revisions.Workload {
	c.t.Helper()
	layout := c.d.Serving
	if c.d.Candidate != nil {
		layout = c.d.Candidate
	}
	w, err := revisions.Render(c.s.Moed, revisions.Of(c.s.Moed, *c.s.Report, layout), *c.s.Report, layout, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		c.t.Fatal(err)
	}
	w.UID, *w.Replicas() = types.UID(w.Name), 2
	c.s.Workloads = []*revisions.Workload{w}
	return w
}

// outgrown adds a newer plan for other batch sizes, without gain.
func (c *overlapCase) outgrown(sizes []int32) {
	newer := c.plan("bb", sizes)
	newer.Status.Verdict = semmoev1.VerdictNoGainExpected
	c.d.Lineage.plans = []*semmoev1.PlacementPlan{newer}
}

func flags(w *revisions.Workload) []string {
	known := []string{"--enable-two-batch-overlap", "--deepep-config", "--enable-dbo", "--ubatch-size", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"}
	return slices.DeleteFunc(slices.Clone(w.Template().Spec.Containers[0].Args), func(arg string) bool { return !slices.Contains(known, arg) })
}

// The engine's documented flags come with the plan. They stay until the batch sizes of the newest plan change.
func TestOverlapComesWithThePlan(t *testing.T) {
	for engine, want := range map[semmoev1.EngineType][]string{
		semmoev1.EngineSGLang: {"--enable-two-batch-overlap"},
		semmoev1.EngineVLLM:   {"--enable-dbo", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"},
	} {
		t.Run(string(engine), func(t *testing.T) {
			c := newOverlap(t, engine)
			if c.decide(); c.d.Serving == nil || c.d.Overlap.Why.Reason != "NoPlan" {
				t.Fatalf("before: %+v", c.d.Overlap)
			}
			first := c.serve()
			if got := flags(first); !slices.Equal(got, want) {
				t.Fatalf("flags %v, want %v", got, want)
			}
			c.s.OverlapModels = nil // nothing needs the models while nothing changes, as after an upgrade of the operator
			if c.decide(); c.d.Overlap.Why.Reason != reasonOverlapping || revisions.Of(c.s.Moed, *c.s.Report, c.d.Serving) != first.Labels[semmoev1.LabelRevision] {
				t.Fatalf("in service: %+v, layout %+v", c.d.Overlap, c.d.Serving)
			}
			basis := BasisOf(c.d.Serving)
			if !slices.Equal(basis.BatchTokens, largeSteps) || basis.LayerNanos == 0 || basis.LayerNanos >= basis.UnsplitNanos {
				t.Errorf("basis %+v", basis)
			}

			c.s.OverlapModels = map[string]OverlapModelOf{c.d.Plan.Status.PlanDigest: {Model: moedtest.OverlapModel(t)}}
			c.outgrown(smallSteps)
			c.decide()
			after := revisions.Of(c.s.Moed, *c.s.Report, c.d.Serving)
			if thresholds := engine == semmoev1.EngineVLLM; (after == first.Labels[semmoev1.LabelRevision]) != thresholds {
				t.Errorf("at small batches revision %s follows %s; vLLM splits no small batch", after, first.Labels[semmoev1.LabelRevision])
			}
			if engine == semmoev1.EngineSGLang && (c.d.Serving.Overlap != semmoev1.OverlapSpec{} || c.d.Overlap.Why.Reason != "NoGainExpected") {
				t.Errorf("at small batches: %+v, %+v", c.d.Serving.Overlap, c.d.Overlap)
			}
			if basis := BasisOf(c.d.Serving); !slices.Equal(basis.BatchTokens, smallSteps) {
				t.Errorf("the basis is %+v", basis)
			}
			if c.d.Candidate != nil || c.d.Hold.Reason != "" {
				t.Errorf("candidate %+v, hold %+v", c.d.Candidate, c.d.Hold)
			}
		})
	}
}

// Other settings for the plan in service wait for what a plan waits for.
func TestOverlapIsHeld(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(*overlapCase)
		reason  string
		message string
		pending string
	}{
		"automatic": {func(c *overlapCase) {}, "NoGainExpected", "no micro-batches", ""},
		"manual":    {func(c *overlapCase) { c.s.Moed.Spec.Placement.Approval = semmoev1.ApprovalManual }, "AwaitingApproval", "semmoe.io/approve=bb", "bb"},
		"approved": {func(c *overlapCase) {
			c.s.Moed.Spec.Placement.Approval = semmoev1.ApprovalManual
			c.s.Moed.Annotations = map[string]string{semmoev1.AnnotationApprove: "bb"}
		}, "NoGainExpected", "", ""},
		"advisory":    {func(c *overlapCase) { c.s.Moed.Spec.Placement.Approval = semmoev1.ApprovalAdvisory }, "Advisory", "not rolled out", ""},
		"one replica": {func(c *overlapCase) { c.s.Moed.Spec.Replicas = ptr.To[int32](1) }, "RolloutInterruptsService", "maxSurge", "bb"},
		"failed": {func(c *overlapCase) {
			layout := *c.d.Serving
			layout.Overlap = semmoev1.OverlapSpec{}
			metav1.SetMetaDataAnnotation(c.s.Workloads[0].ObjectMeta, semmoev1.AnnotationFailed+revisions.Of(c.s.Moed, *c.s.Report, &layout), "InterTokenSlower: by 10%")
		}, "RolledBack", "InterTokenSlower: by 10%", ""},
		"no models": {func(c *overlapCase) { c.s.OverlapModels["aa-full"] = OverlapModelOf{Fault: "it is damaged"} }, reasonOverlapNotModelled, "are kept", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := newOverlap(t, semmoev1.EngineSGLang)
			c.decide()
			first := c.serve()
			c.outgrown(smallSteps)
			tc.change(c)
			c.decide()
			why := c.d.Overlap.Why
			if why.Reason != tc.reason || !strings.Contains(why.Message, tc.message) || why.Pending != tc.pending {
				t.Errorf("%+v, want %s with %q, pending %q", why, tc.reason, tc.message, tc.pending)
			}
			after := revisions.Of(c.s.Moed, *c.s.Report, c.d.Serving)
			if changes := tc.reason == "NoGainExpected"; changes == (after == first.Labels[semmoev1.LabelRevision]) {
				t.Errorf("revision %s follows %s", after, first.Labels[semmoev1.LabelRevision])
			}
			if refused := c.d.Overlap.Refused; (refused != "") != (tc.reason == "RolledBack") {
				t.Errorf("refused is %q", refused)
			}
		})
	}
}

// What the engine or the model does not support is not set, and the status has the reason.
func TestOverlapUnsupported(t *testing.T) {
	for name, tc := range map[string]struct {
		engine  semmoev1.EngineType
		change  func(*overlapCase)
		reason  string
		message string
	}{
		"a model that SGLang does not split": {semmoev1.EngineSGLang, func(c *overlapCase) { c.s.Report.Family = "gpt_oss" }, "OverlapUnsupported", "gpt_oss"},
		"the V2 runner of vLLM":              {semmoev1.EngineVLLM, func(c *overlapCase) { c.s.Moed.Spec.Engine.Image = "vllm/vllm-openai:v0.32.0" }, "OverlapUnsupported", "V2 model runner"},
		"no schedule":                        {semmoev1.EngineVLLM, func(c *overlapCase) { c.s.OverlapModels["aa-full"] = OverlapModelOf{Model: (*overlap.Model)(nil)} }, "OverlapNotModelled", "no schedule"},
		"small batches":                      {semmoev1.EngineVLLM, func(c *overlapCase) { c.d.Plan.Spec.ObservedBatchTokens = smallSteps }, "NoGainExpected", "no micro-batches"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newOverlap(t, tc.engine)
			tc.change(c)
			c.decide()
			if got := flags(c.serve()); len(got) != 0 {
				t.Errorf("flags %v", got)
			}
			c.decide()
			if why := c.d.Overlap.Why; why.Reason != tc.reason || !strings.Contains(why.Message, tc.message) {
				t.Errorf("%+v, want %s with %q", why, tc.reason, tc.message)
			}
		})
	}
}

// Profiles have no plan that could choose settings, and their API refuses mode Auto.
func TestOverlapOfProfiles(t *testing.T) {
	moed := moedtest.Deployment(moedtest.OverlapAuto(semmoev1.EngineSGLang), func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}}
	})
	if made := ProfileOf(moed); made.Spec.Engine.Overlap != nil || moed.Spec.Engine.Overlap == nil {
		t.Errorf("overlap of the profile is %+v", made.Spec.Engine.Overlap)
	}
	moed.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 2}
	if made := ProfileOf(moed); made.Spec.Engine.Overlap == nil {
		t.Error("settings of the spec are lost")
	}
}

// TestProfileWithoutTLS checks that a change of spec.engine.tls profiles nothing again.
func TestProfileWithoutTLS(t *testing.T) {
	dataset := func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Target: semmoev1.ProfilingTargetDedicated, Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}}
	}
	secured := func(m *semmoev1.MoEDeployment) { m.Spec.Engine.TLS = &semmoev1.EngineTLS{SecretName: "certificate"} }
	plain, made := ProfileOf(moedtest.Deployment(dataset)), ProfileOf(moedtest.Deployment(dataset, secured))
	if made.Spec.Engine.TLS != nil || made.Name != plain.Name {
		t.Errorf("profile %s of engine %+v, without TLS it is %s", made.Name, made.Spec.Engine, plain.Name)
	}
}

// Manual settings equal to the chosen ones have the same revision: a change of only the mode restarts nothing.
func TestOverlapModeRestartsNothing(t *testing.T) {
	c := newOverlap(t, semmoev1.EngineVLLM)
	c.decide()
	first := c.serve()
	manual := c.d.Serving.Overlap
	c.s.Moed.Spec.Engine.Overlap = &manual
	c.decide()
	if after := revisions.Of(c.s.Moed, *c.s.Report, c.d.Serving); after != first.Labels[semmoev1.LabelRevision] || c.d.Overlap != (Overlap{}) {
		t.Errorf("manual: revision %s follows %s; %+v", after, first.Labels[semmoev1.LabelRevision], c.d.Overlap)
	}
	manual.Mode = semmoev1.OverlapManual
	if after := revisions.Of(c.s.Moed, *c.s.Report, c.d.Serving); after != first.Labels[semmoev1.LabelRevision] {
		t.Errorf("explicit mode: revision %s follows %s", after, first.Labels[semmoev1.LabelRevision])
	}
	c.s.Moed.Spec.Engine.Overlap = &semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}
	delete(first.Annotations, semmoev1.AnnotationOverlapBasis)
	c.decide()
	if after := revisions.Of(c.s.Moed, *c.s.Report, c.d.Serving); after != first.Labels[semmoev1.LabelRevision] || c.d.Overlap.Why.Reason != reasonOverlapping {
		t.Errorf("automatic again: revision %s follows %s; %+v", after, first.Labels[semmoev1.LabelRevision], c.d.Overlap)
	}
}
