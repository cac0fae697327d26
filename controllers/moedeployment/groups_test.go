package moedeployment

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/source"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/inspection"
)

// A replica of two pods is a group: both run the engine with half of the ranks each, by flags that differ in nothing but what
// LeaderWorkerSet sets, and the first alone is shown to routers and asked to prove its answers.
func TestRenderGroups(t *testing.T) {
	plan := layoutOf(moedtest.PlanOf("m-1", "ab", nil), semmoev1.RealizationEngineMap)
	moed := moedtest.Deployment(moedtest.TwoPods, func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{NodeSelector: map[string]string{"gpu": "h200"}}}
	})
	workload, err := render(moed, "r1", moedtest.Report(), plan, own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	set, ok := workload.object.(*leaderworkersetv1.LeaderWorkerSet)
	if !ok {
		t.Fatalf("the workload is a %T", workload.object)
	}
	group := set.Spec.LeaderWorkerTemplate
	if set.Name != "m-r1" || *set.Spec.Replicas != 0 || *group.Size != 2 || group.RestartPolicy != leaderworkersetv1.RecreateGroupOnPodRestart || !metav1.IsControlledBy(set, moed) {
		t.Errorf("the set is %+v", set)
	}
	leader, worker := workload.template(), &group.WorkerTemplate
	for of, template := range map[string]*corev1.PodTemplateSpec{"engine": leader, "worker": worker} {
		if template.Labels[semmoev1.LabelComponent] != of || template.Labels[semmoev1.LabelRevision] != "r1" || template.Annotations[semmoev1.AnnotationPlanDigest] != plan.Digest {
			t.Errorf("%s: labels %v, annotations %v", of, template.Labels, template.Annotations)
		}
		container := template.Spec.Containers[0]
		if devices := container.Resources.Limits["nvidia.com/gpu"]; devices.Value() != 2 || template.Spec.NodeSelector["gpu"] != "h200" {
			t.Errorf("%s: asks for %v devices on %v", of, devices.Value(), template.Spec.NodeSelector)
		}
		if container.ReadinessProbe == nil || container.StartupProbe == nil {
			t.Errorf("%s: is not asked for its health", of)
		}
		if text := strings.Join(container.Args, " "); !strings.Contains(text, "--nnodes 2 --node-rank $(LWS_WORKER_INDEX) --dist-init-addr $(LWS_LEADER_ADDRESS):20000") || !strings.Contains(text, "--tp-size 4") {
			t.Errorf("%s: args %s", of, text)
		}
	}
	if diff := cmp.Diff(leader.Spec.Containers, worker.Spec.Containers); diff != "" {
		t.Errorf("the engines differ (-leader +worker):\n%s", diff)
	}
	if leader.Annotations[semmoev1.AnnotationPodsPerReplica] != "2" || leader.Annotations[semmoev1.AnnotationRanks] != "4" || leader.Annotations[semmoev1.AnnotationPort] != "30000" {
		t.Errorf("the leader's annotations are %v", leader.Annotations)
	}
	for _, annotation := range []string{semmoev1.AnnotationPort, semmoev1.AnnotationRanks, semmoev1.AnnotationPodsPerReplica} {
		if worker.Annotations[annotation] != "" {
			t.Errorf("a worker is shown to routers by %s", annotation)
		}
	}
	if got, want := initContainers(*worker), []string{"verify-plan"}; !slices.Equal(got, want) {
		t.Errorf("a worker's init containers are %v, want %v", got, want)
	}
	if got, want := initContainers(*leader), []string{"verify-plan", "prove-lossless"}; !slices.Equal(got, want) {
		t.Errorf("the leader's init containers are %v, want %v", got, want)
	}
}

// A worker of an engine whose workers answer nothing is not asked for its health.
func TestRenderSilentWorkers(t *testing.T) {
	workload, err := render(moedtest.Deployment(moedtest.TwoPods, moedtest.EngineOf(semmoev1.EngineVLLM)), "r1", moedtest.Report(), nil, own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	worker := workload.object.(*leaderworkersetv1.LeaderWorkerSet).Spec.LeaderWorkerTemplate.WorkerTemplate.Spec.Containers[0]
	if leader := workload.template().Spec.Containers[0]; leader.ReadinessProbe == nil || worker.ReadinessProbe != nil || worker.StartupProbe != nil {
		t.Errorf("probes of the leader %+v, of the worker %+v", leader.ReadinessProbe, worker.ReadinessProbe)
	}
	if !slices.Contains(worker.Args, "--headless") || slices.Contains(workload.template().Spec.Containers[0].Args, "--headless") {
		t.Errorf("the worker's args are %v", worker.Args)
	}
}

// One pod per replica is what there was: saying so changes no revision, no selector and no profile.
func TestOnePodPerReplica(t *testing.T) {
	said := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.PodsPerReplica = ptr.To[int32](1) })
	for what, of := range map[string]func(*semmoev1.MoEDeployment) any{
		"revision": func(m *semmoev1.MoEDeployment) any { return revisionOf(m, moedtest.Report(), nil) },
		"workload": func(m *semmoev1.MoEDeployment) any {
			workload, err := render(m, "r1", moedtest.Report(), nil, own{Image: "semmoe:1"})
			if err != nil {
				t.Fatal(err)
			}
			return workload.object
		},
	} {
		if diff := cmp.Diff(of(moedtest.Deployment()), of(said)); diff != "" {
			t.Errorf("%s (-unsaid +said):\n%s", what, diff)
		}
	}
	if revisionOf(moedtest.Deployment(), moedtest.Report(), nil) == revisionOf(moedtest.Deployment(moedtest.TwoPods), moedtest.Report(), nil) {
		t.Error("two pods per replica are no other revision")
	}
	profiled := func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Target: semmoev1.ProfilingTargetServing, Dataset: &semmoev1.DatasetSpec{}}
	}
	if diff := cmp.Diff(profileFor(moedtest.Deployment(profiled), "m"), profileFor(moedtest.Deployment(profiled, moedtest.TwoPods), "m")); diff != "" {
		t.Errorf("two pods per replica are another profile (-one +two):\n%s", diff)
	}
}

// inGroup makes a pod one of a group of two.
func inGroup(set, group, index string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Labels[leaderworkersetv1.SetNameLabelKey], p.Labels[leaderworkersetv1.GroupIndexLabelKey] = set, group
		p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(moedtest.Start)
		if index == "0" {
			p.Annotations = map[string]string{semmoev1.AnnotationPodsPerReplica: "2"}
		} else {
			p.Labels[semmoev1.LabelComponent] = semmoev1.ComponentWorker
		}
	}
}

func changedAt(after time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(moedtest.Start.Add(after))
	}
}

func TestAsReplica(t *testing.T) {
	now := moedtest.Start.Add(time.Hour)
	leader := inGroup("m-r1", "0", "0")
	worker := func(change ...func(*corev1.Pod)) *corev1.Pod {
		return moedtest.Pod("m-r1-0-1", "r1", append([]func(*corev1.Pod){inGroup("m-r1", "0", "1")}, change...)...)
	}
	for name, test := range map[string]struct {
		leader *corev1.Pod
		others []*corev1.Pod
		ready  bool
		since  time.Duration
	}{
		"a replica of one pod":       {moedtest.Pod("m-r1-0", "r1", changedAt(time.Second)), nil, true, time.Second},
		"both are ready":             {moedtest.Pod("m-r1-0", "r1", leader, changedAt(time.Minute)), []*corev1.Pod{worker()}, true, time.Minute},
		"the worker was later":       {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(changedAt(time.Minute))}, true, time.Minute},
		"the worker is not ready":    {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(moedtest.Unready, changedAt(time.Minute))}, false, time.Minute},
		"the leader is not ready":    {moedtest.Pod("m-r1-0", "r1", leader, moedtest.Unready, changedAt(time.Second)), []*corev1.Pod{worker(changedAt(time.Minute))}, false, time.Second},
		"the worker is missing":      {moedtest.Pod("m-r1-0", "r1", leader), nil, false, time.Hour},
		"the worker is being taken":  {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: moedtest.Start} })}, false, time.Hour},
		"a worker of another group":  {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(inGroup("m-r1", "1", "1"))}, false, time.Hour},
		"a worker of another object": {moedtest.Pod("m-r1-0", "r1", leader), []*corev1.Pod{worker(inGroup("m-r2", "0", "1"))}, false, time.Hour},
	} {
		before := test.leader.DeepCopy()
		replica := replicaOf(asReplica(test.leader, test.others, now))
		if replica.Ready != test.ready || !replica.Since.Equal(moedtest.Start.Add(test.since)) {
			t.Errorf("%s: ready %v since %v, want %v since %v", name, replica.Ready, replica.Since.Sub(moedtest.Start), test.ready, test.since)
		}
		if diff := cmp.Diff(before, test.leader); diff != "" {
			t.Errorf("%s: the cache's pod was changed:\n%s", name, diff)
		}
	}
}

// Where pods of a group are missing, events of the StatefulSet that should make them say why.
func TestWantingGroups(t *testing.T) {
	w := groupSet("")
	first, second := moedtest.Pod("m-r1-0", "r1", inGroup("m-r1", "0", "0")), moedtest.Pod("m-r1-1", "r1", inGroup("m-r1", "1", "0"))
	workers := []*corev1.Pod{moedtest.Pod("m-r1-0-1", "r1", inGroup("m-r1", "0", "1")), moedtest.Pod("m-r1-1-1", "r1", inGroup("m-r1", "1", "1"))}
	for name, test := range map[string]struct {
		leaders, workers []*corev1.Pod
		want             []string
	}{
		"all are there":           {[]*corev1.Pod{first, second}, workers, nil},
		"a leader is missing":     {[]*corev1.Pod{first}, workers, []string{"m-r1"}},
		"a worker is missing":     {[]*corev1.Pod{first, second}, workers[:1], []string{"m-r1-1"}},
		"none is there":           {nil, nil, []string{"m-r1"}},
		"those of another object": {[]*corev1.Pod{first, second, moedtest.Pod("m-r2-0", "r2", inGroup("m-r2", "0", "0"))}, workers, nil},
	} {
		if diff := cmp.Diff(test.want, wantingGroups(w, test.leaders, test.workers)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if names := wantingGroups(workloadUnder(t, nil, 2), nil, nil); names != nil {
		t.Errorf("a StatefulSet has groups %v", names)
	}
}

// A replica whose name is still had by pods of an earlier one is not asked for before these are gone, nor are those after it.
func TestVacant(t *testing.T) {
	worker := func(set, group string) *corev1.Pod {
		return moedtest.Pod(set+"-"+group+"-1", "r1", inGroup(set, group, "1"))
	}
	set := func(replicas int32) *workload {
		w := groupSet("")
		*w.replicas() = replicas
		return w
	}
	for name, test := range map[string]struct {
		of      *workload
		wanted  int32
		workers []*corev1.Pod
		want    int32
	}{
		"nothing is left":           {set(1), 3, []*corev1.Pod{worker("m-r1", "0")}, 3},
		"the next one":              {set(1), 3, []*corev1.Pod{worker("m-r1", "0"), worker("m-r1", "1")}, 1},
		"one that comes later":      {set(1), 4, []*corev1.Pod{worker("m-r1", "0"), worker("m-r1", "3"), worker("m-r1", "2")}, 2},
		"one that nobody wants":     {set(1), 2, []*corev1.Pod{worker("m-r1", "2")}, 2},
		"of another object":         {set(1), 2, []*corev1.Pod{worker("m-r2", "1")}, 2},
		"of a set of the same name": {set(0), 2, []*corev1.Pod{worker("m-r1", "0")}, 0},
		"down":                      {set(2), 1, []*corev1.Pod{worker("m-r1", "0"), worker("m-r1", "1"), worker("m-r1", "2")}, 1},
		"a StatefulSet":             {workloadUnder(t, nil, 1), 2, []*corev1.Pod{worker("m-r1", "1")}, 2},
	} {
		if got := vacant(test.of, test.wanted, test.workers); got != test.want {
			t.Errorf("%s: %d of %d replicas, want %d", name, got, test.wanted, test.want)
		}
	}
}

// groupScheme knows what reconcileRevisions reads and writes.
func groupScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), semmoev1.AddToScheme(scheme), leaderworkersetv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	return scheme
}

// Groups are scaled and removed as StatefulSets are; an old one goes only when no leader of it is left, whatever its status says.
func TestGroupsAreScaled(t *testing.T) {
	moed, found := moedtest.Deployment(moedtest.TwoPods), moedtest.Report()
	o := observation{Inspection: inspection.State{Report: &found}, Revision: revisionOf(moed, found, nil)}
	c := fake.NewClientBuilder().WithScheme(groupScheme(t)).Build()
	r := &Reconciler{Client: c, Recorder: events.NewFakeRecorder(16), Image: "semmoe:1"}
	reconcile := func(workloads ...*workload) {
		t.Helper()
		if _, _, err := r.reconcileRevisions(context.Background(), moed, o, workloads, moedtest.Start); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) (*workload, error) {
		set := &leaderworkersetv1.LeaderWorkerSet{}
		err := c.Get(context.Background(), client.ObjectKey{Namespace: "ns", Name: name}, set)
		return leaderWorkerSet(set), err
	}
	reconcile()
	created, err := read("m-" + o.Revision)
	if err != nil || *created.replicas() != 2 {
		t.Fatalf("error %v, %d replicas", err, *created.replicas())
	}
	// The fake client gives no UID; by it a workload is known to exist.
	created.UID = "uid-1"
	moed.Spec.Replicas = ptr.To[int32](3)
	reconcile(created)
	if scaled, err := read(created.Name); err != nil || *scaled.replicas() != 3 {
		t.Errorf("error %v, %d replicas, want 3", err, *scaled.replicas())
	}

	old := created.object.DeepCopyObject().(*leaderworkersetv1.LeaderWorkerSet)
	old.Name, old.UID, old.ResourceVersion, old.Spec.Replicas = "m-old", "uid-2", "", ptr.To[int32](0)
	if err := c.Create(context.Background(), old); err != nil {
		t.Fatal(err)
	}
	left := moedtest.Pod("m-old-0", "old", inGroup("m-old", "0", "0"), func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: moedtest.Start} })
	current, err := read(created.Name)
	if err != nil {
		t.Fatal(err)
	}
	current.UID = "uid-1"
	o.Pods = []*corev1.Pod{left}
	reconcile(current, leaderWorkerSet(old))
	if _, err := read("m-old"); err != nil {
		t.Errorf("it is gone before its last pod is: %v", err)
	}
	o.Pods = nil
	reconcile(current, leaderWorkerSet(old))
	if _, err := read("m-old"); !apierrors.IsNotFound(err) {
		t.Errorf("it is left: %v", err)
	}

	moed.Spec.Replicas = ptr.To[int32](5)
	o.Workers = []*corev1.Pod{moedtest.Pod(current.Name+"-4-1", o.Revision, inGroup(current.Name, "4", "1"))}
	reconcile(current)
	if scaled, err := read(current.Name); err != nil || *scaled.replicas() != 4 {
		t.Errorf("error %v, %d replicas, want 4 while a worker of an earlier fifth one is left", err, *scaled.replicas())
	}
}

// The kind LeaderWorkerSet is looked for once, and now and then while somebody wants it; it is watched from when it is found.
func TestGroupKindComes(t *testing.T) {
	mapper := meta.NewDefaultRESTMapper(nil)
	c := fake.NewClientBuilder().WithScheme(groupScheme(t)).WithRESTMapper(mapper).Build()
	watched := 0
	k := &groupKind{watch: func(source.Source) error { watched++; return nil }}
	find := func(wanted bool, after time.Duration) bool {
		t.Helper()
		known, err := k.find(context.Background(), c, wanted, moedtest.Start.Add(after))
		if err != nil {
			t.Fatal(err)
		}
		return known
	}
	if find(true, 0) {
		t.Error("it is known before it is there")
	}
	mapper.Add(leaderworkersetv1.GroupVersion.WithKind("LeaderWorkerSet"), meta.RESTScopeNamespace)
	if find(true, time.Second) || find(false, time.Hour) {
		t.Error("it is looked for although that was done just now, or nobody wants it")
	}
	mapper.Add(semmoev1.GroupVersion.WithKind("MoEDeployment"), meta.RESTScopeNamespace)
	if !find(true, groupKindPeriod) || !find(false, groupKindPeriod) || watched != 1 {
		t.Errorf("watched %d times", watched)
	}
	failing := &groupKind{watch: func(source.Source) error { return errors.New("no watch") }}
	if known, err := failing.find(context.Background(), c, true, moedtest.Start); known || err == nil {
		t.Errorf("known %v, error %v", known, err)
	}
}
