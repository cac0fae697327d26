package front

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/owned"
)

// InferencePool is the kind by which a Gateway finds the engine pods and their endpoint picker. It comes with the Gateway API
// Inference Extension, which a cluster may not have, or get later: it is read and written without a cache, since a watch for
// a kind that is absent would keep the operator from starting.
var InferencePool = schema.GroupVersionKind{Group: "inference.networking.k8s.io", Version: "v1", Kind: "InferencePool"}

// PoolPeriod is how often the InferencePool is looked at, which nothing watches: how long one that was edited stays so, and how
// long the kind can be there unnoticed.
const PoolPeriod = 30 * time.Second

// reconcilePicker writes what a Gateway needs to ask the request router: the router's Service, and the InferencePool. It reports
// whether the cluster lacks the latter's kind.
func (f *Front) reconcilePicker(ctx context.Context, moed *semmoev1.MoEDeployment, engines Engines) (kindMissing bool, err error) {
	if err := desired.EnsureLatest(ctx, f.Client, f.Live, moed, &corev1.Service{}, pickerService(moed), coreac.ExtractService); err != nil {
		return false, fmt.Errorf("reconcile Service of the endpoint picker: %w", err)
	}
	want, live := inferencePoolOf(moed, engines.port(moed)), &unstructured.Unstructured{}
	live.SetGroupVersionKind(InferencePool)
	err = f.Get(ctx, client.ObjectKeyFromObject(want), live)
	if err == nil {
		err = desired.CheckOwn(f.Client, moed, live)
	}
	switch {
	case err == nil && poolHas(live, want):
		return false, nil
	case apierrors.IsNotFound(err):
		if changed, err := desired.SpecChanged(ctx, f.Live, moed); err != nil || changed {
			return false, err
		}
		fallthrough
	case err == nil:
		err = f.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(desired.Manager), client.ForceOwnership)
	}
	if kindAbsent(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("reconcile InferencePool: %w", err)
	}
	return false, nil
}

// kindAbsent tells that the API server does not know a kind: it says so when asked for its kinds, or, where it has just lost one,
// by not finding the path that an object is applied to.
func kindAbsent(err error) bool {
	return meta.IsNoMatchError(err) || apierrors.IsNotFound(err)
}

// poolHas tells that the live object has every field of ours. Fields of others, such as a status, are theirs.
func poolHas(live, want *unstructured.Unstructured) bool {
	spec, isMap := live.Object["spec"].(map[string]any)
	return isMap && equality.Semantic.DeepDerivative(want.Object["spec"], spec) &&
		equality.Semantic.DeepDerivative(want.GetLabels(), live.GetLabels()) &&
		equality.Semantic.DeepDerivative(want.GetOwnerReferences(), live.GetOwnerReferences())
}

// deletePicker takes away what another mode does not want. The Service is written before the InferencePool and goes after it:
// where there is none, there is no InferencePool to look for either.
func (f *Front) deletePicker(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	service := &corev1.Service{}
	err := f.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: desired.RouterName(moed)}, service)
	if err != nil || !metav1.IsControlledBy(service, moed) || service.DeletionTimestamp != nil {
		return client.IgnoreNotFound(err)
	}
	pool := &unstructured.Unstructured{}
	pool.SetGroupVersionKind(InferencePool)
	err = f.Get(ctx, client.ObjectKeyFromObject(moed), pool)
	if err == nil && metav1.IsControlledBy(pool, moed) && pool.GetDeletionTimestamp() == nil {
		err = f.remove(ctx, moed, pool)
	}
	if err != nil && !kindAbsent(err) {
		return fmt.Errorf("delete InferencePool: %w", err)
	}
	if err := f.remove(ctx, moed, service); err != nil {
		return fmt.Errorf("delete Service of the endpoint picker: %w", err)
	}
	return nil
}

// pickerService is where a Gateway asks for endpoints.
func pickerService(moed *semmoev1.MoEDeployment) *coreac.ServiceApplyConfiguration {
	port := func(name string, number int32) *coreac.ServicePortApplyConfiguration {
		// Without this value Envoy's control planes speak HTTP/1.1 to a port, over which there is no gRPC.
		return coreac.ServicePort().WithName(name).WithProtocol(corev1.ProtocolTCP).WithAppProtocol("http2").
			WithPort(number).WithTargetPort(intstr.FromString(name))
	}
	return coreac.Service(desired.RouterName(moed), moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentRouter)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(coreac.ServiceSpec().
			WithType(corev1.ServiceTypeClusterIP).
			WithSelector(desired.Selector(moed, semmoev1.ComponentRouter)).
			WithPorts(port("ext-proc", semmoev1.PickerPort), port("health", semmoev1.PickerHealthPort)))
}

// inferencePoolOf is what routes of a Gateway name as their backend. A Gateway that cannot reach the picker chooses a pod by
// itself: every rank gives the right answer, and where plans are hints, their absence must not stop serving. All ranks of a
// pod are behind one port; the picker names the rank in the engine's header, and the port of a pod that has another. appProtocol is left at its default: the first
// releases of the kind do not have it.
func inferencePoolOf(moed *semmoev1.MoEDeployment, port int32) *unstructured.Unstructured {
	pool := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"selector":    map[string]any{"matchLabels": anyValues(desired.Selector(moed, semmoev1.ComponentEngine))},
		"targetPorts": []any{map[string]any{"number": int64(port)}},
		"endpointPickerRef": map[string]any{
			"group": "", "kind": "Service", "name": desired.RouterName(moed), "port": map[string]any{"number": int64(semmoev1.PickerPort)},
			"failureMode": "FailOpen",
		},
	}}}
	pool.SetGroupVersionKind(InferencePool)
	pool.SetNamespace(moed.Namespace)
	pool.SetName(moed.Name)
	pool.SetLabels(desired.Labels(moed, semmoev1.ComponentRouter))
	pool.SetOwnerReferences(owned.ControllerReference(moed, "MoEDeployment"))
	return pool
}

func anyValues(texts map[string]string) map[string]any {
	values := make(map[string]any, len(texts))
	for key, text := range texts {
		values[key] = text
	}
	return values
}
