// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/processes"
	"github.com/semmoe/operator/test/tier"
)

const (
	// maxMemory is the maximum resident memory of the manager in bytes. maxCores is its maximum average CPU usage, in
	// cores, while nothing changes.
	maxMemory = 512 << 20
	maxCores  = 1.0
	// observePeriod is the interval of reconciliations of an observed MoEDeployment without an event, checkPeriod the
	// interval of the checks that the store has a plan; see controllers/moedeployment and controllers/placementplan.
	observePeriod = time.Minute
	checkPeriod   = 10 * time.Minute
)

// TestSteadyState creates many MoEDeployments that share a profile, and waits for their plans. Then, while nothing
// changes, no client writes, the manager reconciles only periodically, and it stays within its memory and CPU limits.
func TestSteadyState(t *testing.T) {
	tier.Nightly(t)
	n, quiet := *deployments, 10*time.Minute
	w := newWorld(t)
	w.createProfile(t)

	begin, before := time.Now(), w.usage(t)
	last := w.createDeployments(t, n)
	w.waitPlanned(t, n, begin, last)
	w.waitInService(t, n)
	w.waitQuiet(t)
	t.Logf("%d MoEDeployments are in service, and writes have ended, after %.1f s; %s", n, time.Since(begin).Seconds(), w.usedSince(t, before, begin))
	if solved := w.solved(t); solved != 1 {
		t.Errorf("%d plans were solved, want 1 for the same inputs", solved)
	}
	t.Logf("writes before the steady state:%s", table(w.writes(t)))
	t.Logf("reconciliations before the steady state:%s", table(w.reconciles(t)))

	w.checkEvents(t)
	w.checkSteady(t, n, quiet)
}

// createDeployments creates n MoEDeployments, and returns the time of the last creation.
func (w *world) createDeployments(t *testing.T, n int) time.Time {
	t.Helper()
	for i := range n {
		w.create(t, newDeployment(i))
	}
	return time.Now()
}

// waitPlanned waits until each of n MoEDeployments has a plan.
func (w *world) waitPlanned(t *testing.T, n int, begin, last time.Time) {
	t.Helper()
	w.eventually(t, patience(n), "each MoEDeployment has a plan", func() error {
		return w.each(t, n, func(moed *semmoev1.MoEDeployment) error {
			if !meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionPlanned) {
				return fmt.Errorf("%s is not planned", moed.Name)
			}
			return nil
		})
	})
	t.Logf("the last of %d MoEDeployments has its first plan %.1f s after its creation, and %.1f s after the creation of the first", n, time.Since(last).Seconds(), time.Since(begin).Seconds())
}

// waitInService waits until each of n MoEDeployments serves with its plan.
func (w *world) waitInService(t *testing.T, n int) {
	t.Helper()
	w.eventually(t, patience(n)+2*observePeriod, "each MoEDeployment is in service", func() error { return w.each(t, n, inService) })
}

// patience returns the maximum time of a step with n MoEDeployments.
func patience(n int) time.Duration { return 2*time.Minute + time.Duration(n)*2*time.Second }

// each checks all MoEDeployments. It returns an error if their number is not n, and at most three errors of check.
func (w *world) each(t *testing.T, n int, check func(*semmoev1.MoEDeployment) error) error {
	t.Helper()
	list, err := w.list(t.Context())
	if err != nil {
		return err
	}
	if len(list) != n {
		return fmt.Errorf("%d MoEDeployments, want %d", len(list), n)
	}
	failed := 0
	var first error
	for i := range list {
		if err := check(&list[i]); err != nil {
			failed++
			first = errors.Join(first, err)
			if failed == 3 {
				break
			}
		}
	}
	return first
}

// waitQuiet waits until no client has written for longer than the longest retry interval: the event recorder of
// client-go retries after 10 s.
func (w *world) waitQuiet(t *testing.T) {
	t.Helper()
	const while = 12 * time.Second
	known, since := total(w.writes(t)), time.Now()
	w.eventually(t, 5*time.Minute, "writes have ended", func() error {
		if now := total(w.writes(t)); now != known {
			known, since = now, time.Now()
		}
		if quiet := time.Since(since); quiet < while {
			return fmt.Errorf("the last write was %v ago", quiet)
		}
		return nil
	})
}

// checkEvents checks that no event was recorded twice. The recorder writes the count of a repeated event six minutes
// after the last occurrence, which would be in the steady state.
func (w *world) checkEvents(t *testing.T) {
	t.Helper()
	var events corev1.EventList
	if err := w.api.List(t.Context(), &events); err != nil {
		t.Fatal(err)
	}
	ours := 0
	for _, e := range events.Items {
		if !strings.HasPrefix(e.ReportingController, "semmoe-") {
			continue
		}
		ours++
		if e.Series != nil {
			t.Errorf("%s %s has event %s %d times, want once: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Series.Count, e.Message)
		}
	}
	if ours == 0 {
		t.Error("the operator recorded no events")
	}
}

// checkSteady measures writes, reconciliations, memory and CPU usage for a period in which nothing changes.
func (w *world) checkSteady(t *testing.T, n int, quiet time.Duration) {
	t.Helper()
	begin, before, writesBefore, reconcilesBefore := time.Now(), w.usage(t), w.writes(t), w.reconciles(t)
	select {
	case <-time.After(quiet):
	case <-w.manager.Ended():
		t.Fatal(w.manager.Stop())
	}
	written, reconciled := since(writesBefore, w.writes(t)), since(reconcilesBefore, w.reconciles(t))
	after := w.usage(t)
	t.Logf("steady state of %d MoEDeployments over %v: %d writes, reconciliations %v, %s", n, quiet, total(written), reconciled, w.usedSince(t, before, begin))
	if total(written) > 0 {
		t.Errorf("writes in %v of steady state, want none:%s", quiet, table(written))
	}
	for controller, limit := range map[string]int{
		"moedeployment": n * (int(quiet/observePeriod) + 1), "placementplan": n * (int(quiet/checkPeriod) + 1), "affinityprofile": int(quiet/observePeriod) + 1,
	} {
		if got := reconciled[controller]; got > limit {
			t.Errorf("controller %s reconciled %d times in %v of steady state, want at most %d", controller, got, quiet, limit)
		}
	}
	if after.Peak > maxMemory {
		t.Errorf("the manager had %d MiB of resident memory, want at most %d MiB", after.Peak>>20, maxMemory>>20)
	}
	if cores := (after.CPU() - before.CPU()).Seconds() / time.Since(begin).Seconds(); cores > maxCores {
		t.Errorf("the manager used %.2f cores in steady state, want at most %v", cores, maxCores)
	}
}

func (w *world) usage(t *testing.T) processes.Usage {
	t.Helper()
	usage, err := w.manager.Usage()
	if err != nil {
		t.Fatal(err)
	}
	return usage
}

// usedSince describes the resource usage of the manager since begin, and the total CPU time of kube-controller-manager,
// the other client of the API server.
func (w *world) usedSince(t *testing.T, before processes.Usage, begin time.Time) string {
	t.Helper()
	after, elapsed := w.usage(t), time.Since(begin).Seconds()
	other, err := w.cluster.ControllerManager().Usage()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("manager: %.1f s of user and %.1f s of system CPU time (%.3f cores), %d MiB resident, peak %d MiB; kube-controller-manager: %.1f s of CPU time in total",
		(after.User - before.User).Seconds(), (after.System - before.System).Seconds(), (after.CPU()-before.CPU()).Seconds()/elapsed, after.Resident>>20, after.Peak>>20, other.CPU().Seconds())
}
