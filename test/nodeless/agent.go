// SPDX-License-Identifier: Apache-2.0

package nodeless

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// agentWorkers is the maximum number of pods that the agent processes concurrently.
const agentWorkers = 8

// Agent simulates the scheduler and all kubelets: every Sem-MoE pod immediately runs, becomes ready, or completes.
type Agent struct {
	clients kubernetes.Interface
	store   *access.Client
	model   checkpoint.Report
	trace   string
	counts  string
	pods    cache.SharedIndexInformer
	queue   workqueue.TypedRateLimitingInterface[string]
	// tls starts, on first use, the server for TLS requests, and returns it. The server verifies no client
	// certificates.
	tls func() *httptest.Server

	mu        sync.Mutex
	addresses map[string]string // namespace/name of each pod, by address
	last      netip.Addr
}

// NewAgent returns an agent. Its profiling Jobs publish a small real trace in the store. Every checkpoint is the small
// model in internal/refengine/testdata, except for the digest.
func NewAgent(config *rest.Config, store *access.Client, repository string) (*Agent, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 500, 1000
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	model, err := checkpoint.Inspect(filepath.Join(repository, "internal", "refengine", "testdata", "tiny-qwen3moe"))
	if err != nil {
		return nil, err
	}
	factory := informers.NewSharedInformerFactoryWithOptions(clients, 0, informers.WithTweakListOptions(func(options *metav1.ListOptions) {
		options.LabelSelector = semmoev1.LabelComponent
	}))
	a := &Agent{
		clients: clients, store: store, model: model, pods: factory.Core().V1().Pods().Informer(),
		trace:     filepath.Join(repository, "solver", "testdata", "tiny-32e-top4.safetensors.zst"),
		queue:     workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
		addresses: map[string]string{}, last: netip.MustParseAddr("10.128.0.0"),
	}
	a.tls = sync.OnceValue(func() *httptest.Server { return httptest.NewTLSServer(a) })
	_, err = a.pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    a.enqueue,
		UpdateFunc: func(_, pod any) { a.enqueue(pod) },
	})
	return a, err
}

func (a *Agent) enqueue(pod any) {
	if key, err := cache.MetaNamespaceKeyFunc(pod); err == nil {
		a.queue.Add(key)
	}
}

// Run simulates the pods until ctx ends.
func (a *Agent) Run(ctx context.Context) error {
	counts, err := os.CreateTemp("", "counts-")
	if err != nil {
		return err
	}
	a.counts = counts.Name()
	defer os.Remove(a.counts) //nolint:errcheck // an empty temporary file
	if err := counts.Close(); err != nil {
		return err
	}
	var workers wait.Group
	workers.StartWithContext(ctx, a.pods.RunWithContext)
	if !cache.WaitForCacheSync(ctx.Done(), a.pods.HasSynced) {
		return ctx.Err()
	}
	for range agentWorkers {
		workers.Start(func() {
			for a.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	a.queue.ShutDown()
	workers.Wait()
	return nil
}

// next processes one pod. It returns false after the queue was shut down.
func (a *Agent) next(ctx context.Context) bool {
	key, shutdown := a.queue.Get()
	if shutdown {
		return false
	}
	defer a.queue.Done(key)
	err := a.reconcile(ctx, key)
	switch {
	case err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err): // the watch enqueues a changed pod again
		a.queue.Forget(key)
	case ctx.Err() == nil:
		a.queue.AddRateLimited(key)
	}
	return true
}

// reconcile performs the next step of a scheduler or kubelet for a pod.
func (a *Agent) reconcile(ctx context.Context, key string) error {
	object, exists, err := a.pods.GetIndexer().GetByKey(key)
	if err != nil || !exists {
		return err
	}
	switch pod := object.(*corev1.Pod); {
	case pod.DeletionTimestamp != nil:
		return a.clients.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &pod.UID},
		})
	case pod.Spec.NodeName == "":
		return a.clients.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: nodeName},
		}, metav1.CreateOptions{})
	case pod.Status.Phase == corev1.PodPending:
		return a.run(ctx, pod)
	}
	return nil
}

// run writes the final status of a pod.
func (a *Agent) run(ctx context.Context, pod *corev1.Pod) error {
	status, err := a.statusOf(ctx, pod)
	if err != nil {
		return err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": status})
	if err != nil {
		return err
	}
	_, err = a.clients.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// statusOf returns the final status of a pod: succeeded for inspection and profiling Jobs, running and ready for
// others.
func (a *Agent) statusOf(ctx context.Context, pod *corev1.Pod) (corev1.PodStatus, error) {
	now := metav1.Now()
	address := a.addressOf(pod)
	status := corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &now, PodIP: address, PodIPs: []corev1.PodIP{{IP: address}},
		Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: now},
			{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: now},
		},
	}
	for _, container := range pod.Spec.InitContainers {
		c := containerStatus(container, running(now))
		if container.RestartPolicy == nil {
			message := ""
			if container.Name == "reshuffle-weights" {
				text, err := json.Marshal(reshuffle.Result{Bytes: a.model.Bytes, Seconds: 1})
				if err != nil {
					return status, err
				}
				message = string(text)
			}
			c = containerStatus(container, ended(now, message))
		}
		status.InitContainerStatuses = append(status.InitContainerStatuses, c)
	}
	message, ends := "", false
	var err error
	switch pod.Labels[semmoev1.LabelComponent] {
	case semmoev1.ComponentInspect:
		message, err = a.inspect(pod)
		ends = true
	case semmoev1.ComponentDownload:
		message, ends = `{"repo":"org/model","commit":"0123456789abcdef0123456789abcdef01234567","files":3,"bytes":1000}`, true
	case semmoev1.ComponentProfile:
		err = a.profile(ctx, pod)
		ends = true
	}
	if err != nil {
		return status, err
	}
	for _, container := range pod.Spec.Containers {
		state := running(now)
		if ends {
			state = ended(now, message)
		}
		status.ContainerStatuses = append(status.ContainerStatuses, containerStatus(container, state))
	}
	if ends {
		status.Phase = corev1.PodSucceeded
		status.Conditions[1].Status = corev1.ConditionFalse
	}
	return status, nil
}

func containerStatus(container corev1.Container, state corev1.ContainerState) corev1.ContainerStatus {
	return corev1.ContainerStatus{Name: container.Name, Image: container.Image, State: state, Ready: true, Started: new(true)}
}

func running(now metav1.Time) corev1.ContainerState {
	return corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}
}

func ended(now metav1.Time, message string) corev1.ContainerState {
	return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed", Message: message, StartedAt: now, FinishedAt: now}}
}

// addressOf allocates a unique address for a pod.
func (a *Agent) addressOf(pod *corev1.Pod) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = a.last.Next()
	a.addresses[a.last.String()] = pod.Namespace + "/" + pod.Name
	return a.last.String()
}

// inspect returns the termination message of an inspection Job. The digest of the checkpoint is derived from its
// location.
func (a *Agent) inspect(pod *corev1.Pod) (string, error) {
	report := inspection.Report{Report: a.model}
	report.ModelDigest = digestOf(volumeAt(pod, semmoev1.ModelMountPath), argument(pod, "--model-path"))
	if dataset := argument(pod, "--dataset"); dataset != "" {
		report.Dataset = &inspection.DatasetReport{Digest: digestOf(volumeAt(pod, path.Dir(dataset)), dataset), Requests: 100, Bytes: 10000}
	}
	text, err := json.Marshal(report)
	return string(text), err
}

// profile publishes the result of a profiling Job.
func (a *Agent) profile(ctx context.Context, pod *corev1.Pod) error {
	number := func(flag string) int {
		n, _ := strconv.Atoi(argument(pod, flag))
		return n
	}
	manifest := profile.Manifest{
		ModelDigest: argument(pod, "--model-digest"), DatasetDigest: argument(pod, "--dataset-digest"),
		Sampling: profile.Sampling{Requests: number("--requests"), Tokens: number("--tokens"), RequestTokens: number("--request-tokens")},
	}
	return a.PublishProfile(ctx, pod.Namespace, manifest)
}

// PublishProfile stores a profile for the inputs in the manifest.
func (a *Agent) PublishProfile(ctx context.Context, namespace string, manifest profile.Manifest) error {
	scope := artifact.Scope{Namespace: namespace, Kind: artifact.Profile, ID: manifest.ID()}
	_, err := profile.Publish(ctx, a.store, scope, manifest, map[string]string{profile.TraceFile: a.trace, profile.CountsFile: a.counts})
	return err
}

// argument returns the value of a flag of a pod's first container, given as "--flag=value" or as two arguments. It
// returns "" if the flag is absent.
func argument(pod *corev1.Pod, flag string) string {
	args := pod.Spec.Containers[0].Args
	for i, arg := range args {
		if value, found := strings.CutPrefix(arg, flag+"="); found {
			return value
		}
		if arg == flag && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}

// volumeAt returns the source of the volume that the first container mounts at a path.
func volumeAt(pod *corev1.Pod, mountPath string) corev1.VolumeSource {
	for _, mount := range pod.Spec.Containers[0].VolumeMounts {
		if !strings.HasPrefix(mountPath, mount.MountPath) {
			continue
		}
		for _, volume := range pod.Spec.Volumes {
			if volume.Name == mount.Name {
				return volume.VolumeSource
			}
		}
	}
	return corev1.VolumeSource{}
}

// digestOf returns a digest of a volume source and a path in the volume.
func digestOf(source corev1.VolumeSource, file string) string {
	text, err := json.Marshal([]any{source, file})
	if err != nil {
		panic(err) // volume sources always marshal
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// podAt returns the pod with an address.
func (a *Agent) podAt(address string) (*corev1.Pod, error) {
	a.mu.Lock()
	key, known := a.addresses[address]
	a.mu.Unlock()
	if !known {
		return nil, fmt.Errorf("no pod has the address %s", address)
	}
	object, exists, err := a.pods.GetIndexer().GetByKey(key)
	if err != nil || !exists {
		return nil, fmt.Errorf("pod %s at %s is gone (%v)", key, address, err)
	}
	return object.(*corev1.Pod), nil
}

// enginesOf returns the engine pods of a MoEDeployment.
func (a *Agent) enginesOf(namespace, deployment string) []*corev1.Pod {
	objects, err := a.pods.GetIndexer().ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return nil
	}
	var engines []*corev1.Pod
	for _, object := range objects {
		pod := object.(*corev1.Pod)
		if pod.Labels[semmoev1.LabelDeployment] == deployment && pod.Labels[semmoev1.LabelComponent] == semmoev1.ComponentEngine {
			engines = append(engines, pod)
		}
	}
	return engines
}

// observedAt is the time of all router observations. It is constant because the traffic is stationary.
var observedAt = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
