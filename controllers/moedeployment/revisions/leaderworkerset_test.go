// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// A replica of two pods is a group: both pods run the engine with half of the ranks each. Their flags differ only in
// the values that LeaderWorkerSet sets. Only the leader is visible to routers and verifies its outputs.
func TestRenderGroups(t *testing.T) {
	plan := LayoutOf(moedtest.PlanOf("m-1", "ab", nil), semmoev1.RealizationEngineMap)
	moed := moedtest.Deployment(moedtest.TwoPods, func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{NodeSelector: map[string]string{"gpu": "h200"}}}
	})
	workload, err := Render(moed, "r1", moedtest.Report(), plan, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	set, ok := workload.Object.(*leaderworkersetv1.LeaderWorkerSet)
	if !ok {
		t.Fatalf("the workload is a %T", workload.Object)
	}
	group := set.Spec.LeaderWorkerTemplate
	if set.Name != "m-r1" || *set.Spec.Replicas != 0 || *group.Size != 2 || group.RestartPolicy != leaderworkersetv1.RecreateGroupOnPodRestart || !metav1.IsControlledBy(set, moed) {
		t.Errorf("the set is %+v", set)
	}
	leader, worker := workload.Template(), &group.WorkerTemplate
	for of, template := range map[string]*corev1.PodTemplateSpec{"engine": leader, "worker": worker} {
		if template.Labels[semmoev1.LabelComponent] != of || template.Labels[semmoev1.LabelRevision] != "r1" || template.Annotations[semmoev1.AnnotationPlanDigest] != plan.Digest {
			t.Errorf("%s: labels %v, annotations %v", of, template.Labels, template.Annotations)
		}
		container := template.Spec.Containers[0]
		if devices := container.Resources.Limits["nvidia.com/gpu"]; devices.Value() != 2 || template.Spec.NodeSelector["gpu"] != "h200" {
			t.Errorf("%s: requests %v devices on %v", of, devices.Value(), template.Spec.NodeSelector)
		}
		if container.ReadinessProbe == nil || container.StartupProbe == nil {
			t.Errorf("%s: has no health probe", of)
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

// Workers of an engine whose workers serve no HTTP have no health probe. They connect to the leader by name; the leader
// listens on its own address.
func TestRenderSilentWorkers(t *testing.T) {
	workload, err := Render(moedtest.Deployment(moedtest.TwoPods, moedtest.EngineOf(semmoev1.EngineVLLM)), "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	worker := workload.Object.(*leaderworkersetv1.LeaderWorkerSet).Spec.LeaderWorkerTemplate.WorkerTemplate.Spec.Containers[0]
	if leader := workload.Template().Spec.Containers[0]; leader.ReadinessProbe == nil || worker.ReadinessProbe != nil || worker.StartupProbe != nil {
		t.Errorf("probes of the leader %+v, of the worker %+v", leader.ReadinessProbe, worker.ReadinessProbe)
	}
	for address, args := range map[string][]string{"$(POD_IP)": workload.Template().Spec.Containers[0].Args, "$(LWS_LEADER_ADDRESS)": worker.Args} {
		if text := strings.Join(args, " "); !strings.Contains(text, "--master-addr "+address+" ") {
			t.Errorf("args %s, want address %s", text, address)
		}
	}
	if !slices.Contains(worker.Args, "--headless") || slices.Contains(workload.Template().Spec.Containers[0].Args, "--headless") {
		t.Errorf("the worker's args are %v", worker.Args)
	}
}

// TestQueueOfGroups checks that the labels of a queue are on the LeaderWorkerSet, so that Kueue admits all pods of a
// replica together, and on the pods of a StatefulSet, because Kueue refuses to scale a queued StatefulSet.
func TestQueueOfGroups(t *testing.T) {
	queue := map[string]string{semmoev1.LabelQueue: "gpus", semmoev1.LabelQueuePriority: "low"}
	queued := func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: maps.Clone(queue)}}
	}
	for name, change := range map[string]func(*semmoev1.MoEDeployment){"one pod": func(*semmoev1.MoEDeployment) {}, "two pods": moedtest.TwoPods} {
		workload, err := Render(moedtest.Deployment(change, queued), "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		onWorkload, onPods := 0, 0
		templates := []*corev1.PodTemplateSpec{workload.Template()}
		set, groups := workload.Object.(*leaderworkersetv1.LeaderWorkerSet)
		if groups {
			templates = append(templates, &set.Spec.LeaderWorkerTemplate.WorkerTemplate)
		}
		for label, value := range queue {
			if workload.Labels[label] == value {
				onWorkload++
			}
			for _, template := range templates {
				if template.Labels[label] == value {
					onPods++
				}
			}
		}
		if want := map[bool][2]int{true: {2, 0}, false: {0, 2}}[groups]; [2]int{onWorkload, onPods} != want {
			t.Errorf("%s: %d labels on the workload, %d on pods, want %v", name, onWorkload, onPods, want)
		}
	}
}

// An explicit podsPerReplica of 1 changes no revision, selector or profile.
func TestOnePodPerReplica(t *testing.T) {
	said := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.PodsPerReplica = ptr.To[int32](1) })
	for what, of := range map[string]func(*semmoev1.MoEDeployment) any{
		"revision": func(m *semmoev1.MoEDeployment) any { return Of(m, moedtest.Report(), nil) },
		"workload": func(m *semmoev1.MoEDeployment) any {
			workload, err := Render(m, "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
			if err != nil {
				t.Fatal(err)
			}
			return workload.Object
		},
	} {
		if diff := cmp.Diff(of(moedtest.Deployment()), of(said)); diff != "" {
			t.Errorf("%s (-unsaid +said):\n%s", what, diff)
		}
	}
	if Of(moedtest.Deployment(), moedtest.Report(), nil) == Of(moedtest.Deployment(moedtest.TwoPods), moedtest.Report(), nil) {
		t.Error("two pods per replica are no other revision")
	}
}
