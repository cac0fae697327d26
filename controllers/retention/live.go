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

// references are the objects that can name artifacts.
type references struct {
	Deployments []semmoev1.MoEDeployment
	Profiles    []semmoev1.AffinityProfile
	Plans       []semmoev1.PlacementPlan
	// ConfigMaps are those of plans.
	ConfigMaps []metav1.PartialObjectMetadata
	// Annotated are workloads, their pod templates, and pods.
	Annotated []metav1.ObjectMeta
	// Tables are the ConfigMaps that tell routers which plans' tables to use.
	Tables []corev1.ConfigMap
}

// live is what must stay: scopes, and all scopes of some namespaces.
type live struct {
	scopes     sets.Set[artifact.Scope]
	namespaces sets.Set[string]
}

// liveOf tells what the objects name.
func liveOf(r references) live {
	l := live{sets.New[artifact.Scope](), sets.New[string]()}
	for _, d := range r.Deployments {
		// One that has just been restored has no profile yet that could name what is stored.
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
		// The ConfigMap names the solution that led to the plan.
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

// stalled tells that nothing will happen to an object until somebody replaces it.
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

// addCurrent adds the plan that another one is to replace: it is read when that is solved.
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

// addTables adds the plans that a ConfigMap names to routers: those that pods were made for, and those whose tables are used. What
// cannot be read keeps everything of its namespace.
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

// digests are those of the artifacts that stay. watched are the namespaces whose objects were seen; none means all.
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
