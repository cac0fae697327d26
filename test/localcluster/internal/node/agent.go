// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	eventrecord "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
)

// Options configures a node.
type Options struct {
	// Name is the name of the Node object. Address is the node's address, which must be local.
	Name, Address string
	// PodRange is the range of pod addresses. All of its addresses must be local.
	PodRange string
	// Dir contains pod directories, hosts files and logs.
	Dir string
	// Images maps image references to static binaries.
	Images map[string]string
	// GPUs is the number of nvidia.com/gpu that the node advertises.
	GPUs int
	// Client has administrator permissions.
	Client kubernetes.Interface
}

// Agent runs the pods and forwards the Services of one simulated node.
type Agent struct {
	name, address, podRange string
	dir, logs, mountPoint   string
	client                  kubernetes.Interface
	allocatable             corev1.ResourceList
	recorder                eventrecord.EventRecorder
	addresses               *addressPool
	hosts                   *hostsFiles
	forwarder               *forwarder
	services                corelisters.ServiceLister
	slices                  discoverylisters.EndpointSliceLister
	networkChanged          chan struct{}

	mu      sync.Mutex
	images  map[string]string
	workers map[types.UID]*worker
}

// New returns an agent that is not started.
func New(o Options) *Agent {
	a := &Agent{
		name: o.Name, address: o.Address, podRange: o.PodRange,
		dir: o.Dir, logs: filepath.Join(o.Dir, "logs"), mountPoint: filepath.Join(o.Dir, "root"),
		client: o.Client, allocatable: allocatable(o.GPUs),
		hosts: newHostsFiles(filepath.Join(o.Dir, "hosts")), forwarder: newForwarder(),
		networkChanged: make(chan struct{}, 1),
		images:         map[string]string{}, workers: map[types.UID]*worker{},
	}
	maps.Copy(a.images, o.Images)
	return a
}

// Start registers the node, runs its pods and forwards its Services until ctx ends.
func (a *Agent) Start(ctx context.Context) error {
	var err error
	if a.addresses, err = newAddressPool(a.podRange); err != nil {
		return err
	}
	if err := os.MkdirAll(a.mountPoint, 0o755); err != nil {
		return err
	}
	broadcaster := eventrecord.NewBroadcaster(eventrecord.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: a.client.CoreV1().Events("")})
	a.recorder = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "kubelet", Host: a.name})
	if err := a.watch(ctx); err != nil {
		return err
	}
	return register(ctx, a.client, a.name, a.address, a.allocatable)
}

// watch starts the informers and the goroutine that updates Services, and waits until the caches are synced.
func (a *Agent) watch(ctx context.Context) error {
	const noResync = 0
	all := informers.NewSharedInformerFactory(a.client, noResync)
	own := informers.NewSharedInformerFactoryWithOptions(a.client, noResync, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", a.name).String()
	}))
	services, endpointSlices := all.Core().V1().Services(), all.Discovery().V1().EndpointSlices()
	a.services, a.slices = services.Lister(), endpointSlices.Lister()
	for informer, handler := range map[cache.SharedIndexInformer]cache.ResourceEventHandler{
		own.Core().V1().Pods().Informer(): handleChanges(
			func(p *corev1.Pod) { a.podChanged(ctx, p) }, a.podRemoved),
		services.Informer():       a.networkHandler(),
		endpointSlices.Informer(): a.networkHandler(),
		all.Core().V1().ConfigMaps().Informer(): handleChanges(
			func(m *corev1.ConfigMap) { a.sourceChanged(m.Namespace, "ConfigMap", m.Name) }, nil),
		all.Core().V1().Secrets().Informer(): handleChanges(
			func(s *corev1.Secret) { a.sourceChanged(s.Namespace, "Secret", s.Name) }, nil),
	} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
	}
	for _, factory := range []informers.SharedInformerFactory{all, own} {
		factory.Start(ctx.Done())
		for kind, ok := range factory.WaitForCacheSync(ctx.Done()) {
			if !ok {
				return fmt.Errorf("failed to watch %s: %w", kind, ctx.Err())
			}
		}
	}
	go a.keepNetwork(ctx)
	return nil
}

// handleChanges returns a handler that calls changed for added and updated objects and removed for deleted objects.
// removed may be nil.
func handleChanges[T any](changed, removed func(T)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { changed(o.(T)) },
		UpdateFunc: func(_, o any) { changed(o.(T)) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if removed != nil {
				removed(o.(T))
			}
		},
	}
}

func (a *Agent) podChanged(ctx context.Context, pod *corev1.Pod) {
	a.mu.Lock()
	w := a.workers[pod.UID]
	if w == nil {
		w = newWorker(a, pod)
		a.workers[pod.UID] = w
		go func() {
			w.run(ctx)
			a.mu.Lock()
			defer a.mu.Unlock()
			delete(a.workers, pod.UID)
		}()
	}
	a.mu.Unlock()
	w.post(func() { w.update(pod) })
}

func (a *Agent) podRemoved(pod *corev1.Pod) {
	a.mu.Lock()
	w := a.workers[pod.UID]
	a.mu.Unlock()
	if w != nil {
		w.post(func() { w.removed = true })
	}
}

func (a *Agent) sourceChanged(namespace, kind, name string) {
	a.mu.Lock()
	workers := slices.Collect(maps.Values(a.workers))
	a.mu.Unlock()
	for _, w := range workers {
		if w.namespace == namespace {
			w.post(func() { w.sourceChanged(kind, name) })
		}
	}
}

func (a *Agent) networkHandler() cache.ResourceEventHandler {
	changed := func(any) {
		select {
		case a.networkChanged <- struct{}{}:
		default: // The pending update also covers this change.
		}
	}
	return handleChanges(changed, changed)
}

// keepNetwork updates listeners and hosts files after each change of Services and endpoints, until ctx ends.
func (a *Agent) keepNetwork(ctx context.Context) {
	for {
		if err := a.updateNetwork(); err != nil {
			klog.ErrorS(err, "Failed to update Services")
		}
		select {
		case <-a.networkChanged:
		case <-ctx.Done():
			return
		}
	}
}

func (a *Agent) updateNetwork() error {
	services, err := a.services.List(labels.Everything())
	if err != nil {
		return err
	}
	endpointSlices, err := a.slices.List(labels.Everything())
	if err != nil {
		return err
	}
	if err := a.hosts.update(services, endpointSlices); err != nil {
		return err
	}
	return a.forwarder.update(services, endpointSlices)
}

// DialService connects to a random ready endpoint of a Service's port.
func (a *Agent) DialService(namespace, name string, port int) (net.Conn, error) {
	return a.forwarder.dial(serviceKey(namespace, name, port))
}

// SetImages adds or replaces images. The change applies to containers that start after the call.
func (a *Agent) SetImages(images map[string]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.Copy(a.images, images)
}

func (a *Agent) image(reference string) (string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	path, ok := a.images[reference]
	return path, ok
}

func (a *Agent) imageNames() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(a.images)), ", ")
}

func (a *Agent) event(pod *corev1.Pod, kind, reason, message string) {
	a.recorder.Event(pod, kind, reason, message)
}
