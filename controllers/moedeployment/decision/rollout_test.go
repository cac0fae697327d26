// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
)

// texts describes writes. The revisions are named stable and candidate.
func texts(d *Decision, ordered []writes.Write) []string {
	var all []string
	for _, write := range ordered {
		text := ""
		switch w := write.(type) {
		case revisions.CreateWorkload:
			text = fmt.Sprintf("create %s with %d replicas", w.Workload.Name, *w.Workload.Replicas())
			for _, plan := range w.Plans {
				text += fmt.Sprintf(" if plan %s is unchanged", plan.Name)
			}
		case writes.Delete:
			text = fmt.Sprintf("delete %s, unchanged %t", w.Object.GetName(), w.Unchanged)
		case writes.Annotate:
			text = fmt.Sprintf("annotate %s %v", w.Object.GetName(), slices.Sorted(maps.Keys(w.Annotations)))
		case revisions.KeepPlan:
			text = "keep the plan of " + w.Workload.Name
		case revisions.ChangeWorkload:
			text = "change " + w.Workload.Name
			for _, name := range slices.Sorted(maps.Keys(w.Annotations)) {
				text += fmt.Sprintf(" %s=%s", strings.TrimPrefix(name, "semmoe.io/"), w.Annotations[name])
			}
			if w.Replicas != nil {
				text += fmt.Sprintf(" to %d replicas", *w.Replicas)
			}
			if w.Event != nil {
				text += " event " + w.Event.Name
			}
		}
		all = append(all, strings.NewReplacer("m-"+d.Revision, "stable", "m-"+d.CandidateRevision, "candidate", d.CandidateRevision, "candidate").Replace(text))
	}
	return all
}

// rolloutCase is a snapshot of two replicas that serve, and the decision on a plan for them.
type rolloutCase struct {
	s *Snapshot
	d *Decision
}

func newRollout(t *testing.T) *rolloutCase {
	t.Helper()
	plan := moedtest.PlanOf("new", "bb", nil)
	candidate := revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	s := observed(func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.SoakSeconds = new(int32(0)) })
	c := &rolloutCase{s, &Decision{
		Revision: revisions.Of(s.Moed, *s.Report, nil), CandidateRevision: revisions.Of(s.Moed, *s.Report, candidate),
		Planning: planner.Planning{Plan: plan, Candidate: candidate},
	}}
	c.add(t, c.d.Revision, nil, 2, 2, "")
	return c
}

// add adds the workload of a revision with ready pods, as the newest one.
func (c *rolloutCase) add(t *testing.T, revision string, under *revisions.Layout, replicas int32, ready int, step string) {
	t.Helper()
	w, err := revisions.Render(c.s.Moed, revision, *c.s.Report, under, c.s.Own)
	if err != nil {
		t.Fatal(err)
	}
	w.UID, *w.Replicas() = types.UID(revision), replicas
	if step != "" {
		metav1.SetMetaDataAnnotation(w.ObjectMeta, semmoev1.AnnotationRollout, step)
	}
	c.s.Workloads = slices.Insert(c.s.Workloads, 0, w)
	for i := range ready {
		c.s.Pods = append(c.s.Pods, moedtest.Pod(fmt.Sprintf("%s-%d", w.Name, i), revision, func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(w, appsv1.SchemeGroupVersion.WithKind("StatefulSet"))}
			p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(moedtest.Start.Add(-time.Hour))
		}))
	}
}

// The writes of a rollout are ordered, and the decision changes no observed object.
func TestRolloutWrites(t *testing.T) {
	failing := func(c *rolloutCase) { c.s.Pods[len(c.s.Pods)-1].Status.Conditions[0].Status = corev1.ConditionFalse }
	for name, tc := range map[string]struct {
		change func(*testing.T, *rolloutCase)
		want   []string
	}{
		"nothing is known": {func(t *testing.T, c *rolloutCase) { c.d = &Decision{} }, nil},
		"the first revision": {func(t *testing.T, c *rolloutCase) {
			c.s.Workloads, c.s.Pods, c.d.Planning.Candidate = nil, nil, nil
		}, []string{"create stable with 2 replicas", "keep the plan of stable"}},
		"more replicas": {func(t *testing.T, c *rolloutCase) {
			c.s.Moed.Spec.Replicas, c.d.Planning.Candidate = new(int32(3)), nil
		}, []string{"change stable to 3 replicas"}},
		"a canary starts": {func(t *testing.T, c *rolloutCase) {}, []string{
			"create candidate with 0 replicas if plan new is unchanged", "keep the plan of candidate", "change stable to 1 replicas",
		}},
		"the canary fails": {func(t *testing.T, c *rolloutCase) {
			c.add(t, c.d.CandidateRevision, c.d.Planning.Candidate, 1, 1, semmoev1.RolloutCanary)
			failing(c)
		}, []string{"annotate new [failed.semmoe.io/candidate]"}},
		"the canary fails, and only a user may roll it back": {func(t *testing.T, c *rolloutCase) {
			c.s.Moed.Spec.Rollout.Rollback = semmoev1.RollbackManual
			*c.s.Workloads[0].Replicas() = 1
			c.add(t, c.d.CandidateRevision, c.d.Planning.Candidate, 1, 1, semmoev1.RolloutPromoting)
			failing(c)
		}, []string{"change candidate rollout=Canary"}},
		"the canary passes, and a user rejects it": {func(t *testing.T, c *rolloutCase) {
			*c.s.Workloads[0].Replicas() = 1
			c.s.Pods = c.s.Pods[:1]
			c.add(t, c.d.CandidateRevision, c.d.Planning.Candidate, 1, 1, semmoev1.RolloutCanary)
			c.s.Moed.Annotations = map[string]string{semmoev1.AnnotationRollBack: c.d.Planning.Candidate.Short()}
		}, []string{"annotate new [failed.semmoe.io/candidate]"}},
		"the canary passes": {func(t *testing.T, c *rolloutCase) {
			*c.s.Workloads[0].Replicas() = 1
			c.s.Pods = c.s.Pods[:1]
			c.add(t, c.d.CandidateRevision, c.d.Planning.Candidate, 1, 1, semmoev1.RolloutCanary)
		}, []string{"change candidate rollout=Promoting event CanaryPromoted", "change stable to 0 replicas"}},
		"all replicas have moved": {func(t *testing.T, c *rolloutCase) {
			c.s.Workloads, c.s.Pods = nil, nil
			c.add(t, c.d.Revision, nil, 0, 0, "")
			c.add(t, c.d.CandidateRevision, c.d.Planning.Candidate, 2, 2, semmoev1.RolloutPromoting)
		}, []string{"change candidate proven=2026-03-01T12:00:00Z rollout="}},
		"the trial has ended": {func(t *testing.T, c *rolloutCase) {
			c.d.Planning.Candidate = nil
			c.add(t, c.d.CandidateRevision, nil, 0, 0, semmoev1.RolloutCanary)
		}, []string{"change stable proven=2026-03-01T12:00:00Z", "delete candidate, unchanged true"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newRollout(t)
			tc.change(t, c)
			var before []writes.Object
			for _, w := range c.s.Workloads {
				before = append(before, w.Object.DeepCopyObject().(writes.Object))
			}
			moved := DecideRollout(c.s, c.d)
			if moved.Err != nil {
				t.Fatal(moved.Err)
			}
			if c.d.Revision == "" {
				c = newRollout(t)
			}
			if diff := cmp.Diff(tc.want, texts(c.d, moved.Writes)); diff != "" {
				t.Errorf("writes (-want +got):\n%s", diff)
			}
			for i, object := range before {
				if diff := cmp.Diff(object, c.s.Workloads[i].Object); diff != "" {
					t.Errorf("the decision changed a workload:\n%s", diff)
				}
			}
		})
	}
}
