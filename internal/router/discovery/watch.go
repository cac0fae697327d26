package discovery

import (
	"context"
	"fmt"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Watch calls set with the ready engine pods of the selector, at first and whenever they change, and keeps the snapshot
// equal to them, until the context ends. It calls synced once they are known, from the snapshot or from the API server,
// whichever comes first.
func Watch(ctx context.Context, clients kubernetes.Interface, namespace, selector, snapshotDir string, set func([]Backend), synced func()) error {
	log := logr.FromContextOrDiscard(ctx)
	backends, found, err := LoadSnapshot(snapshotDir)
	switch {
	case err != nil:
		log.Error(err, "Ignoring the endpoint snapshot")
	case found:
		set(backends)
		log.Info("Started from the endpoint snapshot", "backends", len(backends))
		synced()
	}

	factory := informers.NewSharedInformerFactoryWithOptions(clients, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(options *metav1.ListOptions) { options.LabelSelector = selector }))
	pods := factory.Core().V1().Pods()
	// One slot: events that come while the backends are being set make one more update, however many they are.
	dirty := make(chan struct{}, 1)
	notify := func() {
		select {
		case dirty <- struct{}{}:
		default:
		}
	}
	if _, err := pods.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notify() },
		UpdateFunc: func(any, any) { notify() },
		DeleteFunc: func(any) { notify() },
	}); err != nil {
		return fmt.Errorf("watch engine pods: %w", err)
	}
	// The informer is not waited for at the end: while the API server is away it sleeps for up to a minute between attempts.
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), pods.Informer().HasSynced) {
		return nil // the context ended
	}
	notify()
	problems := map[types.UID]string{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-dirty:
		}
		found, err := pods.Lister().List(labels.Everything())
		if err != nil {
			return fmt.Errorf("list engine pods: %w", err)
		}
		problems = logProblems(log, found, problems)
		next := Backends(found)
		if !slices.EqualFunc(next, backends, Backend.Equal) {
			backends = next
			set(backends)
			log.Info("Endpoints changed", "backends", len(backends))
			if err := SaveSnapshot(snapshotDir, backends); err != nil {
				log.Error(err, "Keeping the older endpoint snapshot")
			}
		}
		synced()
	}
}

// logProblems logs the invalid annotations of pods that are not among the known ones, and returns those of all pods.
func logProblems(log logr.Logger, pods []*corev1.Pod, known map[types.UID]string) map[types.UID]string {
	all := map[types.UID]string{}
	for _, pod := range pods {
		problem := Problem(pod)
		if problem == "" {
			continue
		}
		all[pod.UID] = problem
		if known[pod.UID] != problem {
			log.Info("Ignoring an invalid annotation", "pod", pod.Name, "reason", problem)
		}
	}
	return all
}
