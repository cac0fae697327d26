// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func TestEnvironment(t *testing.T) {
	client, ns := sandboxed(t)
	_, err := client.CoreV1().ConfigMaps(ns).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "config"}, Data: map[string]string{"key": "from-map"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod := podOf("env", "env", "PLAIN", "EXPANDED", "NAME", "NAMESPACE", "LABEL", "NODE", "ACCOUNT", "LIMIT", "KEY", "ABSENT", "POD_IP", "HOSTNAME", "P_key", "KUBERNETES_SERVICE_HOST")
	c := &pod.Spec.Containers[0]
	field := func(name, path string) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}}
	}
	key := func(name, key string, optional bool) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{
			LocalObjectReference: corev1.LocalObjectReference{Name: "config"}, Key: key, Optional: &optional,
		}}}
	}
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}
	c.Env = append(c.Env, corev1.EnvVar{Name: "PLAIN", Value: "a"}, corev1.EnvVar{Name: "EXPANDED", Value: "$(PLAIN)b $$(PLAIN) $(NONE)"},
		field("NAME", "metadata.name"), field("NAMESPACE", "metadata.namespace"), field("LABEL", "metadata.labels['app']"),
		field("NODE", "spec.nodeName"), field("ACCOUNT", "spec.serviceAccountName"),
		corev1.EnvVar{Name: "LIMIT", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.memory", Divisor: resource.MustParse("1Mi")}}},
		key("KEY", "key", false), key("ABSENT", "other", true))
	c.EnvFrom = []corev1.EnvFromSource{{Prefix: "P_", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}}
	log := runToEnd(t, client, ns, pod, corev1.PodSucceeded)
	for _, want := range []string{
		"PLAIN=a\n", "EXPANDED=ab $(PLAIN) $(NONE)\n", "NAME=env\n", "NAMESPACE=" + ns + "\n", "LABEL=env\n", "NODE=local\n",
		"ACCOUNT=default\n", "LIMIT=64\n", "KEY=from-map\n", "ABSENT=\n", "POD_IP=10.244.", "HOSTNAME=env\n", "P_key=from-map\n", "KUBERNETES_SERVICE_HOST=10.96.0.1\n",
	} {
		if !strings.Contains(log, want) {
			t.Errorf("log has no %q:\n%s", want, log)
		}
	}
}

func TestExitCodeAndTerminationMessage(t *testing.T) {
	client, ns := sandboxed(t)
	fallback := podOf("fallback", "exit", "4", "the last words")
	fallback.Spec.Containers[0].TerminationMessagePolicy = corev1.TerminationMessageFallbackToLogsOnError
	unknown := podOf("unknown")
	unknown.Spec.Containers[0].Command = []string{"/nothing"}
	for name, test := range map[string]struct {
		pod             *corev1.Pod
		phase           corev1.PodPhase
		code            int32
		reason, message string
	}{
		"message":  {podOf("message", "message", "3", "what happened"), corev1.PodFailed, 3, "Error", "what happened"},
		"success":  {podOf("success", "message", "0", "all well"), corev1.PodSucceeded, 0, "Completed", "all well"},
		"fallback": {fallback, corev1.PodFailed, 4, "Error", "the last words\n"},
		"unknown":  {unknown, corev1.PodFailed, 128, "StartError", `exec: "/nothing": stat /nothing: no such file or directory`},
	} {
		create(t, client, ns, test.pod)
		pod := waitPod(t, client, ns, test.pod.Name, inPhase(test.phase))
		got := pod.Status.ContainerStatuses[0].State.Terminated
		if got == nil || got.ExitCode != test.code || got.Reason != test.reason || got.Message != test.message {
			t.Errorf("%s: got %+v, want code %d, reason %s, message %q", name, got, test.code, test.reason, test.message)
		}
	}
}

func TestCrashLoopBackOff(t *testing.T) {
	client, ns := sandboxed(t)
	pod := podOf("crash", "exit", "1")
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	create(t, client, ns, pod)
	waitPod(t, client, ns, "crash", func(p *corev1.Pod) error {
		for _, s := range p.Status.ContainerStatuses {
			w, last := s.State.Waiting, s.LastTerminationState.Terminated
			if s.RestartCount >= 2 && w != nil && w.Reason == "CrashLoopBackOff" && last != nil && last.ExitCode == 1 {
				return nil
			}
		}
		return fmt.Errorf("not in back-off: %s", p.Status.String())
	})
}

func TestUnknownImageThatComes(t *testing.T) {
	client, ns := sandboxed(t)
	late := "test.local/" + ns + ":1" // unique to this test run
	pod := podOf("late", "exit", "0")
	pod.Spec.Containers[0].Image = late
	create(t, client, ns, pod)
	waitPod(t, client, ns, "late", func(p *corev1.Pod) error {
		for _, s := range p.Status.ContainerStatuses {
			if w := s.State.Waiting; w != nil && w.Reason == "ImagePullBackOff" {
				return nil
			}
		}
		return fmt.Errorf("no ImagePullBackOff: %s", p.Status.String())
	})
	if err := shared.cluster.SetImages(map[string]string{late: shared.app}); err != nil {
		t.Fatal(err)
	}
	waitPod(t, client, ns, "late", inPhase(corev1.PodSucceeded))
}

func TestUnsupportedIsRefused(t *testing.T) {
	client, ns := sandboxed(t)
	pod := serverOf("refused")
	pod.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	create(t, client, ns, pod)
	waitPod(t, client, ns, "refused", func(p *corev1.Pod) error {
		for _, s := range p.Status.ContainerStatuses {
			if w := s.State.Waiting; w != nil && w.Reason == "CreateContainerConfigError" && strings.Contains(w.Message, "readinessProbe") {
				return nil
			}
		}
		return fmt.Errorf("not refused: %s", p.Status.String())
	})
}

func TestInitContainerAndSidecarInJob(t *testing.T) {
	client, ns := sandboxed(t)
	init := appContainer("init", "write", "/data/file", "from init")
	init.VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	sidecar := appContainer("sidecar", "serve", "--address=$(POD_IP):80", "--text=from sidecar")
	sidecar.RestartPolicy = ptr(corev1.ContainerRestartPolicyAlways)
	sidecar.StartupProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromInt32(80)}}, PeriodSeconds: 1,
	}
	template := podOf("job", "fetch", "http://$(POD_IP)/file?path=/data/file").Spec
	template.Containers[0].VolumeMounts = init.VolumeMounts
	sidecar.VolumeMounts = init.VolumeMounts
	template.InitContainers = []corev1.Container{init, sidecar}
	template.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	_, err := client.BatchV1().Jobs(ns).Create(t.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "job"},
		Spec:       batchv1.JobSpec{Completions: ptr(int32(2)), Parallelism: ptr(int32(2)), Template: corev1.PodTemplateSpec{Spec: template}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if job := waitJob(t, client, ns, "job", batchv1.JobComplete); job.Status.Succeeded != 2 {
		t.Errorf("%d pods succeeded, want 2", job.Status.Succeeded)
	}
	pods, err := client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods.Items {
		if log := logOf(t, ns, p.Name, "main"); log != "from init" {
			t.Errorf("pod %s read %q, want the text of the init container", p.Name, log)
		}
		if state := p.Status.InitContainerStatuses[1].State.Terminated; state == nil || state.ExitCode != 0 {
			t.Errorf("the sidecar of %s has not been stopped gracefully: %+v", p.Name, state)
		}
	}
}

func TestPodFailurePolicyByExitCode(t *testing.T) {
	client, ns := sandboxed(t)
	_, err := client.BatchV1().Jobs(ns).Create(t.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "job"},
		Spec: batchv1.JobSpec{
			BackoffLimit: ptr(int32(5)), Template: corev1.PodTemplateSpec{Spec: podOf("job", "exit", "42").Spec},
			PodFailurePolicy: &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{{
				Action: batchv1.PodFailurePolicyActionFailJob,
				OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{
					ContainerName: ptr("main"), Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: []int32{42},
				},
			}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if job := waitJob(t, client, ns, "job", batchv1.JobFailed); job.Status.Failed != 1 {
		t.Errorf("%d pods failed, want 1", job.Status.Failed)
	}
}

func TestActiveDeadline(t *testing.T) {
	client, ns := sandboxed(t)
	pod := serverOf("slow")
	pod.Spec.ActiveDeadlineSeconds = ptr(int64(1))
	create(t, client, ns, pod)
	got := waitPod(t, client, ns, "slow", inPhase(corev1.PodFailed))
	if got.Status.Reason != "DeadlineExceeded" {
		t.Errorf("reason %q, want DeadlineExceeded", got.Status.Reason)
	}
}

func TestLivenessRestarts(t *testing.T) {
	client, ns := sandboxed(t)
	pod := serverOf("unhealthy", "--healthy=false")
	pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 80}}
	pod.Spec.Containers[0].LivenessProbe = &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromString("http")}},
		PeriodSeconds: 1, FailureThreshold: 2,
	}
	create(t, client, ns, pod)
	waitPod(t, client, ns, "unhealthy", func(p *corev1.Pod) error {
		for _, s := range p.Status.ContainerStatuses {
			if s.RestartCount >= 1 && s.LastTerminationState.Terminated != nil && s.LastTerminationState.Terminated.ExitCode == 0 {
				return nil
			}
		}
		return fmt.Errorf("not restarted: %s", p.Status.String())
	})
}

func TestGracePeriodAndPreStop(t *testing.T) {
	client, ns := sandboxed(t)
	graceful := serverOf("graceful", "--drain=500ms")
	graceful.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{
		HTTPGet: &corev1.HTTPGetAction{Path: "/hook", Port: intstr.FromInt32(80)},
	}}
	stubborn := serverOf("stubborn", "--drain=1m")
	stubborn.Spec.TerminationGracePeriodSeconds = ptr(int64(1))
	for _, pod := range []*corev1.Pod{graceful, stubborn} {
		create(t, client, ns, pod)
		waitPod(t, client, ns, pod.Name, isReady)
	}
	waitServing(t, "graceful", ns)
	waitServing(t, "stubborn", ns)
	logs := map[string]*os.File{}
	for _, name := range []string{"graceful", "stubborn"} {
		f, err := os.Open(shared.cluster.Logs(ns, name, "main"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		logs[name] = f
		if err := client.CoreV1().Pods(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	waitGone(t, client, ns, "graceful")
	waitGone(t, client, ns, "stubborn")
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("termination took %s: the grace period of 1 s was not enforced", took)
	}
	if log := logOf(t, ns, "graceful", "main"); log != "hook called\nterminating\ndone\n" {
		t.Errorf("graceful: log %q", log)
	}
	if log := logOf(t, ns, "stubborn", "main"); log != "terminating\n" {
		t.Errorf("stubborn: log %q, want SIGKILL before it completes", log)
	}
}

func TestGPUsAreCounted(t *testing.T) {
	client, ns := sandboxed(t)
	for i := range 3 {
		pod := serverOf(fmt.Sprintf("gpu-%d", i))
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(fmt.Sprint(testGPUs / 2))}
		create(t, client, ns, pod)
	}
	count := func(phase corev1.PodPhase) int {
		pods, err := client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, p := range pods.Items {
			unschedulable := phase != corev1.PodPending
			for _, c := range p.Status.Conditions {
				unschedulable = unschedulable || c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable && strings.Contains(c.Message, "Insufficient nvidia.com/gpu")
			}
			if p.Status.Phase == phase && unschedulable {
				n++
			}
		}
		return n
	}
	eventually(t, 20*time.Second, func() error {
		if running, pending := count(corev1.PodRunning), count(corev1.PodPending); running != 2 || pending != 1 {
			return fmt.Errorf("%d pods run and %d wait for GPUs, want 2 and 1", running, pending)
		}
		return nil
	})
}

// waitServing polls until another pod gets a response from the pod's server.
func waitServing(t *testing.T, pod, ns string) {
	t.Helper()
	p, err := shared.client.CoreV1().Pods(ns).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	runToEnd(t, shared.client, ns, podOf("probe-"+pod, "fetch", "http://"+p.Status.PodIP+"/health"), corev1.PodSucceeded)
}
