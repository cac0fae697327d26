// SPDX-License-Identifier: Apache-2.0

package installation

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/processes"
)

const (
	// failoverTimeout is the maximum time until another manager acts after the leader was killed. The lease duration is 15
	// s.
	failoverTimeout = 20 * time.Second
	// lostNode is the node that fails. It is not n1, through which this machine reaches Services.
	lostNode, lostNumber = "n2", "2"
	// rerouteTimeout is the maximum time until no request is sent to pods of a lost node. The cluster marks a node as lost
	// after 16 s.
	rerouteTimeout = 30 * time.Second
)

// leader returns the pod of the leading manager and its identity in the lease.
func (w *world) leader(t *testing.T) (*corev1.Pod, string) {
	t.Helper()
	lease, pod := &coordinationv1.Lease{}, &corev1.Pod{}
	if err := w.Get(t.Context(), client.ObjectKey{Namespace: system, Name: "manager.semmoe.io"}, lease); err != nil {
		t.Fatal(err)
	}
	holder := *lease.Spec.HolderIdentity
	name, _, _ := strings.Cut(holder, "_")
	if err := w.Get(t.Context(), client.ObjectKey{Namespace: system, Name: name}, pod); err != nil {
		t.Fatal(err)
	}
	return pod, holder
}

// loseLeader kills the leader with SIGKILL, so that it cannot release its lease.
func (w *world) loseLeader(t *testing.T) {
	serving, from := w.serving(t), w.traffic.mark()
	pod, before := w.leader(t)
	if err := syscall.Kill(process(t, pod.Spec.NodeName, "manager", "--health-probe-bind-address=["+pod.Status.PodIP+"]:8081"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	w.waitLeaderActs(t)
	took := time.Since(killed)
	if _, after := w.leader(t); after == before {
		t.Errorf("the leader is still %s", before)
	}
	if limit := load.Scale(failoverTimeout); took > limit {
		t.Errorf("the successor acted after %v, want at most %v", took, limit)
	}
	t.Logf("the successor acted %s after the leader was killed", seconds(took))
	w.waitInstalled(t)
	if diff := cmp.Diff(serving, w.serving(t)); diff != "" {
		t.Errorf("pods that serve (-before +after):\n%s", diff)
	}
	w.traffic.expectHealthy(t, from, 20)
}

// process returns the host process ID of the process of a node that has all the arguments.
func process(t *testing.T, node string, arguments ...string) int {
	t.Helper()
	number, err := processes.Find(func(number int, args []string) bool {
		lacks := func(argument string) bool { return !slices.Contains(args, argument) }
		return !slices.ContainsFunc(arguments, lacks) && processes.InCgroup(number, "semmoe-"+node) // see test/cluster/lib.sh
	})
	if err != nil {
		t.Fatal(err)
	}
	if number == 0 {
		t.Fatalf("node %s has no process with the arguments %q", node, arguments)
	}
	return number
}

// loseNode simulates a power failure of a node, and restarts the node. The status must report the loss, and the other
// node must serve all requests. After the return the same pods must serve again, and from then on no request may fail.
func (w *world) loseNode(t *testing.T) {
	pods := map[string]string{}
	for _, pod := range append(w.enginePods(t), w.routerPods(t)...) {
		pods[pod.Name] = string(pod.UID)
	}
	here := func(pod corev1.Pod) bool { return pod.Spec.NodeName == lostNode }
	engines := slices.DeleteFunc(w.enginePods(t), func(pod corev1.Pod) bool { return !here(pod) })
	if len(engines) == 0 {
		t.Fatalf("node %s has no engine pod", lostNode)
	}
	leader, _ := w.leader(t)
	t.Logf("node %s has %d of %d engine pods; the leader is on node %s", lostNode, len(engines), len(w.enginePods(t)), leader.Spec.NodeName)

	from := w.traffic.mark()
	script(t, "lose-node.sh", lostNumber)
	lost := time.Now()
	var degraded *metav1.Condition
	eventually(t, time.Minute, "condition Degraded with reason NodeLost", func() error {
		moed, err := w.moedeployment(t.Context())
		if err != nil {
			return err
		}
		degraded = meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionDegraded)
		if degraded == nil || degraded.Status != metav1.ConditionTrue || degraded.Reason != "NodeLost" || !strings.Contains(degraded.Message, lostNode) {
			return fmt.Errorf("the summary is %q, and the condition is %+v", moed.Status.Summary, degraded)
		}
		return nil
	})
	t.Logf("the condition reported the loss after %s: %s", seconds(time.Since(lost)), degraded.Message)
	eventually(t, rerouteTimeout, "requests avoid the lost node", func() error { return w.traffic.healthy(lost, time.Now()) })
	answered, failed := w.traffic.since(from)
	t.Logf("without the node %d requests succeeded and %d failed%s", answered, len(failed), reasons(failed, lost))

	begin := time.Now()
	script(t, "up.sh", "2")
	back := time.Now()
	t.Logf("the node was back after %s", seconds(back.Sub(begin)))
	// A request that was on the node during the power failure ends only at its client's timeout, even if the node is
	// back earlier.
	from = w.traffic.mark()
	from.begun = back
	w.waitHealthy(t)
	w.waitInstalled(t)
	answered, failed = w.traffic.since(from)
	t.Logf("all replicas, managers and the store were ready %s later; in this time %d requests succeeded and %d failed%s", seconds(time.Since(back)), answered, len(failed), reasons(failed, back))
	after := map[string]string{}
	for _, pod := range append(w.enginePods(t), w.routerPods(t)...) {
		after[pod.Name] = string(pod.UID)
	}
	if diff := cmp.Diff(pods, after); diff != "" {
		t.Errorf("pods that serve (-before +after):\n%s", diff)
	}
	w.waitLeaderActs(t)
	w.traffic.settle(t, back) // the next step must not count failures of this step
	w.traffic.expectHealthy(t, from, 100)
}

// reasons formats the failed requests: the start time of each, relative to since, and its error.
func reasons(failed []failure, since time.Time) string {
	text := ""
	for _, f := range failed {
		text += fmt.Sprintf("\n%s: %v", seconds(f.at.Sub(since)), f.err)
	}
	return text
}
