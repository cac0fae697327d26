// SPDX-License-Identifier: Apache-2.0

package specfields

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

// kinds returns the kinds that the operator writes, and those that other controllers create for them.
func kinds() []client.ObjectList {
	return []client.ObjectList{
		&semmoev1.MoEDeploymentList{}, &semmoev1.AffinityProfileList{}, &semmoev1.PlacementPlanList{},
		&appsv1.StatefulSetList{}, &appsv1.DeploymentList{}, &batchv1.JobList{}, &corev1.PodList{}, &corev1.ServiceList{}, &corev1.ConfigMapList{},
		&corev1.ServiceAccountList{}, &policyv1.PodDisruptionBudgetList{}, &rbacv1.RoleBindingList{}, &networkingv1.NetworkPolicyList{},
	}
}

// objectOf returns an empty object of the kind of a list.
func objectOf(list client.ObjectList) client.Object {
	gvk, err := apiutil.GVKForObject(list, api.Scheme())
	if err != nil {
		panic(err) // the scheme has all kinds in the list above
	}
	gvk.Kind = strings.TrimSuffix(gvk.Kind, "List")
	object, err := api.Scheme().New(gvk)
	if err != nil {
		panic(err)
	}
	return object.(client.Object)
}

// state is the content of a namespace, without values that differ between two runs.
type state struct {
	// exact contains the essence of each object by its kind and name.
	exact map[string]string
	// pending is the reason why the state may still change without a user; nil if it is final.
	pending error
	// waits is true if all pending objects wait for another object.
	waits bool
	// generation is the generation of the subject.
	generation int64
}

// stateOf returns the state of the namespace of an object.
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
			delete(fields, "spec") // the spec is the input; the state is its result
		}
		if s.exact[name], err = essence(object, fields, namespace); err != nil {
			return s, err
		}
	}
	s.pending = errors.Join(pending...)
	return s, nil
}

// errWaits reports that an object waits for another object, which may never be created.
var errWaits = errors.New("waiting")

// errNotObserved reports that the controller has not read the routers since the last change. It reads them once a
// minute.
var errNotObserved = errors.New("not observed yet")

// unfinished returns the reason why an object may still change without a user; nil if it is final.
func unfinished(object client.Object, owners map[types.UID]bool) error {
	if object.GetDeletionTimestamp() != nil {
		return errors.New("being deleted")
	}
	owner := metav1.GetControllerOf(object)
	switch {
	case owner != nil && owner.Kind != "ReplicaSet" && !owners[owner.UID]:
		return errors.New("owner deleted, garbage collection pending")
	case owner == nil && object.GetLabels()[semmoev1.LabelComponent] != "":
		return errors.New("no owner")
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

// unplanned returns an error if a plan may still be created or rolled out.
func unplanned(moed *semmoev1.MoEDeployment) error {
	if moed.Spec.Profiling == nil || moed.Spec.Reconciliation == semmoev1.ReconciliationPaused || meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionDegraded) {
		return nil
	}
	if !meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionPlanned) {
		return fmt.Errorf("%w: no plan", errWaits)
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

// inProgress returns an error if the operator is still processing an object, and the object is not degraded.
func inProgress(generation, observed int64, conditions []metav1.Condition) error {
	if observed != generation {
		return fmt.Errorf("generation %d is not observed", generation)
	}
	if progressing := meta.FindStatusCondition(conditions, semmoev1.ConditionProgressing); progressing == nil ||
		progressing.Status == metav1.ConditionTrue && !meta.IsStatusConditionTrue(conditions, semmoev1.ConditionDegraded) {
		if progressing != nil && (progressing.Reason == "Canary" || strings.HasPrefix(progressing.Reason, "WaitingFor") && progressing.Reason != "WaitingForReplicas") {
			return fmt.Errorf("%w: %s", errWaits, progressing.Message)
		}
		return fmt.Errorf("progressing: %+v", progressing)
	}
	return nil
}

// essence returns the text of an object without times, versions, identities, and values that the cluster assigns.
// fields is the same object in unstructured form.
func essence(object client.Object, fields map[string]any, namespace string) (string, error) {
	annotations := map[string]string{}
	maps.Copy(annotations, object.GetAnnotations())
	delete(annotations, semmoev1.AnnotationEngineRelease) // written when the first pod answers, at any time
	delete(annotations, "deployment.kubernetes.io/revision")
	delete(annotations, poked)
	delete(annotations, semmoev1.AnnotationProven) // the time of a trial, which only some walks have
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

// nested returns the object at a path.
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

// generations matches generations in messages.
var generations = regexp.MustCompile(`Generation \d+`)

// assigned contains the fields that the cluster assigns.
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

// hashes matches digests and names that contain them. They change with every input, so a changed hash is not an effect.
var hashes = regexp.MustCompile(`\b[0-9a-f]{8,64}\b`)

// effects returns a state with its hashes masked.
func effects(exact map[string]string) map[string]string {
	blurred := map[string]string{}
	for name, text := range exact {
		blurred[hashes.ReplaceAllString(name, "#")] += hashes.ReplaceAllString(text, "#")
	}
	return blurred
}

// poke triggers a reconciliation of an object.
func poke(ctx context.Context, object client.Object) error {
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, poked, time.Now())
	return api.Patch(ctx, object.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, patch))
}

// poked is an annotation that only these tests write.
const poked = "walk/poked"

const (
	// stable is the time for which a state without pending objects must not change to be final. waiting is this time for a
	// state in which all pending objects wait, possibly for a user.
	stable, waiting = 700 * time.Millisecond, 10 * time.Second
	patience        = 2 * time.Minute
)

// settled waits until the namespace of an object no longer changes for the current generation of the object, and
// returns its state.
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
