// SPDX-License-Identifier: Apache-2.0

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

// Watch calls set with the ready engine pods that match the selector, first at the start and then after each change,
// until the context ends. It saves the pods in the snapshot. It calls synced once the pods are known, from the snapshot
// or from the API server.
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
	// One slot: all events that arrive during an update cause a single further update.
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
		return fmt.Errorf("failed to watch engine pods: %w", err)
	}
	// The end of the informer is not awaited: without the API server, it sleeps for up to a minute between attempts.
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
			return fmt.Errorf("failed to list engine pods: %w", err)
		}
		problems = logProblems(log, found, problems)
		next := Backends(found)
		if !slices.EqualFunc(next, backends, Backend.Equal) {
			backends = next
			set(backends)
			log.Info("Endpoints changed", "backends", len(backends))
			if err := SaveSnapshot(snapshotDir, backends); err != nil {
				log.Error(err, "Failed to save the endpoint snapshot")
			}
		}
		synced()
	}
}

// logProblems logs the invalid annotations that are not in known. It returns the invalid annotations of all pods.
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
