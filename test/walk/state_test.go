package walk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// kinds are those that the operator writes, or that follow from what it writes.
func kinds() []client.ObjectList {
	return []client.ObjectList{
		&semmoev1.MoEDeploymentList{}, &semmoev1.AffinityProfileList{}, &semmoev1.PlacementPlanList{},
		&appsv1.StatefulSetList{}, &appsv1.DeploymentList{}, &batchv1.JobList{}, &corev1.PodList{}, &corev1.ServiceList{}, &corev1.ConfigMapList{},
		&corev1.ServiceAccountList{}, &policyv1.PodDisruptionBudgetList{}, &rbacv1.RoleBindingList{}, &networkingv1.NetworkPolicyList{},
	}
}

// objectOf is an empty object of a list's kind.
func objectOf(list client.ObjectList) client.Object {
	gvk, err := apiutil.GVKForObject(list, api.Scheme())
	if err != nil {
		panic(err) // a kind of the list above
	}
	gvk.Kind = strings.TrimSuffix(gvk.Kind, "List")
	object, err := api.Scheme().New(gvk)
	if err != nil {
		panic(err)
	}
	return object.(client.Object)
}

// state is what is in a namespace, without what differs between two runs.
type state struct {
	// exact holds each object's essence by its kind and name.
	exact map[string]string
	// pending is why it may yet change by itself; nil where nothing is under way.
	pending error
	// waits tells that everything that is pending waits for something else.
	waits bool
	// generation is the subject's.
	generation int64
}

// stateOf reads the state of an object's namespace.
func stateOf(ctx context.Context, subject client.Object) (state, error) {
	s, namespace := state{exact: map[string]string{}}, subject.GetNamespace()
	owners := map[types.UID]bool{}
	var all []client.Object
	for _, list := range kinds() {
		if err := seen.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return s, err
		}
		_ = meta.EachListItem(list, func(item runtime.Object) error { // the function returns no error
			object := item.(client.Object)
			owners[object.GetUID()] = true
			all = append(all, object)
			return nil
		})
	}
	var pending []error
	s.waits = true
	for _, object := range all {
		gvk, err := apiutil.GVKForObject(object, api.Scheme())
		if err != nil {
			return s, err
		}
		name := gvk.Kind + " " + object.GetName()
		if object.GetUID() == subject.GetUID() {
			s.generation = object.GetGeneration()
		}
		if err := unfinished(object, owners); err != nil {
			pending = append(pending, fmt.Errorf("%s: %w", name, err))
			s.waits = s.waits && errors.Is(err, errWaits)
		}
		if gvk.Kind == "Pod" || object.GetName() == "kube-root-ca.crt" || gvk.Kind == "ServiceAccount" && object.GetName() == "default" {
			continue
		}
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
		if err != nil {
			return s, err
		}
		if object.GetUID() == subject.GetUID() {
			delete(fields, "spec") // it is what was asked for; what follows is in question
		}
		if s.exact[name], err = essence(object, fields, namespace); err != nil {
			return s, err
		}
	}
	s.pending = errors.Join(pending...)
	return s, nil
}

// errWaits says that an object waits for another one, which may or may not come.
var errWaits = errors.New("it waits")

// errNotObserved says that the routers, which tell it, have not been asked since the last change: they are once a minute.
var errNotObserved = errors.New("nothing is observed of it yet")

// unfinished is why an object is about to change by itself.
func unfinished(object client.Object, owners map[types.UID]bool) error {
	if object.GetDeletionTimestamp() != nil {
		return errors.New("it is being deleted")
	}
	owner := metav1.GetControllerOf(object)
	switch {
	case owner != nil && owner.Kind != "ReplicaSet" && !owners[owner.UID]:
		return errors.New("its owner is gone, and it will follow")
	case owner == nil && object.GetLabels()[semmoev1.LabelComponent] != "":
		return errors.New("nobody owns it")
	}
	switch o := object.(type) {
	case *semmoev1.MoEDeployment:
		if locality := meta.FindStatusCondition(o.Status.Conditions, semmoev1.ConditionLocalityOnTarget); locality != nil && slices.Contains([]string{"NotEvaluated", "RoutersUnreachable", "TooFewSamples"}, locality.Reason) {
			return errNotObserved
		}
		if err := inProgress(o.Generation, o.Status.ObservedGeneration, o.Status.Conditions); err != nil {
			return err
		}
		return unplanned(o)
	case *semmoev1.AffinityProfile:
		return inProgress(o.Generation, o.Status.ObservedGeneration, o.Status.Conditions)
	case *semmoev1.PlacementPlan:
		return inProgress(o.Generation, o.Status.ObservedGeneration, o.Status.Conditions)
	case *appsv1.StatefulSet:
		if o.Status.ObservedGeneration != o.Generation || o.Status.Replicas != *o.Spec.Replicas || o.Status.ReadyReplicas != *o.Spec.Replicas {
			return fmt.Errorf("%d of %d replicas are ready", o.Status.ReadyReplicas, *o.Spec.Replicas)
		}
	case *appsv1.Deployment:
		if o.Status.ObservedGeneration != o.Generation || o.Status.UpdatedReplicas != *o.Spec.Replicas || o.Status.AvailableReplicas != *o.Spec.Replicas || o.Status.Replicas != *o.Spec.Replicas {
			return fmt.Errorf("%d of %d replicas are available", o.Status.AvailableReplicas, *o.Spec.Replicas)
		}
	}
	return nil
}

// unplanned tells that a plan may be about to come, or to be rolled out.
func unplanned(moed *semmoev1.MoEDeployment) error {
	if moed.Spec.Profiling == nil || moed.Spec.Reconciliation == semmoev1.ReconciliationPaused || meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionDegraded) {
		return nil
	}
	if !meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionPlanned) {
		return fmt.Errorf("%w: it has no plan", errWaits)
	}
	rolled := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
	if rolled != nil && slices.Contains([]string{"CanaryStarting", "Promoting"}, rolled.Reason) {
		return fmt.Errorf("RolledOut is %+v", rolled)
	}
	if rolled == nil || slices.Contains([]string{"NoPlan", "RollingOut", "AwaitingBaselineOutputs", "WaitingForPlan", "Canary"}, rolled.Reason) {
		return fmt.Errorf("%w: RolledOut is %+v", errWaits, rolled)
	}
	return nil
}

// inProgress tells that an object of ours is at work, and knows nothing that is wrong.
func inProgress(generation, observed int64, conditions []metav1.Condition) error {
	if observed != generation {
		return fmt.Errorf("generation %d is not observed", generation)
	}
	if progressing := meta.FindStatusCondition(conditions, semmoev1.ConditionProgressing); progressing == nil ||
		progressing.Status == metav1.ConditionTrue && !meta.IsStatusConditionTrue(conditions, semmoev1.ConditionDegraded) {
		if progressing != nil && (progressing.Reason == "Canary" || strings.HasPrefix(progressing.Reason, "WaitingFor") && progressing.Reason != "WaitingForReplicas") {
			return fmt.Errorf("%w: %s", errWaits, progressing.Message)
		}
		return fmt.Errorf("it is progressing: %+v", progressing)
	}
	return nil
}

// essence is an object, given also as fields, without times, versions, identities, and what the cluster assigns.
func essence(object client.Object, fields map[string]any, namespace string) (string, error) {
	annotations := map[string]string{}
	maps.Copy(annotations, object.GetAnnotations())
	delete(annotations, semmoev1.AnnotationEngineRelease) // the time of the first pod that answers decides when it is written
	delete(annotations, "deployment.kubernetes.io/revision")
	delete(annotations, poked)
	delete(annotations, semmoev1.AnnotationProven) // the time of a trial, which some ways have
	status := map[string]any{}
	if strings.HasPrefix(fmt.Sprintf("%T", object), "*v1alpha1.") {
		status, _ = fields["status"].(map[string]any)
	}
	if template, found := nested(fields, "spec", "template", "metadata"); found {
		if own, ok := template["annotations"].(map[string]any); ok && own[semmoev1.AnnotationServiceAccount] != nil {
			own[semmoev1.AnnotationServiceAccount] = "UID"
		}
	}
	text, err := json.MarshalIndent(withoutAssigned(map[string]any{
		"labels": fields["metadata"].(map[string]any)["labels"], "annotations": annotations, "spec": fields["spec"], "data": fields["data"],
		"subjects": fields["subjects"], "roleRef": fields["roleRef"], "status": status,
	}), "", " ")
	return generations.ReplaceAllString(strings.ReplaceAll(string(text), namespace, "NAMESPACE"), "Generation N"), err
}

// nested is the object at a path.
func nested(fields map[string]any, path ...string) (map[string]any, bool) {
	object := fields
	for _, name := range path {
		next, ok := object[name].(map[string]any)
		if !ok {
			return nil, false
		}
		object = next
	}
	return object, true
}

// generations are told in messages.
var generations = regexp.MustCompile(`Generation \d+`)

// assigned are fields that the cluster gives.
var assigned = map[string]bool{
	"observedGeneration": true, "clusterIP": true, "clusterIPs": true, "ipFamilies": true, "controller-uid": true, "batch.kubernetes.io/controller-uid": true,
}

func withoutAssigned(value any) any {
	switch v := value.(type) {
	case map[string]any:
		kept := map[string]any{}
		for key, item := range v {
			if !assigned[key] {
				kept[key] = withoutAssigned(item)
			}
		}
		return kept
	case []any:
		kept := make([]any, len(v))
		for i, item := range v {
			kept[i] = withoutAssigned(item)
		}
		return kept
	case string:
		if _, err := time.Parse(time.RFC3339, v); err == nil {
			return "TIME"
		}
	}
	return value
}

// hashes are digests and what is derived from them. They change with every input: that is no effect.
var hashes = regexp.MustCompile(`\b[0-9a-f]{8,64}\b`)

// effects is a state without hashes.
func effects(exact map[string]string) map[string]string {
	blurred := map[string]string{}
	for name, text := range exact {
		blurred[hashes.ReplaceAllString(name, "#")] += hashes.ReplaceAllString(text, "#")
	}
	return blurred
}

// poke has an object reconciled.
func poke(ctx context.Context, object client.Object) error {
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, poked, time.Now())
	return api.Patch(ctx, object.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, patch))
}

// poked is an annotation of these tests' own.
const poked = "walk/poked"

const (
	// stable is how long a state without anything under way must last to count as the end, waiting how long one in which objects
	// wait for what may have to be done by a user.
	stable, waiting = 700 * time.Millisecond, 10 * time.Second
	patience        = 2 * time.Minute
)

// settled waits until a namespace does not change any more after an object has got its generation, and returns its state.
func settled(ctx context.Context, object client.Object) (map[string]string, error) {
	namespace, generation := object.GetNamespace(), object.GetGeneration()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var last state
	since := time.Now()
	for {
		now, err := stateOf(ctx, object)
		if err == nil && now.generation < generation {
			now.pending = fmt.Errorf("generation %d is not in the cache", generation)
			since = time.Now()
		}
		if err != nil {
			return nil, fmt.Errorf("%s does not settle: %w (%v)", namespace, err, last.pending)
		}
		if !maps.Equal(now.exact, last.exact) || (now.pending == nil) != (last.pending == nil) {
			since = time.Now()
		}
		last = now
		if errors.Is(now.pending, errNotObserved) {
			if err := poke(ctx, object); err != nil {
				return nil, err
			}
		}
		if quiet := time.Since(since); now.pending == nil && quiet > stable || now.waits && quiet > waiting {
			return now.exact, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s does not settle within %v: %v", namespace, patience, last.pending)
		}
	}
}
