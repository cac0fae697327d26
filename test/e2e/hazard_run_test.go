// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/faults"
)

// hazard is a failure that is injected while a story runs.
type hazard struct {
	name     string
	schedule faults.Schedule
	// successors are the fault schedules of the following managers, each started after the previous one has died. The
	// first list of a successor is as old as the lag of its cache.
	successors []faults.Schedule
	// touched makes another writer change metadata continuously.
	touched bool
}

const (
	// touchPeriod is the interval between writes of the other writer.
	touchPeriod = 50 * time.Millisecond
	// settleTimeout is the maximum time for delayed changes after the end of a story.
	settleTimeout = 30 * time.Second
)

// storySlots limits the number of stories that run at a time, because the node has room for a limited number of pods.
var storySlots = make(chan struct{}, 4)

// outcome is the result of a story.
type outcome struct {
	state    map[string]string // see faults.Dump
	counts   map[string]string // see faults.Journal
	problems []string
	writes   int
	took     time.Duration
}

// cleanRuns contains the finished clean runs by story name.
var cleanRuns sync.Map

// onceRun is a clean run that is made once. Its outcome is nil if the run failed.
type onceRun struct {
	sync.Once
	outcome *outcome
}

// cleanRun returns the outcome of a story without failures. Each story runs once for all tests.
func cleanRun(t *testing.T, s story) *outcome {
	t.Helper()
	stored, _ := cleanRuns.LoadOrStore(s.name, &onceRun{})
	run := stored.(*onceRun)
	run.Do(func() {
		storySlots <- struct{}{}
		defer func() { <-storySlots }()
		if s.needs != nil {
			s.needs(t)
		}
		namespace := newNamespace(t)
		journal := recordJournal(t, namespace)
		injector := faults.New(faults.Schedule{})
		stop := startManager(t, namespace, injector)
		begin := time.Now()
		s.run(t, namespace)
		clean := &outcome{took: time.Since(begin), state: s.ending(t, namespace), writes: injector.Writes(), problems: journal.Problems()}
		stop()
		counts, err := journal.Counts()
		if err != nil {
			t.Error(err)
		}
		clean.counts = s.renamed(t, namespace, counts)
		if jobs := profilingJobsMade(journal); jobs != s.profilingJobs {
			t.Errorf("%d profiling Jobs, want %d", jobs, s.profilingJobs)
		}
		t.Logf("story %s without failures: %.1f s, %v", s.name, clean.took.Seconds(), injector)
		clearNamespace(t, namespace)
		run.outcome = clean
	})
	if run.outcome == nil {
		t.Fatalf("story %s failed without an injected failure", s.name)
	}
	return run.outcome
}

func profilingJobsMade(journal *faults.Journal) int {
	return journal.Created(func(object string) bool { return strings.HasPrefix(object, "Job profile-") })
}

// runUnderHazard runs a story under a hazard and compares the outcome with that of the clean run. The end state is
// equal, each object was created and deleted equally often, no profiling Job ran twice, no other problem was reported,
// and the number of writes is bounded. It returns the number of managers that had a successor, and of the writes of all
// managers.
func runUnderHazard(t *testing.T, s story, h hazard) (crashes, writes int) {
	clean := cleanRun(t, s)
	namespace := newNamespace(t)
	journal := recordJournal(t, namespace)
	stopManagers := managersUnderHazard(t, namespace, h)
	ctx, cancel := context.WithCancel(t.Context())
	touches := make(chan int, 1)
	go func() {
		if !h.touched {
			touches <- 0
			return
		}
		touches <- faults.Touch(ctx, api, namespace, kinds(), touchPeriod)
	}()
	begin := time.Now()
	s.run(t, namespace)
	took := time.Since(begin)
	cancel()
	touched := <-touches

	eventually(t, settleTimeout, "the end state equals that of the clean run", func() error {
		return same("end state", clean.state, s.ending(t, namespace))
	})
	eventually(t, settleTimeout, "as many objects are created and deleted as in the clean run", func() error {
		counts, err := journal.Counts()
		if err != nil {
			t.Fatal(err)
		}
		return same("record", clean.counts, s.renamed(t, namespace, counts))
	})
	managers := stopManagers()
	figures := ""
	for _, manager := range managers {
		writes += manager.Writes()
		figures += "; " + manager.String()
		if refused := manager.Refused(); len(refused) > 0 {
			t.Errorf("whole objects were updated instead of applied or patched: %v", refused)
		}
		if panics := manager.Panics(); panics > 0 {
			t.Errorf("%d reconciliations panicked", panics)
		}
	}
	if jobs := profilingJobsMade(journal); jobs != s.profilingJobs {
		t.Errorf("%d profiling Jobs, want %d", jobs, s.profilingJobs)
	}
	if diff := cmp.Diff(clean.problems, journal.Problems()); diff != "" {
		t.Errorf("other problems were reported (-want +got):\n%s", diff)
	}
	// Crashes by themselves cause no extra writes: a successor writes only differences from the state that it finds.
	// With lost, refused or stale responses, writes are repeated until a lagging cache has caught up. Two runs differ
	// by up to a third, because status changes are merged or written one by one.
	if bound := 2*clean.writes + 20 + 4*h.schedule.Lag; writes > bound {
		t.Errorf("%d writes, want at most %d: the clean run has %d", writes, bound, clean.writes)
	}
	t.Logf("%s, %s: %.1f s (clean: %.1f s), %d writes (clean: %d), %d by another writer%s", s.name, h.name, took.Seconds(), clean.took.Seconds(), writes, clean.writes, touched, figures)
	clearNamespace(t, namespace)
	return len(managers) - 1, writes
}

// managersUnderHazard starts a manager under a hazard, and the next successor whenever one has died. The returned
// function stops the last one and returns the injectors of all managers.
func managersUnderHazard(t *testing.T, namespace string, h hazard) func() []*faults.Injector {
	t.Helper()
	manager := faults.New(h.schedule)
	stop := startManager(t, namespace, manager)
	managers := []*faults.Injector{manager}
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for _, next := range h.successors {
			select {
			case <-manager.Crashed():
			case <-ctx.Done(): // the story needed fewer writes than the clean run
				return
			}
			stop()
			if next.Lag > 0 {
				next.ListVersion = manager.VersionBefore(next.Lag)
			}
			manager = faults.New(next)
			stop = startManager(t, namespace, manager)
			managers = append(managers, manager)
		}
	}()
	return func() []*faults.Injector {
		end()
		<-ended
		return managers
	}
}

func same(what string, want, got map[string]string) error {
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("the %s differs (-want +got):\n%s", what, diff)
	}
	return nil
}

// recordJournal records the objects created and deleted in a namespace until the test ends.
func recordJournal(t *testing.T, namespace string) *faults.Journal {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	t.Cleanup(stop)
	journal, err := faults.Record(ctx, api, namespace, kindsExceptPods())
	if err != nil {
		t.Fatal(err)
	}
	return journal
}

// endState returns the state of a namespace's objects without everything that differs between runs; see faults.Dump. It
// waits a limited time until the state is stable. Pods are left out.
func endState(t *testing.T, namespace string) map[string]string {
	t.Helper()
	var last map[string]string
	for range 20 {
		state, err := faults.Dump(t.Context(), api, namespace, kindsExceptPods())
		if err != nil {
			t.Fatal(err)
		}
		if maps.Equal(last, state) {
			break
		}
		last = state
		time.Sleep(300 * time.Millisecond)
	}
	return last
}

func compare(t *testing.T, want, got map[string]string) {
	t.Helper()
	if err := same("end state", want, got); err != nil {
		t.Error(err)
	}
}

// clearNamespace deletes the pods.
func clearNamespace(t *testing.T, namespace string) {
	t.Helper()
	if err := api.DeleteAllOf(t.Context(), &semmoev1.MoEDeployment{}, client.InNamespace(namespace), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Error(err)
	}
}

func objects(list client.ObjectList) []client.Object {
	var all []client.Object
	_ = meta.EachListItem(list, func(item runtime.Object) error { // the function returns no error
		all = append(all, item.(client.Object))
		return nil
	})
	return all
}

// kindsExceptPods returns the kinds that the operator creates except pods, which the cluster can replace at any time.
func kindsExceptPods() []client.ObjectList {
	return slices.DeleteFunc(kinds(), func(list client.ObjectList) bool {
		_, pods := list.(*corev1.PodList)
		return pods
	})
}
