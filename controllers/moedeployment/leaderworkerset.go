// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/source"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// +kubebuilder:rbac:groups=leaderworkerset.x-k8s.io,resources=leaderworkersets,verbs=list;watch;create;patch;delete

// groupKindPeriod is the maximum delay until an installed LeaderWorkerSet kind is detected.
const groupKindPeriod = 30 * time.Second

// groupKind detects and watches the kind LeaderWorkerSet. A cluster may lack the kind or install it later, and a watch
// on a missing kind would prevent the operator from starting.
type groupKind struct {
	// watch adds a source to the controller.
	watch func(source.Source) error
	cache cache.Cache

	mu    sync.Mutex
	known bool
	// again is the earliest time of the next check; zero before the first check.
	again time.Time
}

// find reports whether the cluster has the kind, and starts the watch when it finds the kind for the first time. It
// checks once, and repeats the check every groupKindPeriod while wanted.
func (k *groupKind) find(ctx context.Context, c client.Client, wanted bool, now time.Time) (known bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.known || now.Before(k.again) || !wanted && !k.again.IsZero() {
		return k.known, nil
	}
	gvk := leaderworkersetv1.GroupVersion.WithKind("LeaderWorkerSet")
	if _, err := c.RESTMapper().RESTMapping(gvk.GroupKind(), gvk.Version); meta.IsNoMatchError(err) {
		k.again = now.Add(groupKindPeriod)
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("failed to check for the kind LeaderWorkerSet: %w", err)
	}
	if err := k.watch(source.Kind[client.Object](k.cache, &leaderworkersetv1.LeaderWorkerSet{},
		handler.EnqueueRequestForOwner(c.Scheme(), c.RESTMapper(), &semmoev1.MoEDeployment{}, handler.OnlyControllerOwner()))); err != nil {
		return false, fmt.Errorf("failed to watch LeaderWorkerSets: %w", err)
	}
	logr.FromContextOrDiscard(ctx).Info("Watching LeaderWorkerSets")
	k.known = true
	return true, nil
}

// isKnown reports whether the kind is watched.
func (k *groupKind) isKnown() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.known
}

// listGroups lists the LeaderWorkerSets of a MoEDeployment, including those from earlier specs with several pods per
// replica, and reports whether the cluster has the kind.
func (r *Reconciler) listGroups(ctx context.Context, moed *semmoev1.MoEDeployment) (found []*revisions.Workload, known bool, err error) {
	known, err = r.groups.find(ctx, r.Client, desired.PodsPerReplica(moed) > 1, r.Now())
	if err != nil || !known {
		return nil, false, err
	}
	var list leaderworkersetv1.LeaderWorkerSetList
	if err := r.List(ctx, &list, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}); err != nil {
		return nil, false, fmt.Errorf("failed to list LeaderWorkerSets: %w", err)
	}
	for i := range list.Items {
		if set := &list.Items[i]; metav1.IsControlledBy(set, moed) && set.DeletionTimestamp == nil {
			found = append(found, revisions.LeaderWorkerSet(set))
		}
	}
	return found, true, nil
}
