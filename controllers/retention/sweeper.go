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
	// DefaultRetention is how long artifacts are kept that nothing names.
	DefaultRetention = 7 * 24 * time.Hour
	// period is how often the store is swept.
	period = time.Hour
	// sweepTimeout bounds a sweep.
	sweepTimeout = 10 * time.Minute
)

// Sweeper sweeps the artifact store, on the leader alone.
type Sweeper struct {
	// Reader lists objects past any cache, which may be behind or hold only some of them.
	Reader client.Reader
	// Store is what is swept; nothing is where none is configured.
	Store *access.Access
	// Namespaces are those that the manager watches; none means all.
	Namespaces []string
	// Retention is how long artifacts are kept that nothing names; zero means DefaultRetention. It must be well above
	// the time from the publication of an artifact to the object that names it.
	Retention time.Duration
	// Now is the clock.
	Now func() time.Time
}

// NeedLeaderElection is true: one sweep at a time is enough.
func (s *Sweeper) NeedLeaderElection() bool { return true }

// Start sweeps until the context ends; for the first time after a period, when the controllers have reported.
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
			log.Error(err, "Cannot sweep the artifact store, and will try again", "deleted", len(deleted))
		case len(deleted) > 0:
			log.Info("Swept the artifact store", "deleted", len(deleted))
		}
	}
}

// Sweep deletes what nothing has named for the retention period, and returns it.
func (s *Sweeper) Sweep(ctx context.Context) ([]artifact.Artifact, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	store, err := s.Store.Client(ctx)
	if err != nil {
		return nil, err
	}
	// The artifacts first: what is stored after this list is too young for the sweep, whatever the objects say.
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

// references lists all objects that can name artifacts.
func (s *Sweeper) references(ctx context.Context) (references, error) {
	namespaces := s.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	var all references
	for _, namespace := range namespaces {
		if err := s.addReferences(ctx, &all, namespace); err != nil {
			return references{}, fmt.Errorf("list what names artifacts: %w", err)
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

// metadataOf is a list of core objects without their content, which is all that counts here.
func metadataOf(kind string) *metav1.PartialObjectMetadataList {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: kind})
	return list
}
