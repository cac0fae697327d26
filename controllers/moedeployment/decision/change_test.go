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
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/rollout"
)

// changeCase is a deployment of two replicas that serve an old spec.
type changeCase struct {
	*rolloutCase
	old string
}

func newChange(t *testing.T) *changeCase {
	t.Helper()
	s := observed(func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.Compare = semmoev1.CompareAll })
	c := &changeCase{&rolloutCase{s, &Decision{}}, revisions.Of(s.Moed, *s.Report, nil)}
	c.add(t, c.old, nil, 2, 2, "")
	return c
}

func (c *changeCase) image(image string) { c.s.Moed.Spec.Engine.Image = image }

func (c *changeCase) revision(layout *revisions.Layout) string {
	return revisions.Of(c.s.Moed, *c.s.Report, layout)
}

// canary adds the canary of the changed spec in place of a replica of the old one.
func (c *changeCase) canary(t *testing.T, layout *revisions.Layout) {
	t.Helper()
	*c.s.Workloads[0].Replicas() = 1
	c.s.Pods = c.s.Pods[:1]
	c.add(t, c.revision(layout), layout, 1, 1, semmoev1.RolloutCanary)
}

// unready marks the pods of the old revision as not ready.
func (c *changeCase) unready() {
	for _, pod := range c.s.Pods {
		if pod.Labels[semmoev1.LabelRevision] == c.old {
			pod.Status.Conditions[0].Status = corev1.ConditionFalse
		}
	}
}

// timed reports minutes of streamed requests, whose tokens take longer on a revision by the share slower. The
// activations of the same share of requests are local.
func (c *changeCase) timed(revision string, slower float64, local, stableLocal int64) {
	report := lar.Report{}
	since := c.s.Now.Add(-time.Hour)
	for minute := range 59 {
		served := map[string]lar.Service{}
		for name, factor := range map[string]float64{revision: 1 + slower, c.old: 1} {
			one := lar.Service{Requests: 1000}
			for i := range 1000 {
				scatter := 0.9 + 0.2*float64((i*7+minute*13)%10)/9
				x := lar.Covariates{5900, 100, float64(i % 5)}
				one.FirstToken.AddWith(0.3*scatter, x)
				one.InterToken.AddWith(0.03*factor*scatter, x)
			}
			rate := local
			if name == c.old {
				rate = stableLocal
			}
			for range 100 {
				one.Locality.Add(lar.Activations{Local: rate, Total: 10})
			}
			served[name] = one
		}
		report.Service = append(report.Service, lar.ServiceBucket{Start: since.Add(time.Duration(minute) * time.Minute), Revisions: served})
	}
	c.s.Reports = &[]lar.Report{report}
}

// texts describes the writes of a decision. Causes of failures are shortened to their reason.
func (c *changeCase) texts(moved Rollout) string {
	name := func(revision string) string {
		switch revision {
		case c.old:
			return "old"
		case c.d.Revision:
			return "new"
		}
		return "other"
	}
	var all []string
	for _, write := range moved.Writes {
		switch w := write.(type) {
		case revisions.CreateWorkload:
			text := "create " + name(w.Workload.Labels[semmoev1.LabelRevision])
			if step := w.Workload.Annotations[semmoev1.AnnotationRollout]; step != "" {
				text += " (" + step + ")"
			}
			all = append(all, fmt.Sprintf("%s with %d replicas", text, *w.Workload.Replicas()))
		case revisions.KeepPlan:
			all = append(all, "keep")
		case writes.Delete:
			all = append(all, "delete "+name(w.Object.GetLabels()[semmoev1.LabelRevision]))
		case revisions.ChangeWorkload:
			text := "change " + name(revisionOf(w.Workload))
			for _, key := range slices.Sorted(maps.Keys(w.Annotations)) {
				value, _, _ := strings.Cut(w.Annotations[key], ": ")
				if revision, failed := strings.CutPrefix(key, semmoev1.AnnotationFailed); failed {
					key = semmoev1.AnnotationFailed + name(revision)
				} else {
					value = w.Annotations[key]
				}
				text += fmt.Sprintf(" %s=%s", strings.TrimPrefix(key, "semmoe.io/"), value)
			}
			if w.Replicas != nil {
				text += fmt.Sprintf(" to %d replicas", *w.Replicas)
			}
			if w.Event != nil {
				text += " event " + w.Event.Name
			}
			all = append(all, text)
		default:
			all = append(all, fmt.Sprintf("%T", w))
		}
	}
	return strings.Join(all, ", ")
}

// decide decides on the change and on the workloads.
func (c *changeCase) decide(t *testing.T) Rollout {
	t.Helper()
	c.d.Revision = c.revision(c.d.Planning.Serving)
	if c.d.Planning.Candidate != nil {
		c.d.CandidateRevision = c.revision(c.d.Planning.Candidate)
	}
	c.d.decideChange(c.s)
	c.d.decideServing(c.s)
	if c.s.Reports != nil {
		c.d.Reports = *c.s.Reports
	}
	moved := DecideRollout(c.s, c.d)
	if moved.Err != nil {
		t.Fatal(moved.Err)
	}
	return moved
}

// A change of the spec starts on a canary if there is a revision to compare it with.
func TestChangeIsCompared(t *testing.T) {
	plan := moedtest.PlanOf("new", "bb", nil)
	layout := revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	fails := func(c *changeCase, layout *revisions.Layout) {
		for _, w := range c.s.Workloads {
			if revisionOf(w) == c.old {
				w.Annotations[semmoev1.AnnotationFailed+c.revision(layout)] = "InterTokenSlower: its time"
			}
		}
	}
	const canary = "create new (Canary) with 0 replicas, keep, change old to 1 replicas"
	for name, tc := range map[string]struct {
		change func(*testing.T, *changeCase)
		want   string // writes
		state  string // phase and reason
		serves string // the serving revision; old if empty
	}{
		"no change": {func(t *testing.T, c *changeCase) {}, "", "", ""},
		"compare Plans": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.s.Moed.Spec.Rollout.Compare = semmoev1.ComparePlans
		}, "create new with 0 replicas, keep, change old to 1 replicas", "", ""},
		"a change":                 {func(t *testing.T, c *changeCase) { c.image("b") }, canary, "Canary CanaryStarting", ""},
		"a variable of the engine": {func(t *testing.T, c *changeCase) { c.s.Moed.Spec.Engine.Env = []corev1.EnvVar{{Name: "A", Value: "1"}} }, canary, "Canary CanaryStarting", ""},
		"a node selector": {func(t *testing.T, c *changeCase) {
			c.s.Moed.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{NodeSelector: map[string]string{"a": "b"}}}
		}, canary, "Canary CanaryStarting", ""},
		"the first revision":        {func(t *testing.T, c *changeCase) { c.s.Workloads, c.s.Pods = nil, nil }, "create old with 2 replicas, keep", "", ""},
		"another size":              {func(t *testing.T, c *changeCase) { c.s.Moed.Spec.Replicas = new(int32(3)) }, "change old to 3 replicas", "", ""},
		"another size and a change": {func(t *testing.T, c *changeCase) { c.image("b"); c.s.Moed.Spec.Replicas = new(int32(3)) }, "change old to 3 replicas", "WaitingForReplicas", ""},
		"one replica":               {func(t *testing.T, c *changeCase) { c.image("b"); c.s.Moed.Spec.Replicas = new(int32(1)) }, "create new with 0 replicas, keep, change old to 0 replicas", "", ""},
		"one replica and surge": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.s.Moed.Spec.Replicas, c.s.Moed.Spec.Rollout.MaxSurge = new(int32(1)), new(int32(1))
			*c.s.Workloads[0].Replicas(), c.s.Pods = 1, c.s.Pods[:1]
		}, "create new (Canary) with 1 replicas, keep", "Canary CanaryStarting", ""},
		"no replica": {func(t *testing.T, c *changeCase) { c.image("b"); c.s.Moed.Spec.Replicas = new(int32(0)) }, "create new with 0 replicas, keep, change old to 0 replicas", "", ""},
		"no replica is ready": {func(t *testing.T, c *changeCase) { c.image("b"); c.unready() },
			"create new with 0 replicas, keep, change old to 0 replicas", "", "new"},
		"a canary, and no replica of the old revision is ready": {func(t *testing.T, c *changeCase) { c.image("b"); c.canary(t, nil); c.unready() },
			"", "Canary CanaryInconclusive", ""},
		"paused": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.s.Moed.Spec.Reconciliation = semmoev1.ReconciliationPaused
		}, "", "", ""},
		"slower":     {func(t *testing.T, c *changeCase) { c.image("b"); c.canary(t, nil); c.timed(c.revision(nil), 0.1, 0, 0) }, "change old failed.semmoe.io/new=InterTokenSlower", "RollingBack ChangeRolledBack", ""},
		"not slower": {func(t *testing.T, c *changeCase) { c.image("b"); c.canary(t, nil); c.timed(c.revision(nil), 0, 0, 0) }, "change new rollout=Promoting event CanaryPromoted, change old to 0 replicas", "Promoting Promoting", ""},
		"not slower, and less local without a plan": {func(t *testing.T, c *changeCase) { c.image("b"); c.canary(t, nil); c.timed(c.revision(nil), 0, 2, 8) },
			"change new rollout=Promoting event CanaryPromoted, change old to 0 replicas", "Promoting Promoting", ""},
		"slower, and only a user may roll it back": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.s.Moed.Spec.Rollout.Rollback = semmoev1.RollbackManual
			c.canary(t, nil)
			c.timed(c.revision(nil), 0.1, 0, 0)
		}, "", "Canary RollbackPending held", ""},
		"a user rolls it back": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.canary(t, nil)
			c.s.Moed.Annotations = map[string]string{semmoev1.AnnotationRollBack: c.revision(nil)}
		}, "change old failed.semmoe.io/new=RollbackRequested", "RollingBack ChangeRolledBack", ""},
		"nothing is proven, and a user approves it": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.canary(t, nil)
			c.s.Moed.Annotations = map[string]string{semmoev1.AnnotationApprove: c.revision(nil)}
		}, "change new rollout=Promoting event CanaryPromoted, change old to 0 replicas", "Promoting Promoting", ""},
		"nothing is proven within an hour": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.canary(t, nil)
			c.s.Now = c.s.Now.Add(time.Minute)
			*c.s.Moed.Spec.Rollout.SoakSeconds = 300
		}, "", "Canary CanaryInconclusive", ""},
		"it failed before":                      {func(t *testing.T, c *changeCase) { c.image("b"); fails(c, nil) }, "", "ChangeRolledBack held", ""},
		"it failed before, and another follows": {func(t *testing.T, c *changeCase) { c.image("b"); fails(c, nil); c.image("c") }, canary, "Canary CanaryStarting", ""},
		"it failed before, and is being removed": {func(t *testing.T, c *changeCase) { c.image("b"); c.canary(t, nil); fails(c, nil) },
			"change new to 0 replicas", "RollingBack ChangeRolledBack held", ""},
		"it failed before, and is reverted": {func(t *testing.T, c *changeCase) {
			before := c.s.Moed.Spec.Engine.Image
			c.image("b")
			fails(c, nil)
			c.image(before)
		},
			"change old failed.semmoe.io/other=", "", ""},
		"all replicas have moved": {func(t *testing.T, c *changeCase) {
			c.image("b")
			*c.s.Workloads[0].Replicas(), c.s.Pods = 0, nil
			c.add(t, c.revision(nil), nil, 2, 2, semmoev1.RolloutPromoting)
		}, "change new proven=2026-03-01T12:00:00Z rollout=", "Promoting Promoting", ""},
		"it is proven": {func(t *testing.T, c *changeCase) {
			c.image("b")
			*c.s.Workloads[0].Replicas(), c.s.Pods = 0, nil
			c.add(t, c.revision(nil), nil, 2, 2, "")
		}, "delete old", "", "new"},
		"the revision in service was deleted": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.canary(t, nil)
			c.s.Workloads, c.s.Pods = c.s.Workloads[:1], c.s.Pods[1:]
		}, "change new proven=2026-03-01T12:00:00Z rollout=, change new to 2 replicas", "", "new"},
		"a change and a plan": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.d.Planning = planner.Planning{Plan: plan, Candidate: layout}
		}, canary, "Canary CanaryStarting plan bb-full", ""},
		"a change and a plan that failed together": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.d.Planning = planner.Planning{Plan: plan, Candidate: layout}
			fails(c, layout)
		}, canary, "Canary CanaryStarting", ""},
		"a change and a plan that failed together, and the change without it": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.d.Planning = planner.Planning{Plan: plan, Candidate: layout}
			fails(c, layout)
			fails(c, nil)
		}, "", "ChangeRolledBack held", ""},
		"a plan while a change is on its canary": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.canary(t, nil)
			c.d.Planning = planner.Planning{Plan: plan, Candidate: layout}
		}, "", "Canary CanaryInconclusive", ""},
		"a change and a plan, less local": {func(t *testing.T, c *changeCase) {
			c.image("b")
			c.d.Planning = planner.Planning{Plan: plan, Candidate: layout}
			c.canary(t, layout)
			c.timed(c.revision(layout), 0, 2, 8)
		}, "change old failed.semmoe.io/new=LocalityWorse", "RollingBack ChangeRolledBack plan bb-full", ""},
		"a plan": {func(t *testing.T, c *changeCase) { c.d.Planning = planner.Planning{Plan: plan, Candidate: layout} }, strings.Replace(canary, "new", "other", 1), "Canary CanaryStarting plan bb-full", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := newChange(t)
			*c.s.Moed.Spec.Rollout.SoakSeconds = 240
			tc.change(t, c)
			moved := c.decide(t)
			if diff := cmp.Diff(tc.want, c.texts(moved)); diff != "" {
				t.Errorf("writes (-want +got):\n%s", diff)
			}
			state := string(moved.Phase) + " " + moved.Reason
			if moved.Held {
				state += " held"
			}
			if moved.Plan != "" {
				state += " plan " + moved.Plan
			}
			if state = strings.TrimSpace(state); state != tc.state || strings.Contains(moved.Message, "%!") {
				t.Errorf("state %q (%s), want %q", state, moved.Message, tc.state)
			}
			serves := c.old
			if tc.serves == "new" {
				serves = c.d.Revision
			}
			if c.d.ServingRevision() != serves {
				t.Errorf("revision %s serves, want %s", c.d.ServingRevision(), serves)
			}
		})
	}
}

// The local activation rates of a change are compared only if the revision in service is what its plan was compared
// with.
func TestTermsOfChange(t *testing.T) {
	plan := moedtest.PlanOf("new", "bb", nil)
	plan.Status.Forecast = &semmoev1.PlanForecast{LARMilli: 500, BaselineMilli: 250}
	layout := revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	workload := func(under *revisions.Layout) *revisions.Workload {
		w, err := revisions.Render(moedtest.Deployment(), "r", moedtest.Report(), under, revisions.Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	for name, tc := range map[string]struct {
		change   *Change
		planning planner.Planning
		want     rollout.Terms
	}{
		"a plan":                                                 {nil, planner.Planning{Plan: plan, Candidate: layout}, rollout.Terms{Promised: 0.25}},
		"a change without a plan":                                {&Change{Stable: workload(nil)}, planner.Planning{}, rollout.Terms{NotSlower: true, AnyLocality: true}},
		"a change under the same plan":                           {&Change{Stable: workload(layout), Layout: layout}, planner.Planning{Plan: plan, Serving: layout}, rollout.Terms{NotSlower: true}},
		"a change with a plan":                                   {&Change{Stable: workload(nil), Layout: layout}, planner.Planning{Plan: plan, Candidate: layout}, rollout.Terms{NotSlower: true, Promised: 0.25}},
		"a change without the plan in service":                   {&Change{Stable: workload(layout)}, planner.Planning{}, rollout.Terms{NotSlower: true, AnyLocality: true}},
		"a plan for the change, and another plan that serves":    {&Change{Stable: workload(revisions.LayoutOf(moedtest.PlanOf("other", "cc", nil), semmoev1.RealizationEngineMap)), Layout: layout}, planner.Planning{Plan: plan, Candidate: layout}, rollout.Terms{NotSlower: true, AnyLocality: true}},
		"a change without a plan, while a plan waits for canary": {&Change{Stable: workload(nil)}, planner.Planning{Plan: plan, Candidate: layout}, rollout.Terms{NotSlower: true, AnyLocality: true}},
	} {
		if got := (&Decision{Change: tc.change, Planning: tc.planning}).terms(); got != tc.want {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}
