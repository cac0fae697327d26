// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/observation/stepsizes"
	"github.com/semmoe/operator/solver/drift"
)

// overlapStory is a deployment whose decisions come true at once: plans are solved, and candidates pass their canary.
type overlapStory struct {
	t        *testing.T
	s        *Snapshot
	rollouts []time.Time
}

func newOverlapStory(t *testing.T, engine semmoev1.EngineType) *overlapStory {
	t.Helper()
	s := observed(moedtest.OverlapAuto(engine), func(m *semmoev1.MoEDeployment) { m.Spec.Drift.MaxReplansPerDay = new(int32(96)) })
	s.Report.Hidden = 5120
	s.NamedProfiles = map[string]*semmoev1.AffinityProfile{"p": moedtest.ProfiledBy("p", "r0", moedtest.Start.Add(-time.Hour))}
	s.StoredOutputs = []*corev1.ConfigMap{{ObjectMeta: metav1.ObjectMeta{Name: revisions.AnswersName(s.Moed, moedtest.Model)}}}
	s.Calibrations, s.OverlapModels = map[string]*drift.Calibration{}, map[string]planner.OverlapModelOf{}
	s.SpecLatest = new(true)
	return &overlapStory{t: t, s: s}
}

// steps reports the sizes of engine steps.
func (o *overlapStory) steps(tokens float64) {
	pod := stepsizes.Pod{Pod: "m-0", Revision: "r", Steps: 1e5}
	for range stepsizes.Parts {
		pod.Sizes = append(pod.Sizes, tokens)
	}
	o.s.Reports = &[]lar.Report{{Steps: []stepsizes.Pod{pod}}}
}

// reconcile decides, and makes the decision true.
func (o *overlapStory) reconcile() Decision {
	o.t.Helper()
	d := Decide(o.s)
	for range maxQuestionsAsked {
		if d.Question == nil {
			break
		}
		switch q := d.Question.(type) {
		case planner.PlanNamed:
			if o.s.NamedPlans == nil {
				o.s.NamedPlans = map[string]*semmoev1.PlacementPlan{}
			}
			o.s.NamedPlans[q.Name] = nil
		case planner.OverlapModel:
			o.s.OverlapModels[q.Plan.Status.PlanDigest] = planner.OverlapModelOf{Model: moedtest.OverlapModel(o.t)}
		case Calibration:
			o.s.Calibrations[q.Plan.Status.PlanDigest] = nil
		default:
			o.t.Fatalf("question %#v", d.Question)
		}
		d = Decide(o.s)
	}
	if d.Err != nil || d.Question != nil || d.Invalid != nil {
		o.t.Fatalf("question %#v, error %v, invalid %v", d.Question, d.Err, d.Invalid)
	}
	for _, write := range slices.Concat(d.Writes, d.ReplanWrites) {
		if create, ok := write.(writes.Create); ok {
			o.solve(create.Object.(*semmoev1.PlacementPlan))
		}
	}
	layout, has := d.candidate()
	if !has {
		layout = d.Planning.Serving
	}
	o.roll(&d, layout)
	return d
}

// maxQuestionsAsked is the limit of the controller.
const maxQuestionsAsked = 10

// solve publishes a plan. The placement of a plan for other batch sizes gains nothing.
func (o *overlapStory) solve(p *semmoev1.PlacementPlan) {
	verdict := semmoev1.VerdictGain
	if p.Spec.Current != nil {
		verdict = semmoev1.VerdictNoGainExpected
	}
	p.Status = moedtest.PlanOf(p.Name, fmt.Sprintf("d%d", len(o.s.Plans)), nil).Status
	p.Status.Verdict, p.UID, p.CreationTimestamp = verdict, types.UID(p.Name), metav1.NewTime(o.s.Now)
	o.s.Plans = slices.Insert(o.s.Plans, 0, p)
}

// roll replaces the workload by that of the decided revision.
func (o *overlapStory) roll(d *Decision, layout *revisions.Layout) {
	revision := revisions.Of(o.s.Moed, *o.s.Report, layout)
	if len(o.s.Workloads) == 1 && revisionOf(o.s.Workloads[0]) == revision {
		for _, write := range DecideRollout(o.s, d).Writes { // records on the workload in service
			if change, ok := write.(revisions.ChangeWorkload); ok {
				change.Replicas = nil
				change.Apply()
			}
		}
		return
	}
	if len(o.s.Workloads) > 0 && layout != nil && len(o.s.Plans) > 1 { // not the first plan
		if d.Change == nil {
			o.t.Errorf("at %v: revision %s has no canary", o.s.Now, revision)
		}
	}
	c := &rolloutCase{o.s, d}
	o.s.Workloads, o.s.Pods = nil, nil
	c.add(o.t, revision, layout, 2, 2, "")
	metav1.SetMetaDataAnnotation(o.s.Workloads[0].ObjectMeta, semmoev1.AnnotationProven, timeText(o.s.Now))
	o.rollouts = append(o.rollouts, o.s.Now)
}

func (o *overlapStory) splits() bool {
	args := o.s.Workloads[0].Template().Spec.Containers[0].Args
	return slices.Contains(args, "--enable-two-batch-overlap") || slices.Contains(args, "--enable-dbo")
}

// Batch sizes that change every few minutes lead to one rollout at most per cooldown, and only if other settings gain.
// Changes are tried on a canary.
func TestOverlapFollowsBatchSizes(t *testing.T) {
	for _, engine := range []semmoev1.EngineType{semmoev1.EngineSGLang, semmoev1.EngineVLLM} {
		t.Run(string(engine), func(t *testing.T) {
			o := newOverlapStory(t, engine)
			o.steps(512)
			for range 3 {
				o.reconcile()
			}
			if len(o.s.Plans) != 1 || o.s.Plans[0].Status.PlanDigest == "" || o.splits() {
				t.Fatalf("%d plans; split is %v", len(o.s.Plans), o.splits())
			}
			begin, before := o.s.Now, len(o.rollouts)
			sizes := []float64{1 << 17, 512}
			for minute := 0; minute < 12*60; minute += 5 {
				o.s.Now = begin.Add(time.Duration(minute) * time.Minute)
				o.steps(sizes[minute/35%2])
				o.reconcile()
			}
			made := o.rollouts[before:]
			for i := 1; i < len(made); i++ {
				if between := made[i].Sub(made[i-1]); between < time.Hour {
					t.Errorf("two rollouts within %v", between)
				}
			}
			// vLLM splits only large steps, so its flags stay.
			if enough := map[semmoev1.EngineType]int{semmoev1.EngineSGLang: 3, semmoev1.EngineVLLM: 1}[engine]; len(made) < enough || engine == semmoev1.EngineVLLM && len(made) != 1 {
				t.Errorf("%d rollouts, want %d", len(made), enough)
			}
			if plans := len(o.s.Plans); plans < 4 {
				t.Errorf("only %d plans were made", plans)
			}
			t.Logf("%d plans, rollouts at %v", len(o.s.Plans), made)

			// Steady sizes lead to the settings for them, and then to nothing.
			o.steps(1 << 17)
			for range 30 {
				o.s.Now = o.s.Now.Add(5 * time.Minute)
				o.reconcile()
			}
			settled := len(o.rollouts)
			for range 30 {
				o.s.Now = o.s.Now.Add(5 * time.Minute)
				o.reconcile()
			}
			if !o.splits() || len(o.rollouts) != settled {
				t.Errorf("split is %v after %d more rollouts", o.splits(), len(o.rollouts)-settled)
			}
		})
	}
}

// A failed trial of settings is recorded, and not repeated.
func TestFailedOverlapIsKept(t *testing.T) {
	o := newOverlapStory(t, semmoev1.EngineSGLang)
	o.steps(512)
	for range 3 {
		o.reconcile()
	}
	serving := o.s.Workloads[0]
	o.s.Now = o.s.Now.Add(2 * time.Hour)
	o.steps(1 << 17)
	for d := o.answered(); d.Change == nil; d = o.answered() {
		if len(o.s.Plans) > 2 {
			t.Fatal("no change")
		}
	}
	d := o.answered()
	var event *writes.Event
	for _, write := range DecideRollout(o.s, &d).Writes {
		if create, ok := write.(revisions.CreateWorkload); ok {
			event = create.Event
		}
	}
	if event == nil || event.Name != "OverlapChosen" || !strings.Contains(event.Message, "has 2 micro-batches, instead of no micro-batches: a layer takes") {
		t.Errorf("event %+v", event)
	}
	metav1.SetMetaDataAnnotation(serving.ObjectMeta, semmoev1.AnnotationFailed+d.Revision, "InterTokenSlower: its time")
	after := o.answered()
	if after.Change != nil || after.Revision != revisionOf(serving) || after.Planning.Overlap.Refused != d.Revision || after.Planning.Overlap.Why.Reason != planner.ReasonRolledBack {
		t.Errorf("revision %s, %+v", after.Revision, after.Planning.Overlap)
	}
	for _, write := range DecideRollout(o.s, &after).Writes {
		if change, ok := write.(revisions.ChangeWorkload); ok && len(change.Annotations) > 0 {
			t.Errorf("annotations %v", change.Annotations)
		}
	}
}

// answered decides and makes only plans true.
func (o *overlapStory) answered() Decision {
	o.t.Helper()
	workloads, pods, rollouts := o.s.Workloads, o.s.Pods, o.rollouts
	d := o.reconcile()
	o.s.Workloads, o.s.Pods, o.rollouts = workloads, pods, rollouts
	return d
}
