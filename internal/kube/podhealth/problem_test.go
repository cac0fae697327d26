// SPDX-License-Identifier: Apache-2.0

package podhealth

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// start is the start time of the tests.
var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// pod returns a running, ready engine pod, modified by change.
func pod(change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "p", UID: "p", CreationTimestamp: metav1.NewTime(start),
			Labels: map[string]string{semmoev1.LabelComponent: semmoev1.ComponentEngine},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	change(p)
	return p
}

func unready(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func waiting(reason, message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		unready(p)
		p.Status.Phase = corev1.PodPending
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "engine", Image: "engine:1",
			State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
		}}
	}
}

func TestFindProblem(t *testing.T) {
	crashed := func(p *corev1.Pod) {
		waiting("CrashLoopBackOff", "back-off")(p)
		p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 1, Message: "trace\nout of memory\n"}
	}
	unschedulable := func(p *corev1.Pod) {
		unready(p)
		p.Status.Phase = corev1.PodPending
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/1 nodes: Insufficient nvidia.com/gpu"})
	}
	gatedPod := func(p *corev1.Pod) {
		unschedulable(p)
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
		p.Status.Conditions[1].Reason, p.Status.Conditions[1].Message = corev1.PodReasonSchedulingGated, "Scheduling is blocked due to non-empty scheduling gates"
	}
	onNode := func(p *corev1.Pod) {
		waiting("ContainerCreating", "")(p)
		p.Spec.NodeName = "n"
	}
	// The node controller removes only the pod's readiness; a kubelet removes that of the containers first.
	lost := func(p *corev1.Pod) {
		unready(p)
		p.Spec.NodeName = "n"
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.ContainersReady, Status: corev1.ConditionTrue})
	}
	// A container with a failing readiness probe for over a minute after the start.
	failing := func(p *corev1.Pod) {
		unready(p)
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{
			Type: corev1.ContainersReady, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(start.Add(time.Minute)),
		})
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "engine", Started: new(true), State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(start)}},
		}}
	}
	restarted := func(p *corev1.Pod) {
		failing(p)
		p.Status.ContainerStatuses[0].State.Running.StartedAt = metav1.NewTime(start.Add(time.Minute + unreadyPatience))
	}
	cases := map[string]struct {
		change  func(*corev1.Pod)
		age     time.Duration
		mounts  map[types.UID]string
		reason  string
		message string
		again   time.Duration
	}{
		"healthy":      {change: func(*corev1.Pod) {}},
		"image":        {change: waiting("ImagePullBackOff", "x"), reason: "ImagePullFailed", message: `image "engine:1" cannot be pulled: check spec.engine.image`},
		"image, cause": {change: waiting("ErrImagePull", `failed to resolve reference "engine:1": engine:1: not found`), reason: "ImagePullFailed", message: `image "engine:1" cannot be pulled (the registry has no such image): check spec.engine.image`},
		"image, its name": {
			change: waiting("InvalidImageName", `couldn't parse image name "engine:1"`), reason: "ImagePullFailed",
			message: `cannot be pulled (InvalidImageName: couldn't parse image name "engine:1"): check spec.engine.image`,
		},
		"configuration": {change: waiting("CreateContainerConfigError", "secret not found"), reason: "ContainerNotCreated", message: "secret not found"},
		"configuration, ID": {
			change: waiting("CreateContainerError", "task "+strings.Repeat("0f", 32)+" of sha256:"+strings.Repeat("1a", 32)+" failed"), reason: "ContainerNotCreated",
			message: "task ID of sha256:" + strings.Repeat("1a", 32) + " failed",
		},
		"crash":                     {change: crashed, reason: "ContainerCrashing", message: "(exit code 1: out of memory)"},
		"no node, just now":         {change: unschedulable, again: patience},
		"no node":                   {change: unschedulable, age: patience, reason: "Unschedulable", message: "Insufficient nvidia.com/gpu"},
		"a scheduling gate":         {change: gatedPod, age: time.Hour},
		"a removed scheduling gate": {change: func(p *corev1.Pod) { gatedPod(p); p.Spec.SchedulingGates = nil }, age: time.Hour},
		"volume, just now":          {change: onNode, again: patience},
		"volume":                    {change: onNode, age: patience, mounts: map[types.UID]string{"p": "hostPath type check failed"}, reason: "VolumeNotMounted", message: "hostPath type check failed"},
		"data set": {
			change: onNode, age: patience, mounts: map[types.UID]string{"p": `MountVolume.SetUp failed for volume "dataset" : configmap "requests" not found`},
			reason: "VolumeNotMounted", message: `configmap "requests" not found: create the ConfigMap`,
		},
		"data set, in a list of the kubelet": {
			change: onNode, age: patience, mounts: map[types.UID]string{"p": "unmounted volumes=[dataset], unattached volumes=[]: timed out"},
			reason: "VolumeNotMounted", message: "create the ConfigMap",
		},
		"plan": {
			change: onNode, age: patience, mounts: map[types.UID]string{"p": `MountVolume.SetUp failed for volume "semmoe-plan" : configmap "m-1-2" not found`},
			reason: "VolumeNotMounted", message: `configmap "m-1-2" not found: the operator recreates the ConfigMap of a plan, unless the PlacementPlan with that name prefix reports a problem`,
		},
		"inspection": {
			change: func(p *corev1.Pod) { unschedulable(p); p.Labels[semmoev1.LabelComponent] = semmoev1.ComponentInspect },
			age:    patience, reason: "Unschedulable", message: "pod of the inspection has no node",
		},
		"profiling Job": {
			change: func(p *corev1.Pod) { unschedulable(p); p.Labels[semmoev1.LabelComponent] = semmoev1.ComponentProfile },
			age:    patience, reason: "Unschedulable", message: "pod of the profiling Job has no node",
		},
		"containers do not start": {change: onNode, age: patience, reason: "ContainerNotCreated", message: "kubectl describe pod"},
		"node lost":               {change: lost, reason: "NodeLost", message: "pod p is on node n, which does not respond"},
		"node lost, and being deleted": {
			change: func(p *corev1.Pod) { lost(p); p.DeletionTimestamp = &metav1.Time{Time: start} },
			reason: "NodeLost", message: "or force-delete the pod",
		},
		"not ready": {change: func(p *corev1.Pod) { lost(p); p.Status.Conditions[1].Status = corev1.ConditionFalse }},
		"fails its readiness probe": {change: failing, age: time.Minute + unreadyPatience, reason: "NotReady",
			message: "pod p, container engine runs and fails its readiness probe: see `kubectl logs -n ns p -c engine`"},
		"fails its readiness probe, just now":    {change: failing, age: time.Minute + unreadyPatience/2, again: unreadyPatience / 2},
		"fails its readiness probe, slow clock":  {change: failing, age: -6 * time.Hour, again: unreadyPatience},
		"fails since a restart, just now":        {change: restarted, age: time.Minute + unreadyPatience, again: unreadyPatience},
		"loads, and its startup probe may do so": {change: func(p *corev1.Pod) { failing(p); p.Status.ContainerStatuses[0].Started = new(false) }, age: time.Hour},
		"another container fails": {change: func(p *corev1.Pod) {
			failing(p)
			p.Status.ContainerStatuses = append([]corev1.ContainerStatus{{Name: "ready", Ready: true, Started: new(true)}}, p.Status.ContainerStatuses...)
		}, age: time.Hour, reason: "NotReady", message: "container engine runs"},
		"router fails": {change: func(p *corev1.Pod) {
			failing(p)
			p.Labels[semmoev1.LabelComponent], p.Labels[semmoev1.LabelDeployment] = semmoev1.ComponentRouter, "m"
		}, age: time.Hour, reason: "NotReady", message: "pod of the router, container engine runs and fails its readiness probe: see `kubectl logs -n ns -l semmoe.io/deployment=m,semmoe.io/component=router -c engine`"},
		"router without a node": {
			change: func(p *corev1.Pod) { unschedulable(p); p.Labels[semmoev1.LabelComponent] = semmoev1.ComponentRouter },
			age:    patience, reason: "Unschedulable", message: "pod of the router has no node: 0/1 nodes: Insufficient nvidia.com/gpu. Add a node for it, or set tolerations, nodeSelector, affinity or resources in spec.routing.template",
		},
		"no scheduler": {
			change: func(p *corev1.Pod) { unready(p); p.Status.Phase, p.Spec.SchedulerName = corev1.PodPending, "gang" },
			age:    patience, reason: "Unschedulable", message: `pod p has no node: scheduler "gang" has not handled it`,
		},
		"no kubelet": {
			change: func(p *corev1.Pod) { unready(p); p.Status.Phase, p.Spec.NodeName = corev1.PodPending, "gone" },
			age:    patience, reason: "ContainerNotCreated", message: "node gone has not started it",
		},
		"no kubelet, just now": {change: func(p *corev1.Pod) { unready(p); p.Status.Phase, p.Spec.NodeName = corev1.PodPending, "gone" }, again: patience},
		"a readiness gate": {change: func(p *corev1.Pod) {
			lost(p)
			p.Spec.ReadinessGates, p.Status.Conditions[1].LastTransitionTime = []corev1.PodReadinessGate{{ConditionType: "x/y"}}, metav1.NewTime(start)
		}, age: unreadyPatience, reason: "NotReady", message: "its readiness gate x/y is not True"},
		"a readiness gate, just now": {change: func(p *corev1.Pod) {
			lost(p)
			p.Spec.ReadinessGates, p.Status.Conditions[1].LastTransitionTime = []corev1.PodReadinessGate{{ConditionType: "x/y"}}, metav1.NewTime(start)
		}, age: unreadyPatience / 2, again: unreadyPatience / 2},
		"a volume of the template": {
			change: func(p *corev1.Pod) { onNode(p); p.Spec.Volumes = []corev1.Volume{{Name: "model"}, {Name: "tls"}} }, age: patience,
			mounts: map[types.UID]string{"p": `MountVolume.SetUp failed for volume "tls" : secret "nope" not found`},
			reason: "VolumeNotMounted", message: `check volume "tls" in the pod template`,
		},
		"a Secret of the router": {
			change: func(p *corev1.Pod) {
				onNode(p)
				p.Labels[semmoev1.LabelComponent], p.Spec.Volumes = semmoev1.ComponentRouter, []corev1.Volume{{Name: "api-keys"}}
			}, age: patience,
			mounts: map[types.UID]string{"p": `MountVolume.SetUp failed for volume "api-keys" : secret "nope" not found`},
			reason: "VolumeNotMounted", message: "check spec.routing.auth.secretName",
		},
		"being deleted": {change: func(p *corev1.Pod) { crashed(p); p.DeletionTimestamp = &metav1.Time{Time: start} }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got, again := Find([]*corev1.Pod{pod(tc.change)}, tc.mounts, start.Add(tc.age))
			if tc.reason == "" {
				if got != nil {
					t.Fatalf("found %+v", got)
				}
			} else if got == nil || got.Reason != tc.reason || !strings.Contains(got.Message, tc.message) {
				t.Fatalf("found %+v, want %s with %q", got, tc.reason, tc.message)
			}
			if again != tc.again {
				t.Errorf("looks again after %v, want %v", again, tc.again)
			}
		})
	}
}

// The advice for rejected pods fits the cause.
func TestRejected(t *testing.T) {
	for message, want := range map[string]string{
		"exceeded quota: none": "raise the quota, or set resources in spec.template", "maximum memory usage per Pod is 1Gi": "change the LimitRange",
		`violates PodSecurity "restricted"`: "set the security contexts in spec.template", `no PriorityClass with name nope`: "create what is missing, or change spec.template",
	} {
		if got := PodsRejected(message).Message; !strings.Contains(got, "("+want) || !strings.HasSuffix(got, ": "+message) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	first, second := PodsRejected(`Error creating: pods "j-859jl" is forbidden: exceeded quota: none`), PodsRejected(`Error creating: pods "j-mcfvz" is forbidden: exceeded quota: none`)
	if *first != *second || !strings.Contains(first.Message, "the pod is forbidden: exceeded quota") {
		t.Errorf("attempts with different names are reported as %q and %q", first.Message, second.Message)
	}
	if got := RouterPodsRejected("exceeded quota: none").Message; !strings.Contains(got, "set resources in spec.routing.template") {
		t.Error(got)
	}
}

// TestPullCauseIsConstant verifies that the message is the same for all attempts and back-offs.
func TestPullCauseIsConstant(t *testing.T) {
	for name, test := range map[string]struct {
		messages []string
		cause    string
	}{
		"access": {[]string{
			`failed to authorize: failed to fetch anonymous token: 401 Unauthorized (id 1)`,
			`failed to authorize: failed to fetch anonymous token: 401 Unauthorized (id 2)`,
		}, " (the registry denies access, or has no such repository)"},
		"network": {[]string{
			`dial tcp: lookup r.io on 10.0.0.1:53: read udp 10.0.0.2:123->10.0.0.1:53: i/o timeout`,
			`dial tcp: lookup r.io on 10.0.0.1:53: read udp 10.0.0.2:456->10.0.0.1:53: i/o timeout`,
		}, " (the registry cannot be reached)"},
		"the image's name is no sign": {[]string{`failed to pull "denied:1"`}, ""},
	} {
		for _, message := range test.messages {
			for _, waiting := range []corev1.ContainerStateWaiting{
				{Reason: "ErrImagePull", Message: message},
				{Reason: "ImagePullBackOff", Message: `Back-off pulling image "denied:1": ErrImagePull: ` + message},
			} {
				if got := pullCause(&waiting, "denied:1"); got != test.cause {
					t.Errorf("%s: %q, want %q, of %+v", name, got, test.cause, waiting)
				}
			}
		}
	}
}

func TestImageField(t *testing.T) {
	for _, test := range []struct{ component, container, want string }{
		{semmoev1.ComponentEngine, "engine", "spec.engine.image"},
		{semmoev1.ComponentEngine, "prove-lossless", "the operator's --image"},
		{semmoev1.ComponentEngine, "metrics", "the container's image in spec.template"},
		{semmoev1.ComponentProfile, "profile", "the operator's --image"},
		{semmoev1.ComponentInspect, "inspect", "the operator's --image"},
		{semmoev1.ComponentRouter, "router", "the operator's --image"},
	} {
		p := pod(func(p *corev1.Pod) { p.Labels[semmoev1.LabelComponent] = test.component })
		if got := imageField(p, test.container); got != test.want {
			t.Errorf("container %s of component %s: %q, want %q", test.container, test.component, got, test.want)
		}
	}
}

func TestFirstTermination(t *testing.T) {
	ended := func(name string, code int32, after time.Duration) *corev1.Pod {
		return pod(func(p *corev1.Pod) {
			p.Name = name
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "engine", State: corev1.ContainerState{
				Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: "x\nthe last line", FinishedAt: metav1.NewTime(start.Add(after))},
			}}}
		})
	}
	for name, test := range map[string]struct {
		pods []*corev1.Pod
		want string
	}{
		"none has":         {[]*corev1.Pod{pod(func(*corev1.Pod) {})}, ""},
		"one that is done": {[]*corev1.Pod{ended("a", 0, 0)}, ""},
		"the first":        {[]*corev1.Pod{ended("a", 1, time.Second), ended("b", 2, 0), ended("c", 0, -time.Second)}, "pod b, container engine (exit code 2: the last line)"},
	} {
		if got := FirstFailure(test.pods); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
