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
	"github.com/semmoe/operator/test/processes"
)

const (
	// succession is within which another manager must act after the leader was killed: the lease is 15 s.
	succession = 20 * time.Second
	// lostNode is the one that fails: through the other one this machine reaches Services.
	lostNode, lostNumber = "n2", "2"
	// detour is within which requests must no longer be sent to pods of a lost node: the cluster takes it for lost after 16 s.
	detour = 30 * time.Second
)

// leader is the pod of the manager that leads, and its identity in the lease.
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

// loseLeader kills the process of the leader, which has no time to give its lease back.
func (w *world) loseLeader(t *testing.T) {
	serving, from := w.serving(t), w.traffic.mark()
	pod, before := w.leader(t)
	if err := syscall.Kill(process(t, pod.Spec.NodeName, "manager", "--health-probe-bind-address=["+pod.Status.PodIP+"]:8081"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	w.waitActs(t)
	took := time.Since(killed)
	if _, after := w.leader(t); after == before {
		t.Errorf("the leader is still %s", before)
	}
	if took > succession {
		t.Errorf("the successor acted after %v, want at most %v", took, succession)
	}
	t.Logf("the leader was killed, and its successor acted after %s", seconds(took))
	w.waitInstalled(t)
	if diff := cmp.Diff(serving, w.serving(t)); diff != "" {
		t.Errorf("pods that serve (-before +after):\n%s", diff)
	}
	w.traffic.expectUnharmed(t, from, 20)
}

// process is the one of a node, as this machine numbers it, that has all the arguments.
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

// loseNode cuts the power of a node, and gives it back: the loss is told, requests are answered by the other node, and the same pods
// serve again after the return, from which on no request fails.
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
	var told *metav1.Condition
	eventually(t, time.Minute, "the loss is told", func() error {
		moed, err := w.moedeployment(t.Context())
		if err != nil {
			return err
		}
		told = meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionDegraded)
		if told == nil || told.Status != metav1.ConditionTrue || told.Reason != "NodeLost" || !strings.Contains(told.Message, lostNode) {
			return fmt.Errorf("%s, and the condition is %+v", moed.Status.Summary, told)
		}
		return nil
	})
	t.Logf("told %s after the loss: %s", seconds(time.Since(lost)), told.Message)
	eventually(t, detour, "requests go past the lost node", func() error { return w.traffic.unharmed(lost, time.Now()) })
	answered, failed := w.traffic.since(from)
	t.Logf("without the node %d requests were answered, and %d failed%s", answered, len(failed), reasons(failed, lost))

	begin := time.Now()
	script(t, "up.sh", "2")
	back := time.Now()
	t.Logf("the node was back after %s", seconds(back.Sub(begin)))
	// A request that was on the node when its power failed ends when its client's patience does, be the node back by then or not.
	from = w.traffic.mark()
	from.begun = back
	w.waitWhole(t)
	w.waitInstalled(t)
	answered, failed = w.traffic.since(from)
	t.Logf("all replicas, managers and the store were ready %s after that; %d requests were answered meanwhile, and %d failed%s", seconds(time.Since(back)), answered, len(failed), reasons(failed, back))
	after := map[string]string{}
	for _, pod := range append(w.enginePods(t), w.routerPods(t)...) {
		after[pod.Name] = string(pod.UID)
	}
	if diff := cmp.Diff(pods, after); diff != "" {
		t.Errorf("pods that serve (-before +after):\n%s", diff)
	}
	w.waitActs(t)
	w.traffic.settle(t, back) // the next step's failures are its own
	w.traffic.expectUnharmed(t, from, 100)
}

// reasons tells when requests have begun that failed, after a moment, and why.
func reasons(failed []failure, since time.Time) string {
	text := ""
	for _, f := range failed {
		text += fmt.Sprintf("\n%s: %v", seconds(f.at.Sub(since)), f.err)
	}
	return text
}
