// SPDX-License-Identifier: Apache-2.0

package retention

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles;moedeployments;placementplans,verbs=list
// +kubebuilder:rbac:groups=core,resources=configmaps;pods,verbs=list
// +kubebuilder:rbac:groups=apps,resources=deployments;statefulsets,verbs=list

const (
	// DefaultRetention is the default time for which artifacts without references are kept.
	DefaultRetention = 7 * 24 * time.Hour
	// period is the interval between sweeps.
	period = time.Hour
	// sweepTimeout bounds the duration of a sweep.
	sweepTimeout = 10 * time.Minute
)

// Sweeper sweeps the artifact store. It runs on the leader only.
type Sweeper struct {
	// Reader lists objects without a cache, because a cache may be stale or may contain only some objects.
	Reader client.Reader
	// Store is the store to sweep. If no store is configured, nothing is swept.
	Store *access.Access
	// Namespaces are the namespaces that the manager watches; an empty slice means all namespaces.
	Namespaces []string
	// Retention is the time for which artifacts without references are kept; zero means DefaultRetention. It must be
	// much longer than the time from the publication of an artifact to the creation of the object that references it.
	Retention time.Duration
	// Now returns the current time.
	Now func() time.Time
}

// NeedLeaderElection returns true, so that one manager sweeps at a time.
func (s *Sweeper) NeedLeaderElection() bool { return true }

// Start sweeps periodically until the context ends. The first sweep is after one period, when the controllers have
// reported their objects.
func (s *Sweeper) Start(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx).WithName("retention")
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		deleted, err := s.Sweep(ctx)
		switch {
		case errors.Is(err, access.ErrNoStore), ctx.Err() != nil:
		case err != nil:
			log.Error(err, "Failed to sweep the artifact store; retrying", "deleted", len(deleted))
		case len(deleted) > 0:
			log.Info("Swept the artifact store", "deleted", len(deleted))
		}
	}
}

// Sweep deletes the artifacts without references for the retention period, and returns them.
func (s *Sweeper) Sweep(ctx context.Context) ([]artifact.Artifact, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	store, err := s.Store.Client(ctx)
	if err != nil {
		return nil, err
	}
	// The artifacts are listed before the objects. Artifacts that are stored after this list are too young to be
	// deleted.
	all, err := store.ListAll(ctx)
	if err != nil {
		return nil, err
	}
	found, err := s.references(ctx)
	if err != nil {
		return nil, err
	}
	retention := s.Retention
	if retention == 0 {
		retention = DefaultRetention
	}
	live := liveOf(found)
	marking := store.Mark(ctx, all, live.scopes, retention, s.Now())
	deleted, err := store.Sweep(ctx, live.digests(all, s.Namespaces), retention, s.Now())
	return deleted, errors.Join(marking, err)
}

// references lists all objects that can reference artifacts.
func (s *Sweeper) references(ctx context.Context) (references, error) {
	namespaces := s.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	var all references
	for _, namespace := range namespaces {
		if err := s.addReferences(ctx, &all, namespace); err != nil {
			return references{}, fmt.Errorf("failed to list the objects that reference artifacts: %w", err)
		}
	}
	return all, nil
}

func (s *Sweeper) addReferences(ctx context.Context, all *references, namespace string) error {
	in := client.InNamespace(namespace)
	var moeds semmoev1.MoEDeploymentList
	var profiles semmoev1.AffinityProfileList
	var plans semmoev1.PlacementPlanList
	var stateful appsv1.StatefulSetList
	var deployments appsv1.DeploymentList
	var tables corev1.ConfigMapList
	configMaps, pods := metadataOf("ConfigMapList"), metadataOf("PodList")
	if err := errors.Join(
		s.Reader.List(ctx, &moeds, in),
		s.Reader.List(ctx, &profiles, in),
		s.Reader.List(ctx, &plans, in),
		s.Reader.List(ctx, &stateful, in),
		s.Reader.List(ctx, &deployments, in),
		s.Reader.List(ctx, configMaps, in, client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentPlan}),
		s.Reader.List(ctx, &tables, in, client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentTables}),
		s.Reader.List(ctx, pods, in),
	); err != nil {
		return err
	}
	all.Deployments = append(all.Deployments, moeds.Items...)
	all.Profiles = append(all.Profiles, profiles.Items...)
	all.Plans = append(all.Plans, plans.Items...)
	all.ConfigMaps = append(all.ConfigMaps, configMaps.Items...)
	all.Tables = append(all.Tables, tables.Items...)
	for i := range stateful.Items {
		all.addWorkload(&stateful.Items[i].ObjectMeta, &stateful.Items[i].Spec.Template)
	}
	for i := range deployments.Items {
		all.addWorkload(&deployments.Items[i].ObjectMeta, &deployments.Items[i].Spec.Template)
	}
	for i := range pods.Items {
		all.Annotated = append(all.Annotated, pods.Items[i].ObjectMeta)
	}
	return nil
}

func (r *references) addWorkload(workload *metav1.ObjectMeta, template *corev1.PodTemplateSpec) {
	r.Annotated = append(r.Annotated, *workload, metav1.ObjectMeta{Namespace: workload.Namespace, Annotations: template.Annotations})
}

// metadataOf returns an empty list of core objects of which only the metadata is read.
func metadataOf(kind string) *metav1.PartialObjectMetadataList {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: kind})
	return list
}
