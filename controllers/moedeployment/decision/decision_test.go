// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/observation/lar"
)

// observed returns a snapshot of an inspected model without workloads.
func observed(change ...func(*semmoev1.MoEDeployment)) *Snapshot {
	report := moedtest.Report()
	s := &Snapshot{Snapshot: planner.Snapshot{Now: moedtest.Start, Moed: moedtest.Deployment(change...), Report: &report}}
	s.Inspection.Report = &report
	return s
}

func sampled(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = new(int32(5)) }

// The first error in the spec is reported, in the order of the checks.
func TestInvalid(t *testing.T) {
	sevenRanks := func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 7 }
	for name, tc := range map[string]struct {
		snapshot *Snapshot
		want     string
	}{
		"valid":                           {observed(), ""},
		"unknown engine":                  {observed(func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = "x" }, sevenRanks), "UnknownEngine"},
		"groups without their kind":       {observed(moedtest.TwoPods), revisions.ReasonNoGroups},
		"ranks that do not fit the model": {observed(sevenRanks), "InvalidExpertParallelSize"},
	} {
		got := ""
		if invalid := Invalid(tc.snapshot); invalid != nil {
			got = invalid.Reason
		}
		if got != tc.want {
			t.Errorf("%s: reason %q, want %q", name, got, tc.want)
		}
	}
}

// TestReportedRelease checks that a release which only the serving engine can report, because the tag of its image says
// nothing, is checked like one in a tag, and that the decision changes nothing that serves.
func TestReportedRelease(t *testing.T) {
	of := func(engine semmoev1.EngineType, args ...string) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type, m.Spec.Engine.Args = engine, args }
	}
	const lmcache = `{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}`
	for name, tc := range map[string]struct {
		change        func(*semmoev1.MoEDeployment)
		release, want string
	}{
		"SGLang 0.5.12":              {of(semmoev1.EngineSGLang), "0.5.12", ""},
		"SGLang 0.5.11":              {of(semmoev1.EngineSGLang), "0.5.11", "spec.engine.image: SGLang 0.5.11 is invalid with spec.profiling"},
		"vLLM 0.17.0":                {of(semmoev1.EngineVLLM), "0.17.0", "returning routed experts needs 0.22.0 or newer; use a newer image, or set spec.routing.samplePercent to 0"},
		"vLLM 0.22.0, KV connector":  {of(semmoev1.EngineVLLM, "--kv-transfer-config", lmcache), "0.22.0", "the KV connector LMCacheConnectorV1 is invalid"},
		"vLLM 0.31.0, KV connector":  {of(semmoev1.EngineVLLM, "--kv-transfer-config", lmcache), "0.31.0", ""},
		"vLLM, no release, the same": {of(semmoev1.EngineVLLM, "--kv-transfer-config", lmcache), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := observed(tc.change, sampled)
			revision := revisions.Of(s.Moed, *s.Report, nil)
			workload, err := revisions.Render(s.Moed, revision, *s.Report, nil, revisions.Own{Image: "semmoe:1"})
			if err != nil {
				t.Fatal(err)
			}
			workload.Annotations[semmoev1.AnnotationEngineRelease] = tc.release
			s.Workloads, s.Pods, s.Reports = []*revisions.Workload{workload}, []*corev1.Pod{moedtest.Pod("m-r1-0", revision)}, &[]lar.Report{}
			d := Decide(s)
			if tc.want == "" {
				if d.Invalid != nil {
					t.Error(d.Invalid)
				}
			} else if d.Invalid == nil || !strings.Contains(d.Invalid.Error(), tc.want) {
				t.Errorf("%v, want %q", d.Invalid, tc.want)
			}
			if d.Release.String() != tc.release || d.Err != nil || len(d.Writes)+len(d.ReplanWrites) != 0 {
				t.Errorf("release %q, %v, writes %v", d.Release, d.Err, d.Writes)
			}
		})
	}
}

// Without a plan the decision needs the reports of routers only if routers sample requests.
func TestDecideWithoutPlan(t *testing.T) {
	for name, tc := range map[string]struct {
		snapshot *Snapshot
		question planner.Question
	}{
		"no samples": {observed(), nil},
		"samples":    {observed(sampled), RouterReports{}},
	} {
		d := Decide(tc.snapshot)
		if d.Question != tc.question {
			t.Errorf("%s: question %#v, want %#v", name, d.Question, tc.question)
		}
		tc.snapshot.Reports = &[]lar.Report{}
		d = Decide(tc.snapshot)
		if want := revisions.Of(tc.snapshot.Moed, moedtest.Report(), nil); d.Question != nil || d.Revision != want || len(d.Writes)+len(d.ReplanWrites) != 0 {
			t.Errorf("%s: question %#v, revision %q, %d writes; want revision %q only", name, d.Question, d.Revision, len(d.Writes), want)
		}
		if d.Drift.Status != locality.Unknown || d.Drift.Reason != "NoPlan" {
			t.Errorf("%s: drift %+v", name, d.Drift)
		}
	}
}

// An unread profile or plan leaves no decision on revisions and no writes.
func TestDecideAfterReadError(t *testing.T) {
	s := observed(func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "q"}}
	})
	s.Pods = []*corev1.Pod{moedtest.Pod("m-r1-0", "r1")}
	s.Reports = &[]lar.Report{}
	s.Unread = errors.New("connection refused")
	if d := Decide(s); !d.Undecided || !errors.Is(d.Err, s.Unread) || d.Revision != "" || len(d.Writes)+len(d.ReplanWrites) != 0 {
		t.Errorf("decision %+v", d)
	}
}
