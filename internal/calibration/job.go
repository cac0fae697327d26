// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/semmoe/operator/internal/kube/podsecurity"
)

const (
	// Container is the name of the container that runs the script.
	Container = "calibrate"

	scriptKey     = "calibrate.py"
	scriptPath    = "/semmoe/calibration"
	nameLabel     = "app.kubernetes.io/name"
	instanceLabel = "app.kubernetes.io/instance"
	// maxGPUs is the maximum number of processes of a run. No node has more GPUs.
	maxGPUs = 16
	// keepFor is the time after which a finished Job and its log are deleted.
	keepFor = 24 * time.Hour
	// memoryPerGPU is the memory request of one process with PyTorch, CUDA and NCCL.
	memoryPerGPU = "4Gi"
)

// Spec selects the measurements and their environment.
type Spec struct {
	Namespace, Name string
	// Image is the image of the engine, with Python and PyTorch with NCCL. Python is the interpreter in the image.
	Image, Python string
	// GPUs is the number of GPUs of one node, and ResourceName their resource name.
	GPUs         int
	ResourceName string
	// Timeout limits the duration of the Job, including the time to pull the image.
	Timeout time.Duration
	// Shapes are additional models, as hidden:intermediate:experts-per-rank:topk.
	Shapes []string
	// HostTiming includes the launch of each call in the times. Quick measures few small sizes, to test the setup.
	HostTiming, Quick bool
	// NodeSelector selects the nodes. PullSecrets names the Secrets for pulling the image.
	NodeSelector map[string]string
	PullSecrets  []string
}

var shapePattern = regexp.MustCompile(`^[1-9][0-9]*(:[1-9][0-9]*){3}$`)

// Validate returns an error for each invalid field of a spec.
func (s Spec) Validate() error {
	var problems []error
	add := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if s.Image == "" {
		add("--image is missing: set it to the image of the engine")
	}
	if s.Python == "" {
		add("--python is empty: set it to the interpreter in the image, for example python3")
	}
	if s.GPUs < 1 || s.GPUs > maxGPUs {
		add("--gpus: %d is invalid: must be 1 to %d GPUs of one node", s.GPUs, maxGPUs)
	}
	if s.Timeout < time.Minute {
		add("--timeout: %v is invalid: must be at least 1m0s", s.Timeout)
	}
	for _, given := range []struct{ flag, value string }{{"--name", s.Name}, {"--namespace", s.Namespace}} {
		// The name is also a label value and the prefix of the pod's name.
		if wrong := validation.IsDNS1123Label(given.value); len(wrong) > 0 {
			add("%s: %q is invalid: %s", given.flag, given.value, strings.Join(wrong, "; "))
		}
	}
	if wrong := validation.IsQualifiedName(s.ResourceName); len(wrong) > 0 || !strings.Contains(s.ResourceName, "/") {
		add("--resource-name: %q is invalid: must be the resource name of a device plugin, for example nvidia.com/gpu", s.ResourceName)
	}
	for _, shape := range s.Shapes {
		if !shapePattern.MatchString(shape) {
			add("--shape: %q is invalid: must be hidden:intermediate:experts-per-rank:topk, four positive integers", shape)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(s.NodeSelector)) {
		value := s.NodeSelector[key]
		if wrong := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); len(wrong) > 0 {
			add("--node-selector: %s=%s is invalid: %s", key, value, strings.Join(wrong, "; "))
		}
	}
	return errors.Join(problems...)
}

// Args returns the flags of the script.
func (s Spec) Args() []string {
	args := []string{"--gpus=" + strconv.Itoa(s.GPUs)}
	if s.HostTiming {
		args = append(args, "--timing=host")
	}
	if s.Quick {
		args = append(args, "--quick")
	}
	for _, shape := range s.Shapes {
		args = append(args, "--shape="+shape)
	}
	return args
}

func (s Spec) meta() metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, Labels: map[string]string{nameLabel: "semmoe-calibration", instanceLabel: s.Name}}
}

// ConfigMap returns the ConfigMap of the script.
func (s Spec) ConfigMap() *corev1.ConfigMap {
	return &corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: s.meta(),
		Data:       map[string]string{scriptKey: Script},
	}
}

// Job returns a Job that runs the script once. The pod conforms to the restricted Pod Security Standard and has no
// service account token, so that a third-party image gets no access to the cluster. The result is the last line of the
// log.
func (s Spec) Job() *batchv1.Job {
	meta := s.meta()
	return &batchv1.Job{
		TypeMeta:   metav1.TypeMeta{APIVersion: "batch/v1", Kind: "Job"},
		ObjectMeta: meta,
		Spec: batchv1.JobSpec{
			BackoffLimit:            ptr.To[int32](0),
			ActiveDeadlineSeconds:   ptr.To(int64(s.Timeout.Seconds())),
			TTLSecondsAfterFinished: ptr.To(int32(keepFor.Seconds())),
			Template:                corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: meta.Labels}, Spec: s.pod()},
		},
	}
}

func (s Spec) pod() corev1.PodSpec {
	pod := corev1.PodSpec{
		RestartPolicy:                corev1.RestartPolicyNever,
		AutomountServiceAccountToken: ptr.To(false),
		EnableServiceLinks:           ptr.To(false),
		SecurityContext:              podsecurity.Pod(),
		NodeSelector:                 s.NodeSelector,
		// GPU nodes often have a taint with the name of the resource.
		Tolerations: []corev1.Toleration{{Key: s.ResourceName, Operator: corev1.TolerationOpExists}},
		Containers:  []corev1.Container{s.container()},
		Volumes: []corev1.Volume{
			{Name: "script", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: s.Name},
			}}},
			{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{Name: "shm", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}},
		},
	}
	for _, name := range s.PullSecrets {
		pod.ImagePullSecrets = append(pod.ImagePullSecrets, corev1.LocalObjectReference{Name: name})
	}
	// Images of engines usually run as root, so the pod names another user.
	pod.SecurityContext.RunAsUser = ptr.To[int64](podsecurity.User)
	return pod
}

func (s Spec) container() corev1.Container {
	devices := *resource.NewQuantity(int64(s.GPUs), resource.DecimalSI)
	memory := resource.MustParse(memoryPerGPU)
	memory.Mul(int64(s.GPUs))
	return corev1.Container{
		Name:    Container,
		Image:   s.Image,
		Command: append([]string{s.Python, scriptPath + "/" + scriptKey}, s.Args()...),
		Env: []corev1.EnvVar{
			// The user ID has no passwd entry in the image and no writable home directory. Libraries derive the paths
			// of their caches from both.
			{Name: "HOME", Value: "/tmp"},
			{Name: "USER", Value: "semmoe"},
			{Name: "PYTHONDONTWRITEBYTECODE", Value: "1"},
		},
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{
				corev1.ResourceCPU: *resource.NewQuantity(int64(s.GPUs), resource.DecimalSI), corev1.ResourceMemory: memory, corev1.ResourceName(s.ResourceName): devices,
			},
			Limits: corev1.ResourceList{corev1.ResourceName(s.ResourceName): devices},
		},
		SecurityContext: podsecurity.Container(),
		VolumeMounts: []corev1.VolumeMount{
			{Name: "script", MountPath: scriptPath, ReadOnly: true},
			{Name: "tmp", MountPath: "/tmp"},
			// Collective libraries exchange data between processes through shared memory.
			{Name: "shm", MountPath: "/dev/shm"},
		},
	}
}
