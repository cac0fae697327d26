// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

const (
	second = `{"event": "measured", "done": 1, "total": 2, "section": "copy"}` + "\n"
	third  = `{"event": "measured", "done": 2, "total": 2, "section": "gemm"}` + "\n"
	json1  = `{"version":1,"world":2,"gpu":"A","timing":"device","copy":[{}]}`
	last   = `{"event": "result", "calibration": ` + json1 + "}\n"
)

// node simulates the execution of a Job. Each request for pods returns the next element of states, and each request for
// the log the next element of logs. The last elements are repeated.
type node struct {
	states []corev1.PodStatus
	logs   []string
	failed bool
}

func (n *node) clients() *fake.Clientset {
	clients := fake.NewClientset()
	clients.PrependReactor("get", "jobs", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !n.failed {
			return false, nil, nil
		}
		return true, &batchv1.Job{Status: batchv1.JobStatus{Conditions: []batchv1.JobCondition{
			{Type: batchv1.JobFailed, Status: corev1.ConditionTrue, Reason: "DeadlineExceeded", Message: "too long"},
		}}}, nil
	})
	clients.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		list := &corev1.PodList{}
		if len(n.states) > 0 {
			list.Items = []corev1.Pod{podIn(n.states[0])}
			n.states = n.states[min(1, len(n.states)-1):]
		}
		return true, list, nil
	})
	clients.PrependReactor("get", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetSubresource() != "log" {
			return false, nil, nil
		}
		text := n.logs[0]
		n.logs = n.logs[min(1, len(n.logs)-1):]
		if text == "" {
			return true, nil, apierrors.NewBadRequest("container is waiting to start")
		}
		return true, &runtime.Unknown{Raw: []byte(text)}, nil
	})
	return clients
}

// podIn returns the pod of the Job with a status.
func podIn(status corev1.PodStatus) corev1.Pod {
	job := &metav1.ObjectMeta{Name: "h200"} // the fake API server gives no UIDs
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: "h200-x", Labels: map[string]string{batchv1.JobNameLabel: "h200"},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))},
		},
		Status: status,
	}
}

func phase(p corev1.PodPhase) corev1.PodStatus { return corev1.PodStatus{Phase: p} }

// TestUserOfJob checks that the Job names a user, except on OpenShift, which assigns one.
func TestUserOfJob(t *testing.T) {
	for version, want := range map[string]bool{"security.openshift.io/v1": false, "security.example/v1": true} {
		clients := fake.NewClientset()
		clients.Resources = []*metav1.APIResourceList{{GroupVersion: version}}
		job, err := (&Cluster{Clients: clients}).job(example())
		if err != nil {
			t.Fatal(err)
		}
		pod := job.Spec.Template.Spec.SecurityContext
		if got := pod.RunAsUser != nil; got != want || !*pod.RunAsNonRoot {
			t.Errorf("%s: the security context of the pod is %v, want a user: %v", version, pod, want)
		}
	}
}

// unread returns the message for a log that cannot be read. The fake connection repeats its address.
func unread(why string) string {
	return "failed to read the log of pod h200-x: " + strings.Repeat(`Get "https://localhost/api/v1/namespaces/team/pods/h200-x/log": `, 2) + why
}

func unschedulable() corev1.PodStatus {
	return corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/2 nodes: insufficient nvidia.com/gpu"},
	}}
}

func ended(code int32, reason string) corev1.PodStatus {
	return corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: []corev1.ContainerStatus{
		{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason}}},
	}}
}

func jobsLeft(t *testing.T, clients *fake.Clientset) int {
	t.Helper()
	list, err := clients.BatchV1().Jobs("team").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return len(list.Items)
}

// TestRunOnCluster verifies that a pod that waits for a GPU, a log that cannot be read yet and an interrupted log delay
// the result, and that no event is reported twice.
func TestRunOnCluster(t *testing.T) {
	n := &node{
		states: []corev1.PodStatus{unschedulable(), unschedulable(), phase(corev1.PodRunning), phase(corev1.PodRunning), phase(corev1.PodRunning), phase(corev1.PodSucceeded)},
		logs:   []string{"", start + second, start + second + third + `{"event": "res`, start + second + third + last},
	}
	clients := n.clients()
	var events []string
	cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
	result, err := cluster.Run(t.Context(), example(), func(e Event) { events = append(events, e.Event+" "+e.Section+e.Message) }, kept)
	if err != nil {
		t.Fatal(err)
	}
	if string(result.JSON) != json1 {
		t.Errorf("result %s", result.JSON)
	}
	want := []string{
		"waiting 0/2 nodes: insufficient nvidia.com/gpu", "waiting " + unread("container is waiting to start"), "start ", "measured copy", "measured gemm",
	}
	if diff := cmp.Diff(want, events); diff != "" {
		t.Error(diff)
	}
	if left := jobsLeft(t, clients); left != 0 {
		t.Errorf("%d Jobs exist, want 0", left)
	}
	script, err := clients.CoreV1().ConfigMaps("team").Get(t.Context(), "h200", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if owner := metav1.GetControllerOf(script); owner == nil || owner.Kind != "Job" || owner.Name != "h200" || script.Data[scriptKey] != Script {
		t.Errorf("owner of the script's ConfigMap: %v", owner)
	}
}

// kept is a write function that succeeds.
func kept(*Result) error { return nil }

// TestRunKeepsJobOfUnwrittenResult verifies that a Job is kept if its result cannot be written, because the log still
// contains the result.
func TestRunKeepsJobOfUnwrittenResult(t *testing.T) {
	clients := (&node{states: []corev1.PodStatus{phase(corev1.PodSucceeded)}, logs: []string{last}}).clients()
	cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
	_, err := cluster.Run(t.Context(), example(), func(Event) {}, func(*Result) error { return errors.New("the disk is full") })
	want := "the disk is full; the result is in the log of Job team/h200, which is kept: kubectl logs -n team job/h200 | semmoe calibrate --from-log - --out FILE"
	if err == nil || err.Error() != want || jobsLeft(t, clients) != 1 {
		t.Errorf("%v, want %q; %d Jobs exist, want 1", err, want, jobsLeft(t, clients))
	}
}

// TestRunRetriesUnreachableCluster verifies that a temporarily unreachable API server does not lose the result, also if
// the log is interrupted after the pod has ended. A denied request ends the run.
func TestRunRetriesUnreachableCluster(t *testing.T) {
	away := errors.New("connection refused")
	forbidden := apierrors.NewForbidden(batchv1.Resource("jobs"), "h200", nil)
	for name, c := range map[string]struct {
		verb, resource string
		answers        []error
		want           string
		events         []string
	}{
		"the Job":     {"get", "jobs", []error{away, away}, "", []string{"failed to get the calibration Job: connection refused"}},
		"its pods":    {"list", "pods", []error{away, apierrors.NewTooManyRequests("later", 1)}, "", []string{"failed to list the calibration pods: connection refused", "failed to list the calibration pods: later"}},
		"its log":     {"get", "pods", []error{away, away}, "", []string{unread("connection refused")}},
		"denied":      {"get", "jobs", []error{forbidden}, "is forbidden", nil},
		"log denied":  {"get", "pods", []error{forbidden}, "is forbidden", nil},
		"Job deleted": {"get", "jobs", []error{apierrors.NewNotFound(batchv1.Resource("jobs"), "h200")}, "not found", nil},
	} {
		t.Run(name, func(t *testing.T) {
			clients := (&node{states: []corev1.PodStatus{phase(corev1.PodSucceeded)}, logs: []string{last}}).clients()
			clients.PrependReactor(c.verb, c.resource, func(clienttesting.Action) (bool, runtime.Object, error) {
				if len(c.answers) == 0 {
					return false, nil, nil
				}
				err := c.answers[0]
				c.answers = c.answers[1:]
				return true, nil, err
			})
			var events []string
			cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
			_, err := cluster.Run(t.Context(), example(), func(e Event) { events = append(events, e.Message) }, kept)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if diff := cmp.Diff(c.events, events); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestRunEndsWithTheDeadline verifies that an unreachable API server is retried until the Job must have ended.
func TestRunEndsWithTheDeadline(t *testing.T) {
	clients := (&node{}).clients()
	clients.PrependReactor("get", "jobs", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection refused")
	})
	spec := example()
	spec.Timeout = 10*time.Millisecond - cleanupTimeout
	cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
	if _, err := cluster.Run(t.Context(), spec, func(Event) {}, kept); !errors.Is(err, errDeadline) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("%v, want %v", err, errDeadline)
	}
}

// TestRunOnALostNode verifies that a run ends if the node of the pod is lost. The API server reports such a pod as
// running forever, and its log cannot be read.
func TestRunOnALostNode(t *testing.T) {
	for name, c := range map[string]struct {
		timeout, age time.Duration
		deleted      bool
		reads        int
		wants        []string
	}{
		"past the deadline": {-cleanupTimeout, time.Minute, false, 1, []string{errDeadline.Error(), "no route to host"}},
		"during the run":    {10*time.Millisecond - cleanupTimeout, 0, false, 2, []string{errDeadline.Error(), "no route to host"}},
		"deleted":           {time.Hour, time.Minute, true, 1, []string{"pod h200-x should have been deleted by 1999-12-31T23:59:29Z", "node gpu-7", "no route to host"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pod := podIn(corev1.PodStatus{Phase: corev1.PodRunning, StartTime: &metav1.Time{Time: time.Now().Add(-c.age)}})
				pod.Spec.NodeName = "gpu-7"
				if c.deleted {
					pod.DeletionTimestamp = &metav1.Time{Time: time.Now().Add(-cleanupTimeout - time.Second)} // the clock begins at 2000
				}
				clients, reads := fake.NewClientset(), 0
				clients.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
					return true, &corev1.PodList{Items: []corev1.Pod{pod}}, nil
				})
				clients.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
					reads++
					return true, nil, apierrors.NewInternalError(errors.New("no route to host"))
				})
				spec := example()
				spec.Timeout = c.timeout
				cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
				_, err := cluster.Run(t.Context(), spec, func(Event) {}, kept)
				for _, want := range c.wants {
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("%v, want %q", err, want)
					}
				}
				if reads < c.reads {
					t.Errorf("%d attempts to read the log, want at least %d", reads, c.reads)
				}
			})
		})
	}
}

// TestRunEndsPastTheDeadline verifies that the result is read if the run ended while its log could not be followed, for
// example because the workstation was suspended until after the deadline.
func TestRunEndsPastTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := metav1.Now()
		running, done := phase(corev1.PodRunning), phase(corev1.PodSucceeded)
		running.StartTime, done.StartTime = &begun, &begun
		clients := (&node{states: []corev1.PodStatus{running, done}, logs: []string{start, last}}).clients()
		clients.PrependReactor("get", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
			time.Sleep(time.Until(begun.Add(2100 * time.Millisecond))) // while the log is read the deadline passes
			return false, nil, nil
		})
		spec := example()
		spec.Timeout = 2*time.Second - cleanupTimeout
		if _, err := (&Cluster{Clients: clients, Poll: time.Millisecond}).Run(t.Context(), spec, func(Event) {}, kept); err != nil {
			t.Error(err)
		}
	})
}

// TestRunWaitsForAQueuedJob verifies that the time in a queue does not count against the deadline of the Job.
func TestRunWaitsForAQueuedJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clients := (&node{states: []corev1.PodStatus{phase(corev1.PodSucceeded)}, logs: []string{last}}).clients()
		spec, begin := example(), time.Now()
		spec.Timeout = 50*time.Millisecond - cleanupTimeout
		clients.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
			return time.Since(begin) < 1500*time.Millisecond, &corev1.PodList{}, nil
		})
		cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
		if _, err := cluster.Run(t.Context(), spec, func(Event) {}, kept); err != nil {
			t.Error(err)
		}
	})
}

// TestRunFails verifies that a failed Job is kept, and that the error contains the reason.
func TestRunFails(t *testing.T) {
	for want, n := range map[string]*node{
		"no GPU here; Job team/h200 is kept":                        {states: []corev1.PodStatus{ended(3, "Error")}, logs: []string{start + `{"event": "error", "message": "no GPU here"}`}},
		"exited with code 137 (OOMKilled): see kubectl logs h200-x": {states: []corev1.PodStatus{phase(corev1.PodRunning), ended(137, "OOMKilled")}, logs: []string{start}},
		"pod h200-x is Failed (unknown reason)":                     {states: []corev1.PodStatus{phase(corev1.PodFailed)}, logs: []string{start}},
		"(DeadlineExceeded: too long): 0/2 nodes":                   {states: []corev1.PodStatus{unschedulable()}, failed: true},
		"the Job has failed (DeadlineExceeded: too long);":          {failed: true},
	} {
		clients := n.clients()
		cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
		_, err := cluster.Run(t.Context(), example(), func(Event) {}, kept)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if left := jobsLeft(t, clients); left != 1 {
			t.Errorf("%q: %d Jobs exist, want 1", want, left)
		}
		if _, err := cluster.Run(t.Context(), example(), func(Event) {}, kept); err == nil || !strings.Contains(err.Error(), "Job team/h200 already exists") {
			t.Errorf("second run: %v", err)
		}
	}
}

// TestRunInterrupted verifies that an interrupted run deletes its Job, which releases the GPUs.
func TestRunInterrupted(t *testing.T) {
	n := &node{states: []corev1.PodStatus{unschedulable()}}
	clients := n.clients()
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	cluster := &Cluster{Clients: clients, Poll: time.Millisecond}
	if _, err := cluster.Run(ctx, example(), func(Event) { cancel(enough) }, kept); !errors.Is(err, enough) {
		t.Errorf("%v, want %v", err, enough)
	}
	if left := jobsLeft(t, clients); left != 0 {
		t.Errorf("%d Jobs exist, want 0", left)
	}
}

func TestRunKeeps(t *testing.T) {
	clients := (&node{states: []corev1.PodStatus{phase(corev1.PodSucceeded)}, logs: []string{last}}).clients()
	cluster := &Cluster{Clients: clients, Poll: time.Millisecond, Keep: true}
	if _, err := cluster.Run(t.Context(), example(), func(Event) {}, kept); err != nil || jobsLeft(t, clients) != 1 {
		t.Errorf("%v, %d Jobs exist, want 1", err, jobsLeft(t, clients))
	}
}

// TestStore verifies that a result replaces an older result, but no other ConfigMap.
func TestStore(t *testing.T) {
	foreign := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "other"}, Data: map[string]string{ResultKey: "{}"}}
	clients := fake.NewClientset(foreign)
	cluster := &Cluster{Clients: clients}
	for _, text := range []string{"old", "new"} {
		if err := cluster.Store(t.Context(), "team", "h200", &Result{JSON: []byte(text)}); err != nil {
			t.Fatal(err)
		}
	}
	stored, err := clients.CoreV1().ConfigMaps("team").Get(t.Context(), "h200", metav1.GetOptions{})
	if err != nil || stored.Data[ResultKey] != "new" {
		t.Errorf("%v, %v", stored, err)
	}
	if err := cluster.Store(t.Context(), "team", "other", &Result{JSON: []byte("x")}); err == nil || !strings.Contains(err.Error(), "ConfigMap team/other exists and is not a calibration") {
		t.Errorf("unrelated ConfigMap: %v", err)
	}
	if err := cluster.Store(t.Context(), "team", "large", &Result{JSON: make([]byte, maxResult+1)}); err == nil || !strings.Contains(err.Error(), "write it to a file") {
		t.Errorf("large result: %v", err)
	}
}

// TestCheckStore verifies that the errors of Store are reported before there is a result, with dry runs only.
func TestCheckStore(t *testing.T) {
	labels := map[string]string{nameLabel: "semmoe-calibration"}
	object := func(name string, labels, data map[string]string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, Labels: labels}, Data: data}
	}
	clients := fake.NewClientset(object("old", labels, map[string]string{ResultKey: "old"}), object("fitted", nil, map[string]string{"hardware.json": "{}"}))
	for _, verb := range []string{"create", "update"} {
		clients.PrependReactor(verb, "configmaps", func(action clienttesting.Action) (bool, runtime.Object, error) {
			var dryRun []string
			switch action := action.(type) {
			case clienttesting.CreateActionImpl:
				dryRun = action.CreateOptions.DryRun
				if action.Object.(*corev1.ConfigMap).Name != "new" {
					return true, nil, apierrors.NewAlreadyExists(corev1.Resource("configmaps"), "old")
				}
			case clienttesting.UpdateActionImpl:
				dryRun = action.UpdateOptions.DryRun
			}
			if len(dryRun) != 1 || dryRun[0] != metav1.DryRunAll {
				t.Errorf("%s with dry run %v", verb, dryRun)
			}
			return true, nil, nil
		})
	}
	cluster := &Cluster{Clients: clients}
	for name, want := range map[string]string{
		"new": "", "old": "",
		"fitted": "ConfigMap team/fitted exists and is not a calibration (key calibration.json, and label app.kubernetes.io/name: semmoe-calibration)",
	} {
		err := cluster.CheckStore(t.Context(), "team", name)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
}

// TestStoreConflict verifies that Store retries after a write conflict.
func TestStoreConflict(t *testing.T) {
	clients := fake.NewClientset()
	cluster := &Cluster{Clients: clients}
	if err := cluster.Store(t.Context(), "team", "h200", &Result{JSON: []byte("old")}); err != nil {
		t.Fatal(err)
	}
	conflicts := 1
	clients.PrependReactor("update", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) {
		conflicts--
		return conflicts >= 0, nil, apierrors.NewConflict(corev1.Resource("configmaps"), "h200", nil)
	})
	if err := cluster.Store(t.Context(), "team", "h200", &Result{JSON: []byte("new")}); err != nil || conflicts >= 0 {
		t.Errorf("%v, %d conflicts", err, conflicts)
	}
}
