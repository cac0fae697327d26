// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/kube/apply"
	"github.com/semmoe/operator/internal/kube/ownership"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles,verbs=patch

// adopt restores the owner reference of children that lost it, for example after a restore from a backup, and reports
// whether it wrote any. All other children are applied completely, owner reference included. Jobs are not adopted: the
// controller starts a new Job instead.
func (r *Reconciler) adopt(ctx context.Context, moed *semmoev1.MoEDeployment) (bool, error) {
	lists := []client.ObjectList{&appsv1.StatefulSetList{}, &semmoev1.AffinityProfileList{}, &semmoev1.PlacementPlanList{}, &corev1.ConfigMapList{}}
	if r.groups.isKnown() {
		lists = append(lists, &leaderworkersetv1.LeaderWorkerSetList{})
	}
	labels := client.MatchingLabels(ownership.OperatorLabels())
	labels[semmoev1.LabelDeployment] = moed.Name
	var adopted bool
	var failed error
	for _, list := range lists {
		if err := r.List(ctx, list, client.InNamespace(moed.Namespace), labels, client.UnsafeDisableDeepCopy); err != nil {
			return adopted, fmt.Errorf("failed to list children: %w", err)
		}
		failed = errors.Join(failed, meta.EachListItem(list, func(item runtime.Object) error {
			wrote, err := apply.Adopt(ctx, r.Client, desired.Manager, moed, "MoEDeployment", item.(client.Object))
			adopted = adopted || wrote
			return err
		}))
	}
	return adopted, failed
}
