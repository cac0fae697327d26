// SPDX-License-Identifier: Apache-2.0

package retention

import (
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
)

// references contains the objects that can reference artifacts.
type references struct {
	Deployments []semmoev1.MoEDeployment
	Profiles    []semmoev1.AffinityProfile
	Plans       []semmoev1.PlacementPlan
	// ConfigMaps are the ConfigMaps of plans.
	ConfigMaps []metav1.PartialObjectMetadata
	// Annotated contains the metadata of workloads, of their pod templates, and of pods.
	Annotated []metav1.ObjectMeta
	// Tables are the ConfigMaps that select the tables for routers.
	Tables []corev1.ConfigMap
}

// live is the set of artifacts to keep: the artifacts of some scopes, and all artifacts of some namespaces.
type live struct {
	scopes     sets.Set[artifact.Scope]
	namespaces sets.Set[string]
}

// liveOf returns the artifacts that the objects reference.
func liveOf(r references) live {
	l := live{sets.New[artifact.Scope](), sets.New[string]()}
	for _, d := range r.Deployments {
		// A MoEDeployment that was just restored has no profile yet that could reference the stored artifacts.
		if d.Spec.Profiling != nil && !meta.IsStatusConditionTrue(d.Status.Conditions, semmoev1.ConditionProfiled) && !stalled(d.Generation, d.Status.Conditions) {
			l.namespaces.Insert(d.Namespace)
		}
	}
	for _, p := range r.Profiles {
		if p.Status.Inputs != "" {
			l.add(p.Namespace, artifact.Profile, p.Status.Inputs)
		} else if !stalled(p.Generation, p.Status.Conditions) {
			l.namespaces.Insert(p.Namespace)
		}
	}
	published := sets.New[string]()
	for _, c := range r.ConfigMaps {
		published.Insert(c.Namespace + "/" + c.Name)
		l.add(c.Namespace, artifact.Plan, c.Labels[semmoev1.LabelInputs])
		l.addDigest(c.Namespace, c.Annotations)
	}
	for _, p := range r.Plans {
		l.add(p.Namespace, artifact.Plan, p.Status.Plan)
		l.addCurrent(p)
		// The ConfigMap references the solution that the plan was made from.
		if !published.Has(p.Namespace+"/"+p.Status.ConfigMap) && !stalled(p.Generation, p.Status.Conditions) {
			l.namespaces.Insert(p.Namespace)
		}
	}
	for _, o := range r.Annotated {
		l.addDigest(o.Namespace, o.Annotations)
	}
	for _, c := range r.Tables {
		l.addTables(c)
	}
	return l
}

// stalled reports whether an object makes no progress until a user changes it.
func stalled(generation int64, conditions []metav1.Condition) bool {
	c := meta.FindStatusCondition(conditions, semmoev1.ConditionStalled)
	return c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == generation
}

func (l live) add(namespace string, kind artifact.Kind, id string) {
	if scope := (artifact.Scope{Namespace: namespace, Kind: kind, ID: id}); scope.Validate() == nil {
		l.scopes.Insert(scope)
	}
}

func (l live) addDigest(namespace string, annotations map[string]string) {
	if digest, err := artifact.ParseDigest(annotations[semmoev1.AnnotationPlanDigest]); err == nil {
		l.add(namespace, artifact.Plan, digest.Short())
	}
}

// addCurrent adds the plan that p replaces. It is read when p is solved.
func (l live) addCurrent(p semmoev1.PlacementPlan) {
	if p.Spec.Current == nil {
		return
	}
	for _, text := range []string{p.Spec.Current.PlanDigest, p.Spec.Current.TablesDigest} {
		if digest, err := artifact.ParseDigest(text); err == nil {
			l.add(p.Namespace, artifact.Plan, digest.Short())
		}
	}
}

// addTables adds the plans in a ConfigMap for routers: the plans that pods were created for, and the plans whose tables
// are used. If the ConfigMap is invalid, all artifacts of its namespace are kept.
func (l live) addTables(c corev1.ConfigMap) {
	var tables map[string]string
	if json.Unmarshal([]byte(c.Data[semmoev1.TablesKey]), &tables) != nil {
		l.namespaces.Insert(c.Namespace)
		return
	}
	for layout, plan := range tables {
		for _, text := range []string{layout, plan} {
			if digest, err := artifact.ParseDigest(text); err == nil {
				l.add(c.Namespace, artifact.Plan, digest.Short())
			}
		}
	}
}

// digests returns the digests of the artifacts to keep. watched are the namespaces whose objects were listed; an empty
// slice means all namespaces.
func (l live) digests(all []artifact.Artifact, watched []string) sets.Set[artifact.Digest] {
	seen := sets.New(watched...)
	digests := sets.New[artifact.Digest]()
	for _, a := range all {
		if l.scopes.Has(a.Scope) || l.namespaces.Has(a.Namespace) || seen.Len() > 0 && !seen.Has(a.Namespace) {
			digests.Insert(a.Digest)
		}
	}
	return digests
}
