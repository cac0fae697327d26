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

	"github.com/semmoe/operator/internal/restricted"
)

const (
	// Container is the one that measures.
	Container = "calibrate"

	scriptKey     = "calibrate.py"
	scriptPath    = "/semmoe/calibration"
	nameLabel     = "app.kubernetes.io/name"
	instanceLabel = "app.kubernetes.io/instance"
	// maxGPUs bounds the processes of a run: no node has more.
	maxGPUs = 16
	// keepFor is how long a Job that has ended, and with it its log, can be read.
	keepFor = 24 * time.Hour
	// memoryPerGPU is what a process with PyTorch, CUDA and NCCL needs of the node's memory.
	memoryPerGPU = "4Gi"
)

// Spec says what to measure, and where.
type Spec struct {
	Namespace, Name string
	// Image holds Python and PyTorch with NCCL: that of the engine. Python is the interpreter in it.
	Image, Python string
	// GPUs of one node are asked for, by ResourceName.
	GPUs         int
	ResourceName string
	// Timeout bounds the Job, the time to pull the image included.
	Timeout time.Duration
	// Shapes are further models, hidden:intermediate:experts-per-rank:topk.
	Shapes []string
	// HostTiming lets the clock cover the launch of each call; Quick only shows that it works.
	HostTiming, Quick bool
	// NodeSelector picks the nodes; PullSecrets name the Secrets with which the image is pulled.
	NodeSelector map[string]string
	PullSecrets  []string
}

var shapePattern = regexp.MustCompile(`^[1-9][0-9]*(:[1-9][0-9]*){3}$`)

// Validate tells what of a spec cannot work.
func (s Spec) Validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if s.Image == "" {
		fault("--image is missing: name the engine's")
	}
	if s.Python == "" {
		fault("--python is empty: name the interpreter in the image, such as python3")
	}
	if s.GPUs < 1 || s.GPUs > maxGPUs {
		fault("--gpus is %d: want 1 to %d, all of one node", s.GPUs, maxGPUs)
	}
	if s.Timeout < time.Minute {
		fault("--timeout is %v: want at least 1m0s", s.Timeout)
	}
	for _, given := range []struct{ flag, value string }{{"--name", s.Name}, {"--namespace", s.Namespace}} {
		// The name is a label and the prefix of a pod's name too.
		if wrong := validation.IsDNS1123Label(given.value); len(wrong) > 0 {
			fault("%s is %q: %s", given.flag, given.value, strings.Join(wrong, "; "))
		}
	}
	if wrong := validation.IsQualifiedName(s.ResourceName); len(wrong) > 0 || !strings.Contains(s.ResourceName, "/") {
		fault("--resource-name is %q: want that of a device plugin, such as nvidia.com/gpu", s.ResourceName)
	}
	for _, shape := range s.Shapes {
		if !shapePattern.MatchString(shape) {
			fault("--shape is %q: want hidden:intermediate:experts-per-rank:topk, four whole numbers above 0", shape)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(s.NodeSelector)) {
		value := s.NodeSelector[key]
		if wrong := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); len(wrong) > 0 {
			fault("--node-selector is %s=%s: %s", key, value, strings.Join(wrong, "; "))
		}
	}
	return errors.Join(faults...)
}

// Args are the flags of the script.
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

// ConfigMap holds the script.
func (s Spec) ConfigMap() *corev1.ConfigMap {
	return &corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: s.meta(),
		Data:       map[string]string{scriptKey: Script},
	}
}

// Job runs the script once, in a pod that keeps to the restricted pod security standard and has no token: its result is the last line
// of its log, so that an image that others have built gets no access to anything.
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
		SecurityContext:              restricted.Pod(),
		NodeSelector:                 s.NodeSelector,
		// Nodes with devices are often kept for those who ask for the devices.
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
			// The user has no entry in the image, and its home cannot be written to: libraries keep their caches in both ways.
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
		SecurityContext: restricted.Container(),
		VolumeMounts: []corev1.VolumeMount{
			{Name: "script", MountPath: scriptPath, ReadOnly: true},
			{Name: "tmp", MountPath: "/tmp"},
			// Collective libraries exchange data between processes through shared memory.
			{Name: "shm", MountPath: "/dev/shm"},
		},
	}
}
