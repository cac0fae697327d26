package moedeployment

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/rollout"
)

// groupSet is a workload of two groups.
func groupSet(annotation string) *workload {
	set := &leaderworkersetv1.LeaderWorkerSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m-r1", UID: "set", CreationTimestamp: metav1.NewTime(moedtest.Start)}}
	set.Spec.Replicas = ptr.To[int32](2)
	if annotation != "" {
		set.Annotations = map[string]string{semmoev1.AnnotationRemade: annotation}
	}
	return leaderWorkerSet(set)
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

func TestCountRemade(t *testing.T) {
	leader := func(change ...func(*corev1.Pod)) *corev1.Pod {
		return moedtest.Pod("m-r1-1", "r1", append([]func(*corev1.Pod){inGroup("m-r1", "1", "0")}, change...)...)
	}
	worker := moedtest.Pod("m-r1-1-1", "r1", inGroup("m-r1", "1", "1"), ended(1, "no such flag"))
	const once = `{"m-r1-1":{"leader":"a","times":1,"since":"2026-03-01T12:00:00Z","end":"before"}}`
	first := remade{Leader: "a", Times: 1, Since: moedtest.Start, End: "before"}
	now := moedtest.Start.Add(time.Minute)
	for name, test := range map[string]struct {
		told    string
		leaders []*corev1.Pod
		want    map[string]remade
	}{
		"nothing":                     {"", nil, nil},
		"not ready yet":               {"", []*corev1.Pod{leader(moedtest.Unready)}, nil},
		"goes, and never was ready":   {"", []*corev1.Pod{leader(moedtest.Unready, going("a"))}, map[string]remade{"m-r1-1": {"a", 1, moedtest.Start, "pod m-r1-1-1, container engine (exit code 1: no such flag)"}}},
		"goes, and was ready":         {"", []*corev1.Pod{leader(going("a"))}, map[string]remade{"m-r1-1": {"a", 1, now, "pod m-r1-1-1, container engine (exit code 1: no such flag)"}}},
		"is counted once":             {once, []*corev1.Pod{leader(moedtest.Unready, going("a"))}, map[string]remade{"m-r1-1": first}},
		"goes again":                  {once, []*corev1.Pod{leader(moedtest.Unready, going("b"))}, map[string]remade{"m-r1-1": {"b", 2, moedtest.Start, "pod m-r1-1-1, container engine (exit code 1: no such flag)"}}},
		"between two leaders":         {once, nil, map[string]remade{"m-r1-1": first}},
		"the next is not ready yet":   {once, []*corev1.Pod{leader(moedtest.Unready)}, map[string]remade{"m-r1-1": first}},
		"the next is ready":           {once, []*corev1.Pod{leader()}, nil},
		"one of another workload":     {"", []*corev1.Pod{leader(inGroup("m-r2", "1", "0"), moedtest.Unready, going("a"))}, nil},
		"one that is not wanted":      {"", []*corev1.Pod{moedtest.Pod("m-r1-2", "r1", inGroup("m-r1", "2", "0"), moedtest.Unready, going("a"))}, nil},
		"what cannot be read":         {"[", []*corev1.Pod{leader(moedtest.Unready)}, nil},
		"one that was scaled away":    {strings.ReplaceAll(once, "m-r1-1", "m-r1-2"), nil, nil},
		"a name that is no replica's": {strings.ReplaceAll(once, "m-r1-1", "else"), nil, nil},
	} {
		got := countRemade(groupSet(test.told), test.leaders, []*corev1.Pod{worker}, now)
		if len(got) == 0 {
			got = nil
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// It is written once, and removed when the replica is ready.
func TestRecordRemade(t *testing.T) {
	w := groupSet("")
	c := fake.NewClientBuilder().WithScheme(groupScheme(t)).WithObjects(w.object).Build()
	if err := c.Get(context.Background(), client.ObjectKeyFromObject(w.object), w.object); err != nil {
		t.Fatal(err)
	}
	r := &Reconciler{Client: c}
	leader := moedtest.Pod("m-r1-0", "r1", inGroup("m-r1", "0", "0"), moedtest.Unready, going("a"))
	versions := map[string]bool{}
	record := func(pods ...*corev1.Pod) string {
		t.Helper()
		if err := r.recordRemade(context.Background(), children{revisions: []*workload{w}, enginePods: pods}, moedtest.Start); err != nil {
			t.Fatal(err)
		}
		versions[w.ResourceVersion] = true
		return w.Annotations[semmoev1.AnnotationRemade]
	}
	if told := record(); told != "" {
		t.Errorf("told %q of no pod", told)
	}
	for range 2 {
		if told := record(leader); !strings.Contains(told, `"m-r1-0":{"leader":"a","times":1`) {
			t.Errorf("told %q", told)
		}
	}
	if told := record(moedtest.Pod("m-r1-0", "r1", inGroup("m-r1", "0", "0"))); told != "" {
		t.Errorf("told %q of a replica that is ready", told)
	}
	if len(versions) != 3 {
		t.Errorf("%d versions, want 3: it is written and removed once", len(versions))
	}
}

// A canary whose replica is made anew again and again is taken back as one whose container is restarted; and it is told why.
func TestRemadeCanaryIsBroken(t *testing.T) {
	const often = `{"m-r1-0":{"leader":"c","times":3,"since":"2026-03-01T12:00:00Z","end":"pod m-r1-0, container engine (exit code 1)"}}`
	fresh := replicaOf(moedtest.Pod("m-r1-0", "r1", inGroup("m-r1", "0", "0"), moedtest.Unready, func(p *corev1.Pod) {
		p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(moedtest.Start.Add(6 * time.Minute))
	}))
	w := groupSet(often)
	trial := rollout.Trial{Now: moedtest.Start.Add(6 * time.Minute), Canary: 1, Replicas: []rollout.Replica{fresh}}
	if decision := rollout.Judge(trial); decision.Step != rollout.StepCanary {
		t.Errorf("by its pods alone: %+v", decision)
	}
	trial.Replicas[0] = withRemade(fresh, remadeOf(w))
	if decision := rollout.Judge(trial); decision.Step != rollout.StepRollBack || decision.Reason != "CanaryCrashing" {
		t.Errorf("made anew three times: %+v", decision)
	}
	problem := remadeProblem([]*workload{groupSet(""), w})
	if problem == nil || problem.Reason != "ContainerCrashing" || !strings.Contains(problem.Message, "pod m-r1-0 is made anew again and again (pod m-r1-0, container engine (exit code 1))") {
		t.Errorf("problem %+v", problem)
	}
	if problem := remadeProblem([]*workload{groupSet(strings.Replace(often, `"times":3`, `"times":1`, 1))}); problem != nil {
		t.Errorf("one that was made anew once has problem %+v", problem)
	}
}
