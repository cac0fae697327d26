// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/expertscrambling"
)

// scrambled returns a routing trace of the small model that leads to a bad plan. Each request is repeated the given
// number of times.
func scrambled(t *testing.T, times int) string {
	t.Helper()
	routes, err := trace.Open(t.Context(), filepath.Join(repository, "solver", "testdata", "tiny-32e-top4.safetensors.zst"))
	if err != nil {
		t.Fatal(err)
	}
	expertscrambling.Experts(routes, 1)
	routes = repeated(routes, times)
	name := filepath.Join(t.TempDir(), "scrambled.safetensors.zst")
	if err := trace.Create(name, routes); err != nil {
		t.Fatal(err)
	}
	return name
}

// repeated returns a trace with each request repeated, each time as part of a different document.
func repeated(routes *trace.Trace, times int) *trace.Trace {
	all := *routes
	tokens, documents := routes.Offsets[routes.Requests()], slices.Max(routes.Documents)+1
	for again := 1; again < times; again++ {
		all.Tokens = slices.Concat(all.Tokens, routes.Tokens)
		all.Experts = slices.Concat(all.Experts, routes.Experts)
		all.Domains = slices.Concat(all.Domains, routes.Domains)
		for request := range routes.Requests() {
			all.Offsets = append(all.Offsets, int64(again)*tokens+routes.Offsets[request+1])
			all.Documents = append(all.Documents, int32(again)*documents+routes.Documents[request])
		}
	}
	return &all
}

// sendAllKinds sends requests of all kinds of text until stopped, and fails the test if a request is not answered in
// full.
func sendAllKinds(t *testing.T, url string) (stop func()) {
	t.Helper()
	return sendSlowly(t, url, 100)
}

// send runs the given number of concurrent clients, which send prompts until stopped. It fails the test if a request is
// not answered in full. The n-th request is sent when prompt(ctx, n) returns.
func send(t *testing.T, url string, number int, prompt func(ctx context.Context, n int) string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var next, served atomic.Int64
	for range number {
		clients.Go(func() {
			for ctx.Err() == nil {
				text := prompt(ctx, int(next.Add(1)))
				body := fmt.Sprintf(`{"model": "tiny", "prompt": %q, "max_tokens": 2, "temperature": 0}`, strings.ToValidUTF8(text, ""))
				if err := answered(http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))); err != nil {
					t.Errorf("a request failed: %v", err)
				}
				served.Add(1)
			}
		})
	}
	t.Cleanup(clients.Wait) // also after a test failure: the context ends first
	return func() {
		cancel()
		clients.Wait()
		t.Logf("%d requests were answered", served.Load())
	}
}

// phaseOf returns the phase of the rollout in progress, or an empty phase if there is none.
func phaseOf(moed *semmoev1.MoEDeployment) semmoev1.RolloutPhase {
	if moed.Status.Rollout == nil {
		return ""
	}
	return moed.Status.Rollout.Phase
}

// TestCanary promotes a plan from its canary that is better than no plan. A second plan that forecasts the same gain
// but performs worse is rolled back automatically, and is not tried again until a user requests it. No request fails.
func TestCanary(t *testing.T) {
	t.Parallel()
	whole, namespace := t, newNamespace(t)
	stopManager := startManager(whole, namespace, nil)
	storedProfile(t, namespace)
	storedProfileOf(t, namespace, "scrambled", "others", scrambled(t, 1))
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](3)
		m.Spec.Routing.SamplePercent = ptr.To[int32](100)
		m.Spec.Rollout.SoakSeconds = ptr.To[int32](5)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	url := serviceURL(t, moed)
	eventually(t, waitTimeout, "the first request is answered", func() error { return sendRequest(t.Context(), url, "tiny") })

	// Without requests there is no evidence that the plan is better: the plan stays on its canary.
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "Canary", "1 of 3 replicas")
	onCanary := get(t, moed)
	if onCanary.Status.Rollout == nil || onCanary.Status.Rollout.Phase != semmoev1.RolloutPhaseCanary || onCanary.Status.Rollout.CandidateRevision == onCanary.Status.Revision {
		t.Errorf("status.rollout is %+v", onCanary.Status.Rollout)
	}
	if err := conditionIs(onCanary.Status.Conditions, onCanary.Generation, semmoev1.ConditionReconciling, metav1.ConditionFalse, "Complete"); err != nil {
		t.Error(err)
	}
	stop := sendAllKinds(t, url)
	good := waitPlanned(t, moed).Status.PlanDigest
	eventually(t, waitTimeout, "requests are routed by the plan", func() error { return sentBy(t.Context(), url, good) })

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Profiling.ProfileRef.Name = "scrambled" })
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "RolledBack", "LocalityWorse")
	eventually(t, waitTimeout, "the plan is rolled back", func() error {
		current := get(t, moed)
		if workloads := listWorkloads(t, moed); len(workloads) != 1 || current.Status.PlanDigest != good || phaseOf(current) != "" {
			return fmt.Errorf("%d workloads, plan %s, phase %s", len(workloads), current.Status.PlanDigest, phaseOf(current))
		}
		return complete(current)
	})
	bad := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: get(t, moed).Status.Plan}}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(bad), bad); err != nil {
		t.Fatal(err)
	}
	if bad.Status.Verdict != semmoev1.VerdictGain {
		t.Errorf("the forecast of the bad plan has no gain: %+v", bad.Status)
	}
	failures := failuresOf(bad)
	if len(failures) != 1 {
		t.Fatalf("the bad plan's failure annotations are wrong: %v", bad.Annotations)
	}
	t.Logf("plan rolled back: %s", bad.Annotations[failures[0]])

	// The failed plan is not tried again, even after the status is lost.
	pods := podUIDs(t, moed)
	stopManager()
	wipeStatus(t, moed)
	startManager(whole, namespace, nil)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "RolledBack", "LocalityWorse")
	if diff := cmp.Diff(pods, podUIDs(t, moed)); diff != "" {
		t.Errorf("pods were replaced (-before +after):\n%s", diff)
	}

	// When a user removes the failure annotation, the plan is tried again. With rollback Manual, the operator does not
	// roll it back.
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.Rollback = semmoev1.RollbackManual })
	if err := api.Patch(t.Context(), bad, client.RawPatch("application/merge-patch+json", []byte(fmt.Sprintf(`{"metadata":{"annotations":{%q:null}}}`, failures[0])))); err != nil {
		t.Fatal(err)
	}
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionStalled, metav1.ConditionTrue, "RollbackPending", "LocalityWorse", failures[0])
	if stalled := get(t, moed); !meta.IsStatusConditionTrue(stalled.Status.Conditions, semmoev1.ConditionReady) || meta.IsStatusConditionTrue(stalled.Status.Conditions, semmoev1.ConditionDegraded) {
		t.Errorf("conditions %+v", stalled.Status.Conditions)
	}
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Profiling.ProfileRef.Name = "tiny" })
	again := waitPlanned(t, moed)
	if again.Status.PlanDigest != good {
		t.Errorf("the serving plan is %s, want %s", again.Status.PlanDigest, good)
	}
	stop()
}

// failuresOf returns the annotations of a plan that record its failures.
func failuresOf(plan *semmoev1.PlacementPlan) []string {
	var keys []string
	for key := range plan.Annotations {
		if strings.HasPrefix(key, semmoev1.AnnotationFailed) {
			keys = append(keys, key)
		}
	}
	return keys
}
