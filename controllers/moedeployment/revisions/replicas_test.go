// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/rollout"
)

func TestAsReplica(t *testing.T) {
	now := moedtest.Start.Add(time.Hour)
	leader := moedtest.InGroup("m-r1", "0", "0")
	worker := func(change ...func(*corev1.Pod)) *corev1.Pod {
		return moedtest.Pod("m-r1-0-1", "r1", append([]func(*corev1.Pod){moedtest.InGroup("m-r1", "0", "1")}, change...)...)
	}
	for name, test := range map[string]struct {
		leader *corev1.Pod
		others []*corev1.Pod
		ready  bool
		since  time.Duration
	}{
		"a replica of one pod":          {moedtest.Pod("m-r1-0", "r1", moedtest.ChangedAt(time.Second)), nil, true, time.Second},
		"both are ready":                {moedtest.Pod("m-r1-0", "r1", leader, moedtest.ChangedAt(time.Minute)), []*corev1.Pod{worker()}, true, time.Minute},
		"the worker became ready later": {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(moedtest.ChangedAt(time.Minute))}, true, time.Minute},
		"the worker is not ready":       {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(moedtest.Unready, moedtest.ChangedAt(time.Minute))}, false, time.Minute},
		"the leader is not ready":       {moedtest.Pod("m-r1-0", "r1", leader, moedtest.Unready, moedtest.ChangedAt(time.Second)), []*corev1.Pod{worker(moedtest.ChangedAt(time.Minute))}, false, time.Second},
		"the worker is missing":         {moedtest.Pod("m-r1-0", "r1", leader), nil, false, time.Hour},
		"the worker is terminating":     {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: moedtest.Start} })}, false, time.Hour},
		"a worker of another group":     {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(moedtest.InGroup("m-r1", "1", "1"))}, false, time.Hour},
		"a worker of another object":    {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(moedtest.InGroup("m-r2", "0", "1"))}, false, time.Hour},
	} {
		before := test.leader.DeepCopy()
		replica := replicaOf(AsReplica(test.leader, test.others, now))
		if replica.Ready != test.ready || !replica.Since.Equal(moedtest.Start.Add(test.since)) {
			t.Errorf("%s: ready %v since %v, want %v since %v", name, replica.Ready, replica.Since.Sub(moedtest.Start), test.ready, test.since)
		}
		if diff := cmp.Diff(before, test.leader); diff != "" {
			t.Errorf("%s: the cache's pod was changed:\n%s", name, diff)
		}
	}
}

// A leader with a worker that does not serve is not reported as a pod on a lost node.
func TestUnreadyReplicaHasItsNode(t *testing.T) {
	leader := moedtest.Pod("m-r1-0", "r1", moedtest.InGroup("m-r1", "0", "0"), func(p *corev1.Pod) {
		p.Status.Phase = corev1.PodRunning
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.ContainersReady, Status: corev1.ConditionTrue})
	})
	for name, others := range map[string][]*corev1.Pod{
		"the worker is missing":   nil,
		"the worker is not ready": {moedtest.Pod("m-r1-0-1", "r1", moedtest.InGroup("m-r1", "0", "1"), moedtest.Unready)},
	} {
		shown := AsReplica(leader, others, moedtest.Start)
		if problem, _ := podhealth.Find([]*corev1.Pod{shown}, nil, moedtest.Start.Add(time.Hour)); podhealth.Ready(shown) || problem != nil {
			t.Errorf("%s: ready %v, problem %+v, want neither", name, podhealth.Ready(shown), problem)
		}
	}
}

// If pods of a group are missing, the events of the StatefulSet that creates them contain the cause.
func TestGroupsLackingPods(t *testing.T) {
	w := groupSet("")
	first, second := moedtest.Pod("m-r1-0", "r1", moedtest.InGroup("m-r1", "0", "0")), moedtest.Pod("m-r1-1", "r1", moedtest.InGroup("m-r1", "1", "0"))
	workers := []*corev1.Pod{moedtest.Pod("m-r1-0-1", "r1", moedtest.InGroup("m-r1", "0", "1")), moedtest.Pod("m-r1-1-1", "r1", moedtest.InGroup("m-r1", "1", "1"))}
	for name, test := range map[string]struct {
		leaders, workers []*corev1.Pod
		want             []string
	}{
		"complete":                {[]*corev1.Pod{first, second}, workers, nil},
		"a leader is missing":     {[]*corev1.Pod{first}, workers, []string{"m-r1"}},
		"a worker is missing":     {[]*corev1.Pod{first, second}, workers[:1], []string{"m-r1-1"}},
		"no pods":                 {nil, nil, []string{"m-r1"}},
		"those of another object": {[]*corev1.Pod{first, second, moedtest.Pod("m-r2-0", "r2", moedtest.InGroup("m-r2", "0", "0"))}, workers, nil},
	} {
		if diff := cmp.Diff(test.want, GroupsLackingPods(w, test.leaders, test.workers)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if names := GroupsLackingPods(StatefulSet(&appsv1.StatefulSet{}), nil, nil); names != nil {
		t.Errorf("a StatefulSet has groups %v", names)
	}
}

// Replicas that fit no node, or are leaving one, hold no devices for a rollout. A replica of several pods holds devices
// while one of its pods has a node.
func TestStateOf(t *testing.T) {
	unscheduled := func(p *corev1.Pod) {
		p.Status.Phase = corev1.PodPending
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	}
	leader := func(group string, change ...func(*corev1.Pod)) *corev1.Pod {
		return moedtest.Pod("m-r1-"+group, "r1", append(change, moedtest.InGroup("m-r1", group, "0"))...)
	}
	worker := func(group string, change ...func(*corev1.Pod)) *corev1.Pod {
		return moedtest.Pod("m-r1-"+group+"-1", "r1", append(change, moedtest.InGroup("m-r1", group, "1"))...)
	}
	serving := leader("1")
	for name, test := range map[string]struct {
		pods, workers []*corev1.Pod
		want          rollout.Revision
	}{
		"both serve":                             {[]*corev1.Pod{leader("0"), serving}, nil, rollout.Revision{Existing: 2, Placed: 2, Ready: []bool{true, true}, Homeless: []bool{false, false}}},
		"a replica fits no node":                 {[]*corev1.Pod{leader("0", unscheduled), serving}, nil, rollout.Revision{Existing: 2, Placed: 1, Ready: []bool{false, true}, Homeless: []bool{true, false}}},
		"neither replica nor worker fits a node": {[]*corev1.Pod{leader("0", unscheduled), serving}, []*corev1.Pod{worker("0", unscheduled)}, rollout.Revision{Existing: 2, Placed: 1, Ready: []bool{false, true}, Homeless: []bool{true, false}}},
		"its worker has a node":                  {[]*corev1.Pod{leader("0", unscheduled), serving}, []*corev1.Pod{worker("0")}, rollout.Revision{Existing: 2, Placed: 2, Ready: []bool{false, true}, Homeless: []bool{false, false}}},
		"a replica leaves its node":              {[]*corev1.Pod{leader("0", going("u")), serving}, nil, rollout.Revision{Existing: 1, Placed: 1, Ready: []bool{false, true}, Homeless: []bool{true, false}}},
		"one is not created yet":                 {[]*corev1.Pod{serving}, nil, rollout.Revision{Existing: 1, Placed: 1, Ready: []bool{false, true}, Homeless: []bool{false, false}}},
		"one more than desired":                  {[]*corev1.Pod{leader("0"), serving, leader("2")}, nil, rollout.Revision{Existing: 3, Placed: 3, Ready: []bool{true, true}, Homeless: []bool{false, false}}},
	} {
		test.want.Replicas = 2
		if diff := cmp.Diff(test.want, StateOf(groupSet(""), test.pods, test.workers)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// A replica is not requested while pods of an earlier replica still use its name, nor are the replicas after it.
func TestUsableReplicas(t *testing.T) {
	worker := func(set, group string) *corev1.Pod {
		return moedtest.Pod(set+"-"+group+"-1", "r1", moedtest.InGroup(set, group, "1"))
	}
	set := func(replicas int32) *Workload {
		w := groupSet("")
		*w.Replicas() = replicas
		return w
	}
	for name, test := range map[string]struct {
		of      *Workload
		wanted  int32
		workers []*corev1.Pod
		want    int32
	}{
		"no pod left":                {set(1), 3, []*corev1.Pod{worker("m-r1", "0")}, 3},
		"pod of the next replica":    {set(1), 3, []*corev1.Pod{worker("m-r1", "0"), worker("m-r1", "1")}, 1},
		"pod of a later replica":     {set(1), 4, []*corev1.Pod{worker("m-r1", "0"), worker("m-r1", "3"), worker("m-r1", "2")}, 2},
		"pod of an unwanted replica": {set(1), 2, []*corev1.Pod{worker("m-r1", "2")}, 2},
		"of another object":          {set(1), 2, []*corev1.Pod{worker("m-r2", "1")}, 2},
		"of a set of the same name":  {set(0), 2, []*corev1.Pod{worker("m-r1", "0")}, 0},
		"down":                       {set(2), 1, []*corev1.Pod{worker("m-r1", "0"), worker("m-r1", "1"), worker("m-r1", "2")}, 1},
		"a StatefulSet":              {StatefulSet(&appsv1.StatefulSet{}), 2, []*corev1.Pod{worker("m-r1", "1")}, 2},
	} {
		if got := UsableReplicas(test.of, test.wanted, test.workers); got != test.want {
			t.Errorf("%s: %d of %d replicas, want %d", name, got, test.wanted, test.want)
		}
	}
}

// groupSet returns a workload of two groups.
func groupSet(annotation string) *Workload {
	set := &leaderworkersetv1.LeaderWorkerSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m-r1", UID: "set", CreationTimestamp: metav1.NewTime(moedtest.Start)}}
	set.Spec.Replicas = ptr.To[int32](2)
	if annotation != "" {
		set.Annotations = map[string]string{semmoev1.AnnotationRecreatedReplicas: annotation}
	}
	return LeaderWorkerSet(set)
}

func going(uid types.UID) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.UID, p.DeletionTimestamp = uid, &metav1.Time{Time: moedtest.Start.Add(time.Hour)}
	}
}

func ended(code int32, message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "engine", RestartCount: 1, LastTerminationState: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: message, FinishedAt: metav1.NewTime(moedtest.Start)},
		}}}
	}
}

func evicted(p *corev1.Pod) {
	p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: "TerminationTarget", Status: corev1.ConditionTrue})
}

func TestCountRemade(t *testing.T) {
	leader := func(change ...func(*corev1.Pod)) *corev1.Pod {
		return moedtest.Pod("m-r1-1", "r1", append([]func(*corev1.Pod){moedtest.InGroup("m-r1", "1", "0")}, change...)...)
	}
	worker := moedtest.Pod("m-r1-1-1", "r1", moedtest.InGroup("m-r1", "1", "1"), ended(1, "no such flag"))
	const once = `{"m-r1-1":{"leader":"a","times":1,"since":"2026-03-01T12:00:00Z","end":"before"}}`
	first := recreations{Leader: "a", Times: 1, Since: moedtest.Start, End: "before"}
	now := moedtest.Start.Add(time.Minute)
	for name, test := range map[string]struct {
		reported string
		leaders  []*corev1.Pod
		want     map[string]recreations
	}{
		"nothing":                    {"", nil, nil},
		"not ready yet":              {"", []*corev1.Pod{leader(moedtest.Unready)}, nil},
		"terminating, never ready":   {"", []*corev1.Pod{leader(moedtest.Unready, going("a"))}, map[string]recreations{"m-r1-1": {"a", 1, moedtest.Start, "pod m-r1-1-1, container engine (exit code 1: no such flag)"}}},
		"terminating, was ready":     {"", []*corev1.Pod{leader(going("a"))}, map[string]recreations{"m-r1-1": {"a", 1, now, "pod m-r1-1-1, container engine (exit code 1: no such flag)"}}},
		"counted once":               {once, []*corev1.Pod{leader(moedtest.Unready, going("a"))}, map[string]recreations{"m-r1-1": first}},
		"terminating again":          {once, []*corev1.Pod{leader(moedtest.Unready, going("b"))}, map[string]recreations{"m-r1-1": {"b", 2, moedtest.Start, "pod m-r1-1-1, container engine (exit code 1: no such flag)"}}},
		"evicted by a queue":         {once, []*corev1.Pod{leader(moedtest.Unready, going("b"), evicted)}, nil},
		"between two leaders":        {once, nil, map[string]recreations{"m-r1-1": first}},
		"the next is not ready yet":  {once, []*corev1.Pod{leader(moedtest.Unready)}, map[string]recreations{"m-r1-1": first}},
		"the next is ready":          {once, []*corev1.Pod{leader()}, nil},
		"one of another workload":    {"", []*corev1.Pod{leader(moedtest.InGroup("m-r2", "1", "0"), moedtest.Unready, going("a"))}, nil},
		"unwanted replica":           {"", []*corev1.Pod{moedtest.Pod("m-r1-2", "r1", moedtest.InGroup("m-r1", "2", "0"), moedtest.Unready, going("a"))}, nil},
		"invalid annotation":         {"[", []*corev1.Pod{leader(moedtest.Unready)}, nil},
		"replica removed by scaling": {strings.ReplaceAll(once, "m-r1-1", "m-r1-2"), nil, nil},
		"name of no replica":         {strings.ReplaceAll(once, "m-r1-1", "else"), nil, nil},
	} {
		got := countRecreations(groupSet(test.reported), test.leaders, []*corev1.Pod{worker}, now)
		if len(got) == 0 {
			got = nil
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// A canary with a repeatedly recreated replica is rolled back like one whose container restarts, and the cause is
// reported.
func TestRecreatedCanaryIsRolledBack(t *testing.T) {
	const often = `{"m-r1-0":{"leader":"c","times":3,"since":"2026-03-01T12:00:00Z","end":"pod m-r1-0, container engine (exit code 1)"}}`
	fresh := replicaOf(moedtest.Pod("m-r1-0", "r1", moedtest.InGroup("m-r1", "0", "0"), moedtest.Unready, func(p *corev1.Pod) {
		p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(moedtest.Start.Add(6 * time.Minute))
	}))
	w := groupSet(often)
	trial := rollout.Trial{Now: moedtest.Start.Add(6 * time.Minute), Canary: 1, Replicas: []rollout.Replica{fresh}}
	if decision := rollout.Judge(trial); decision.Step != rollout.StepCanary {
		t.Errorf("with only its pods: %+v", decision)
	}
	trial.Replicas[0] = withRecreations(fresh, recreationsOf(w))
	if decision := rollout.Judge(trial); decision.Step != rollout.StepRollBack || decision.Reason != "CanaryCrashing" {
		t.Errorf("recreated three times: %+v", decision)
	}
	problem := RecreationProblem([]*Workload{groupSet(""), w})
	if problem == nil || problem.Reason != "ContainerCrashing" || !strings.Contains(problem.Message, "pod m-r1-0 is recreated repeatedly (pod m-r1-0, container engine (exit code 1))") {
		t.Errorf("problem %+v", problem)
	}
	if problem := RecreationProblem([]*Workload{groupSet(strings.Replace(often, `"times":3`, `"times":1`, 1))}); problem != nil {
		t.Errorf("a replica that was recreated once has problem %+v", problem)
	}
}

// The wanted revision serves from its first ready replica on. Before, the proven revision with the most ready replicas
// serves.
func TestServing(t *testing.T) {
	workload := func(revision string, trial string) *Workload {
		set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "m-" + revision, Labels: map[string]string{semmoev1.LabelRevision: revision}}}
		if trial != "" {
			set.Annotations = map[string]string{semmoev1.AnnotationRollout: trial}
		}
		return StatefulSet(set)
	}
	all := []*Workload{workload("new", ""), workload("canary", semmoev1.RolloutCanary), workload("mid", ""), workload("old", "")}
	ready := func(revisions ...string) (pods []*corev1.Pod) {
		for _, revision := range revisions {
			pods = append(pods, moedtest.Pod("m-"+revision, revision))
		}
		return pods
	}
	for name, tc := range map[string]struct {
		pods         []*corev1.Pod
		wanted, last string
		want         string
	}{
		"the wanted one":                              {ready("new", "old", "old"), "new", "old", "new"},
		"the wanted one is not ready":                 {append(ready("old"), moedtest.Pod("m-new", "new", moedtest.Unready)), "new", "old", "old"},
		"no revision is wanted":                       {ready("old"), "", "old", "old"},
		"no revision is wanted, and none is reported": {ready("old"), "", "", "old"},
		"most of several":                             {ready("old", "mid", "mid"), "new", "", "mid"},
		"a canary does not serve":                     {ready("canary", "canary", "old"), "", "", "old"},
		"none is ready":                               {nil, "new", "old", "old"},
		"none is ready, and the last one is deleted":  {nil, "new", "gone", "new"},
		"no workloads":                                {nil, "", "", ""},
		"a pod of a deleted workload":                 {ready("gone"), "new", "", "new"},
	} {
		got := ""
		if w := Serving(all, tc.pods, tc.wanted, tc.last); w != nil {
			got = w.Labels[semmoev1.LabelRevision]
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}
