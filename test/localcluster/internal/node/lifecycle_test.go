// SPDX-License-Identifier: Apache-2.0

package node

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var testNow = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// testPod has init container "init", sidecar "side" and main containers "a" and "b".
func testPod(policy corev1.RestartPolicy) *corev1.Pod {
	always := corev1.ContainerRestartPolicyAlways
	return &corev1.Pod{Spec: corev1.PodSpec{
		RestartPolicy:  policy,
		InitContainers: []corev1.Container{{Name: "init"}, {Name: "side", RestartPolicy: &always}},
		Containers:     []corev1.Container{{Name: "a"}, {Name: "b"}},
	}}
}

func fresh() *record { return &record{} }

func runs() *record {
	r := &record{}
	r.start("id", testNow.Add(-time.Second))
	r.started, r.ready = true, true
	return r
}

// ended returns the record of a container that has run once and may restart immediately.
func ended(code int32) *record {
	r := runs()
	r.end(code, "Error", "", testNow)
	return r
}

// inBackoff returns the record of a failed container with a back-off of one second.
func inBackoff() *record {
	r := ended(1)
	r.retryAt = testNow.Add(time.Second)
	return r
}

func TestDecide(t *testing.T) {
	notStarted := runs()
	notStarted.started = false
	for name, test := range map[string]struct {
		policy           corev1.RestartPolicy
		init, side, a, b *record
		want             decision
	}{
		"init container starts first":                  {corev1.RestartPolicyAlways, fresh(), fresh(), fresh(), fresh(), decision{start: []string{"init"}}},
		"wait for the init container":                  {corev1.RestartPolicyAlways, runs(), fresh(), fresh(), fresh(), decision{}},
		"sidecar starts after the init container":      {corev1.RestartPolicyAlways, ended(0), fresh(), fresh(), fresh(), decision{start: []string{"side"}}},
		"wait for the sidecar":                         {corev1.RestartPolicyAlways, ended(0), notStarted, fresh(), fresh(), decision{}},
		"main containers start after the sidecar":      {corev1.RestartPolicyAlways, ended(0), runs(), fresh(), fresh(), decision{start: []string{"a", "b"}}},
		"failed init container restarts":               {corev1.RestartPolicyOnFailure, ended(1), fresh(), fresh(), fresh(), decision{start: []string{"init"}}},
		"failed init container in back-off":            {corev1.RestartPolicyAlways, inBackoff(), fresh(), fresh(), fresh(), decision{retryIn: time.Second}},
		"failed init container ends the pod":           {corev1.RestartPolicyNever, ended(1), fresh(), fresh(), fresh(), decision{finished: true}},
		"all running":                                  {corev1.RestartPolicyAlways, ended(0), runs(), runs(), runs(), decision{}},
		"sidecar restarts next to main containers":     {corev1.RestartPolicyNever, ended(0), ended(0), runs(), runs(), decision{start: []string{"side"}}},
		"sidecar in back-off, main container restarts": {corev1.RestartPolicyAlways, ended(0), inBackoff(), ended(0), runs(), decision{start: []string{"a"}, retryIn: time.Second}},
		"failed container with policy Never":           {corev1.RestartPolicyNever, ended(0), runs(), ended(1), runs(), decision{}},
		"OnFailure restarts the failed container":      {corev1.RestartPolicyOnFailure, ended(0), runs(), ended(1), ended(0), decision{start: []string{"a"}}},
		"OnFailure, all succeeded":                     {corev1.RestartPolicyOnFailure, ended(0), runs(), ended(0), ended(0), decision{finished: true}},
		"Never, all ended, sidecar failed":             {corev1.RestartPolicyNever, ended(0), ended(1), ended(1), ended(0), decision{finished: true}},
		"Always, both ended":                           {corev1.RestartPolicyAlways, ended(0), runs(), ended(0), inBackoff(), decision{start: []string{"a"}, retryIn: time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			records := map[string]*record{"init": test.init, "side": test.side, "a": test.a, "b": test.b}
			got := decide(testPod(test.policy), records, testNow)
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(decision{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestDecideProperties tries every combination of container states.
func TestDecideProperties(t *testing.T) {
	states := []func() *record{fresh, runs, func() *record { return ended(0) }, func() *record { return ended(1) }, inBackoff}
	for _, policy := range []corev1.RestartPolicy{corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever} {
		for n := range 5 * 5 * 5 * 5 {
			records := map[string]*record{
				"init": states[n%5](), "side": states[n/5%5](), "a": states[n/25%5](), "b": states[n/125](),
			}
			d := decide(testPod(policy), records, testNow)
			running, seen := false, map[string]bool{}
			for _, r := range records {
				running = running || r.running != nil
			}
			for _, name := range d.start {
				if r := records[name]; r.running != nil || r.retryAt.After(testNow) || seen[name] {
					t.Errorf("%s, %d: %s starts although it runs, is in back-off or has already started", policy, n, name)
				}
				seen[name] = true
			}
			if d.finished && (len(d.start) > 0 || d.retryIn > 0) {
				t.Errorf("%s, %d: finished, but the decision is %+v", policy, n, d)
			}
			if policy == corev1.RestartPolicyAlways && d.finished {
				t.Errorf("%d: a pod with policy Always is finished", n)
			}
			if !running && !d.finished && len(d.start) == 0 && d.retryIn == 0 {
				t.Errorf("%s, %d: the pod is stuck", policy, n)
			}
		}
	}
}

func TestBackoffGrowsAndIsForgotten(t *testing.T) {
	r, now := &record{}, testNow
	var waits []time.Duration
	for range 8 {
		r.start("id", now)
		now = now.Add(time.Second)
		r.end(1, "Error", "", now)
		waits = append(waits, r.retryAt.Sub(now))
		now = r.retryAt
	}
	s := time.Second
	if diff := cmp.Diff([]time.Duration{0, s, 2 * s, 4 * s, 8 * s, 16 * s, 30 * s, 30 * s}, waits); diff != "" {
		t.Error(diff)
	}
	if r.restarts != 7 {
		t.Errorf("%d restarts, want 7", r.restarts)
	}
	r.start("id", now)
	now = now.Add(2 * backoffReset)
	r.end(1, "Error", "", now)
	if r.retryAt != now {
		t.Errorf("back-off after a run of more than a minute is %s, want 0", r.retryAt.Sub(now))
	}
}

func TestPodStatus(t *testing.T) {
	refused := fresh()
	refused.refuse("ErrImagePull", "no such image", testNow)
	unready := runs()
	unready.ready = false
	for name, test := range map[string]struct {
		policy           corev1.RestartPolicy
		init, side, a, b *record
		observed         observation
		phase            corev1.PodPhase
		initialized      corev1.ConditionStatus
		ready            corev1.ConditionStatus
		stateOfA         string
	}{
		"initializing":                        {corev1.RestartPolicyAlways, runs(), fresh(), fresh(), fresh(), observation{}, corev1.PodPending, corev1.ConditionFalse, corev1.ConditionFalse, "PodInitializing"},
		"creating":                            {corev1.RestartPolicyAlways, ended(0), runs(), fresh(), fresh(), observation{}, corev1.PodPending, corev1.ConditionTrue, corev1.ConditionFalse, "ContainerCreating"},
		"image":                               {corev1.RestartPolicyAlways, ended(0), runs(), refused, runs(), observation{}, corev1.PodPending, corev1.ConditionTrue, corev1.ConditionFalse, "ErrImagePull"},
		"ready":                               {corev1.RestartPolicyAlways, ended(0), runs(), runs(), runs(), observation{}, corev1.PodRunning, corev1.ConditionTrue, corev1.ConditionTrue, "running"},
		"unready":                             {corev1.RestartPolicyAlways, ended(0), runs(), unready, runs(), observation{}, corev1.PodRunning, corev1.ConditionTrue, corev1.ConditionFalse, "running"},
		"sidecar failed":                      {corev1.RestartPolicyAlways, ended(0), ended(1), runs(), runs(), observation{}, corev1.PodRunning, corev1.ConditionTrue, corev1.ConditionFalse, "running"},
		"back-off":                            {corev1.RestartPolicyAlways, ended(0), runs(), inBackoff(), runs(), observation{}, corev1.PodRunning, corev1.ConditionTrue, corev1.ConditionFalse, "CrashLoopBackOff"},
		"not terminal while the sidecar runs": {corev1.RestartPolicyNever, ended(0), runs(), ended(0), ended(0), observation{}, corev1.PodRunning, corev1.ConditionTrue, corev1.ConditionFalse, "exit 0"},
		"succeeded":                           {corev1.RestartPolicyNever, ended(0), ended(0), ended(0), ended(0), observation{stopped: true}, corev1.PodSucceeded, corev1.ConditionTrue, corev1.ConditionFalse, "exit 0"},
		"failed":                              {corev1.RestartPolicyNever, ended(0), ended(0), ended(3), ended(0), observation{stopped: true}, corev1.PodFailed, corev1.ConditionTrue, corev1.ConditionFalse, "exit 3"},
		"deadline":                            {corev1.RestartPolicyNever, ended(0), ended(0), ended(0), ended(0), observation{stopped: true, reason: "DeadlineExceeded"}, corev1.PodFailed, corev1.ConditionTrue, corev1.ConditionFalse, "exit 0"},
		"deleted early":                       {corev1.RestartPolicyAlways, fresh(), fresh(), fresh(), fresh(), observation{stopped: true}, corev1.PodFailed, corev1.ConditionFalse, corev1.ConditionFalse, "PodInitializing"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := testPod(test.policy)
			pod.Generation = 4
			records := map[string]*record{"init": test.init, "side": test.side, "a": test.a, "b": test.b}
			s := podStatus(pod, records, test.observed, testNow)
			if s.Phase != test.phase || s.ObservedGeneration != 4 {
				t.Errorf("phase %s of generation %d, want %s of 4", s.Phase, s.ObservedGeneration, test.phase)
			}
			for kind, want := range map[corev1.PodConditionType]corev1.ConditionStatus{corev1.PodInitialized: test.initialized, corev1.PodReady: test.ready} {
				if got := conditionTrue(&s, kind); got != (want == corev1.ConditionTrue) {
					t.Errorf("condition %s is %v, want %s", kind, got, want)
				}
			}
			if got := stateName(s.ContainerStatuses[0].State); got != test.stateOfA {
				t.Errorf("container a is %s, want %s", got, test.stateOfA)
			}
			again := *pod
			again.Status = s
			if diff := cmp.Diff(s, podStatus(&again, records, test.observed, testNow.Add(500*time.Millisecond))); diff != "" {
				t.Errorf("the status changes without an event: %s", diff)
			}
		})
	}
}

func stateName(s corev1.ContainerState) string {
	switch {
	case s.Running != nil:
		return "running"
	case s.Terminated != nil:
		return "exit " + string('0'+s.Terminated.ExitCode)
	default:
		return s.Waiting.Reason
	}
}

func TestConditionsOfOthersAreKept(t *testing.T) {
	pod := testPod(corev1.RestartPolicyAlways)
	gate := corev1.PodConditionType("example.com/gate")
	pod.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: gate}}
	records := map[string]*record{"init": ended(0), "side": runs(), "a": runs(), "b": runs()}
	s := podStatus(pod, records, observation{}, testNow)
	if conditionTrue(&s, corev1.PodReady) || !conditionTrue(&s, corev1.ContainersReady) {
		t.Errorf("the pod is ready without its readiness gate: %+v", s.Conditions)
	}
	foreign := corev1.PodCondition{Type: gate, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(testNow)}
	pod.Status.Conditions = append(s.Conditions, foreign)
	later := podStatus(pod, records, observation{}, testNow.Add(time.Minute))
	if !conditionTrue(&later, corev1.PodReady) {
		t.Errorf("the readiness gate is ignored: %+v", later.Conditions)
	}
	for _, c := range later.Conditions {
		moved := c.LastTransitionTime.After(testNow)
		if want := c.Type == corev1.PodReady; moved != want {
			t.Errorf("condition %s: transition time changed is %v, want %v", c.Type, moved, want)
		}
	}
}

func TestVerdict(t *testing.T) {
	v := newVerdict(2, 3)
	type step struct{ result, changed, ok bool }
	for i, s := range []step{
		{true, false, false}, {true, true, true}, {true, false, true},
		{false, false, true}, {false, false, true}, {true, false, true},
		{false, false, true}, {false, false, true}, {false, true, false}, {false, false, false},
		{true, false, false}, {false, false, false}, {true, false, false}, {true, true, true},
	} {
		if changed, ok := v.add(s.result); changed != s.changed || ok != s.ok {
			t.Errorf("step %d: got %v, %v, want %v, %v", i, changed, ok, s.changed, s.ok)
		}
	}
}
