// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/tier"
)

const (
	// maxResumption is the maximum time from the return of an API server until the manager works with it again.
	maxResumption = 30 * time.Second
	// maxSuccession is the maximum time from the death of a leader until its successor acts. The lease is 15 s.
	maxSuccession = 20 * time.Second
)

// traffic is a set of clients that send requests continuously.
type traffic struct {
	stop    context.CancelFunc
	clients sync.WaitGroup
	mu      sync.Mutex
	served  int
	failed  []error
}

// startTraffic sends requests until the returned traffic is ended.
func startTraffic(t *testing.T, url string) *traffic {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	all := &traffic{stop: stop}
	t.Cleanup(stop)
	for range 2 {
		all.clients.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(requestPause) {
				err := sendRequest(context.WithoutCancel(ctx), url, "tiny")
				all.mu.Lock()
				if all.served++; err != nil {
					all.failed = append(all.failed, err)
				}
				all.mu.Unlock()
			}
		})
	}
	return all
}

// end stops the traffic and fails the test if a request failed. It returns the number of requests served.
func (a *traffic) end(t *testing.T) int {
	t.Helper()
	a.stop()
	a.clients.Wait()
	if len(a.failed) > 0 {
		t.Errorf("%d of %d requests failed, the first error: %v", len(a.failed), a.served, a.failed[0])
	}
	if a.served < 10 {
		t.Errorf("only %d requests were answered, too few for a test under traffic", a.served)
	}
	return a.served
}

// readySince returns the time at which the deployment became ready, or an error if it is not ready.
func readySince(moed *semmoev1.MoEDeployment) (metav1.Time, error) {
	c := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionReady)
	if c == nil || c.Status != metav1.ConditionTrue {
		return metav1.Time{}, fmt.Errorf("Ready is %+v", c)
	}
	return c.LastTransitionTime, nil
}

// TestAPIServerOutage suspends the API server, and replaces it by another one. Requests are served by the same pods.
// Afterwards the manager, or its successor, continues within the time limit and has created or deleted nothing wrongly.
//
// This test is not parallel because other tests need the API server.
func TestAPIServerOutage(t *testing.T) {
	tier.Nightly(t)
	const outage = time.Minute
	for name, away := range map[string]func(context.Context) error{
		fmt.Sprintf("is suspended for %v", outage): func(ctx context.Context) error {
			if err := cluster.PauseAPIServer(ctx); err != nil {
				return err
			}
			time.Sleep(outage)
			return cluster.ResumeAPIServer(context.WithoutCancel(ctx))
		},
		"restarted": cluster.RestartAPIServer,
	} {
		t.Run(name, func(t *testing.T) {
			namespace := newNamespace(t)
			journal := recordJournal(t, namespace)
			injector := faults.New(faults.Schedule{})
			startManager(t, namespace, injector)
			moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
			create(t, moed)
			since, err := readySince(waitComplete(t, moed))
			if err != nil {
				t.Fatal(err)
			}
			state, pods, writes := endState(t, namespace), podUIDs(t, moed), injector.Writes()
			counts, err := journal.Counts()
			if err != nil {
				t.Fatal(err)
			}
			asking := startTraffic(t, serviceURL(t, moed))

			if err := away(t.Context()); err != nil {
				t.Fatal(err)
			}
			back := time.Now()
			eventually(t, waitTimeout, "the API server responds", func() error { return answers(t.Context()) })
			answered := time.Since(back)
			served := asking.end(t)
			if diff := cmp.Diff(pods, podUIDs(t, moed)); diff != "" {
				t.Errorf("pods were replaced (-before +after):\n%s", diff)
			}
			update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Replicas = 2 })
			asked := time.Now()
			eventually(t, maxResumption, "the manager reconciles", func() error {
				router := &appsv1.Deployment{}
				if err := api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "tiny-router"}, router); err != nil {
					return err
				}
				if *router.Spec.Replicas != 2 {
					return fmt.Errorf("%d replicas", *router.Spec.Replicas)
				}
				return nil
			})
			acted := time.Since(asked)
			update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Replicas = 1 })
			if again, err := readySince(waitComplete(t, moed)); err != nil || again != since {
				t.Errorf("the deployment is ready since %v, was since %v, %v", again, since, err)
			}
			eventually(t, settleTimeout, "the previous state is restored", func() error { return same("state", state, endState(t, namespace)) })
			after, err := journal.Counts()
			if err == nil {
				err = same("record", counts, after)
			}
			if err != nil {
				t.Error(err)
			}
			if problems := journal.Problems(); len(problems) > 0 {
				t.Errorf("problems were reported: %v", problems)
			}
			t.Logf("the API server %s: it responds after %.1f s, and the manager reconciles after another %.1f s; %d requests answered in this time, none failed; %d writes before, %v after",
				name, answered.Seconds(), acted.Seconds(), served, writes, injector)
			clearNamespace(t, namespace)
		})
	}
}

// answers returns an error unless the API server responds within 2 s.
func answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return api.Get(ctx, client.ObjectKey{Name: "default"}, &corev1.Namespace{})
}

// TestUnobservedChanges makes changes while watches are interrupted, so the manager never observes them: an object that
// changes and changes back, an object that is created and deleted, and a deleted child. The manager returns to the
// previous state and creates nothing in response to the unobserved objects.
func TestUnobservedChanges(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	journal := recordJournal(t, namespace)
	injector := faults.New(faults.Schedule{})
	startManager(t, namespace, injector)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	waitComplete(t, moed)
	state, pods, writes := endState(t, namespace), podUIDs(t, moed), injector.Writes()
	want, err := journal.Counts()
	if err != nil {
		t.Fatal(err)
	}

	injector.InterruptWatches()
	for _, replicas := range []int32{4, 2} {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To(replicas) })
	}
	for _, env := range [][]corev1.EnvVar{{{Name: "CHANGED", Value: "yes"}}, nil} {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = env })
	}
	ghost := newDeployment(namespace, "ghost")
	create(t, ghost)
	deleteAndWait(t, get(t, ghost))
	lost := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "tiny"}}
	if err := api.Delete(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	injector.ResumeWatches()
	seeing := time.Now()
	eventually(t, waitTimeout, "the Service is recreated", func() error { return api.Get(t.Context(), client.ObjectKeyFromObject(lost), lost) })
	waitComplete(t, moed)
	took := time.Since(seeing)
	eventually(t, settleTimeout, "the previous state is restored", func() error { return same("state", state, endState(t, namespace)) })
	want["MoEDeployment ghost"], want["Service tiny"] = "made 1 times, deleted 1 times", "made 2 times, deleted 1 times"
	eventually(t, settleTimeout, "no other object is created or deleted", func() error {
		counts, err := journal.Counts()
		return errors.Join(err, same("record", want, counts))
	})
	if now := podUIDs(t, moed); !slices.Equal(pods, now) {
		t.Errorf("the pods changed to %v from %v", now, pods)
	}
	if limit := load.Scale(maxResumption); took > limit {
		t.Errorf("the manager caught up after %v, want at most %v", took, limit)
	}
	t.Logf("the manager caught up %.1f s after its watches resumed, with %d writes; %v", took.Seconds(), injector.Writes()-writes, injector)
}

// TestOperatorAbsent deletes and edits objects while no operator runs. The next operator repairs them without touching
// the serving pods.
func TestOperatorAbsent(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	waitComplete(t, moed)
	state, pods := endState(t, namespace), podUIDs(t, moed)
	stop()

	// Delete or edit every object that can be lost while the engine pods keep running.
	deleted := 0
	for _, list := range kinds() {
		if err := api.List(t.Context(), list, client.InNamespace(namespace), client.HasLabels{semmoev1.LabelComponent}); err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(list) {
			switch kindOf(object) {
			case "Pod", "MoEDeployment":
				continue
			case "StatefulSet": // its pods are orphaned and adopted again
				if err := api.Delete(t.Context(), object, client.PropagationPolicy(metav1.DeletePropagationOrphan)); err != nil {
					t.Fatal(err)
				}
			case "Deployment":
				edited := object.(*appsv1.Deployment)
				edited.Spec.Replicas = ptr.To[int32](3)
				edited.ResourceVersion = "" // its controller may have updated its status
				if err := api.Update(t.Context(), edited, client.FieldOwner("another-user")); err != nil {
					t.Fatal(err)
				}
			default:
				if err := api.Delete(t.Context(), object, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
					t.Fatal(err)
				}
			}
			deleted++
		}
	}
	eventually(t, waitTimeout, "the workload is deleted", func() error {
		if workloads := listWorkloads(t, moed); len(workloads) > 0 {
			return fmt.Errorf("%d workloads", len(workloads))
		}
		return nil
	})
	injector := faults.New(faults.Schedule{})
	startManager(t, namespace, injector)
	begin := time.Now()
	eventually(t, time.Minute, "the previous state is restored", func() error { return same("state", state, endState(t, namespace)) })
	t.Logf("%d objects deleted or edited, repaired after %.1f s: %v", deleted, time.Since(begin).Seconds(), injector)
	if now := podUIDs(t, moed); !slices.Equal(pods, now) {
		t.Errorf("the pods changed to %v from %v", now, pods)
	}
}
