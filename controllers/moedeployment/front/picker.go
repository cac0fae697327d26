// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/kube/ownership"
)

// InferencePool is the kind by which a Gateway finds the engine pods and their endpoint picker. It is part of the
// Gateway API Inference Extension, which a cluster may lack or install later. It is read and written without a cache,
// because a watch on a missing kind would prevent the operator from starting.
var InferencePool = schema.GroupVersionKind{Group: "inference.networking.k8s.io", Version: "v1", Kind: "InferencePool"}

// PoolPeriod is the polling interval of the InferencePool, which is not watched. It bounds how long a manual edit or
// the installation of the kind goes unnoticed.
const PoolPeriod = 30 * time.Second

// reconcilePicker writes the objects with which a Gateway queries the request router: the router's Service, and the
// InferencePool. It reports whether the cluster lacks the kind InferencePool.
func (f *Front) reconcilePicker(ctx context.Context, moed *semmoev1.MoEDeployment, engines Engines) (kindMissing bool, err error) {
	if err := childobjects.EnsureLatest(ctx, f.Client, f.Live, moed, &corev1.Service{}, pickerService(moed), coreac.ExtractService); err != nil {
		return false, fmt.Errorf("failed to reconcile the Service of the endpoint picker: %w", err)
	}
	want, live := inferencePoolOf(moed, engines.port(moed)), &unstructured.Unstructured{}
	live.SetGroupVersionKind(InferencePool)
	err = f.Get(ctx, client.ObjectKeyFromObject(want), live)
	if err == nil {
		err = childobjects.CheckOwn(f.Client, moed, live)
	}
	switch {
	case err == nil && poolHas(live, want):
		return false, nil
	case apierrors.IsNotFound(err):
		if changed, err := childobjects.SpecChanged(ctx, f.Live, moed); err != nil || changed {
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
		return false, fmt.Errorf("failed to reconcile the InferencePool: %w", err)
	}
	return false, nil
}

// kindAbsent reports whether an error means that the API server does not know a kind: discovery lacks the kind, or,
// just after its removal, the path of the applied object is not found.
func kindAbsent(err error) bool {
	return meta.IsNoMatchError(err) || apierrors.IsNotFound(err)
}

// poolHas reports whether the live object contains every field of want. Fields of other owners, such as the status, are
// ignored.
func poolHas(live, want *unstructured.Unstructured) bool {
	spec, isMap := live.Object["spec"].(map[string]any)
	return isMap && equality.Semantic.DeepDerivative(want.Object["spec"], spec) &&
		equality.Semantic.DeepDerivative(want.GetLabels(), live.GetLabels()) &&
		equality.Semantic.DeepDerivative(want.GetOwnerReferences(), live.GetOwnerReferences())
}

// deletePicker deletes the objects that other modes do not need. The Service is created before the InferencePool and
// deleted after it: without the Service, there is no InferencePool to check for.
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
		return fmt.Errorf("failed to delete the InferencePool: %w", err)
	}
	if err := f.remove(ctx, moed, service); err != nil {
		return fmt.Errorf("failed to delete the Service of the endpoint picker: %w", err)
	}
	return nil
}

// pickerService returns the Service that a Gateway queries for endpoints.
func pickerService(moed *semmoev1.MoEDeployment) *coreac.ServiceApplyConfiguration {
	port := func(name string, number int32) *coreac.ServicePortApplyConfiguration {
		// Without this value, Envoy control planes use HTTP/1.1 for the port, which does not support gRPC.
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

// inferencePoolOf returns the backend that routes of a Gateway reference. A Gateway that cannot reach the picker
// selects a pod itself (FailOpen): every rank computes correct results, and without plans serving must continue. All
// ranks of a pod share one port; the picker sends the rank in the engine's header, and the port of a pod with a
// different port. appProtocol keeps its default, because the first releases of the kind lack the field.
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
	pool.SetOwnerReferences(ownership.ControllerReference(moed, "MoEDeployment"))
	return pool
}

func anyValues(texts map[string]string) map[string]any {
	values := make(map[string]any, len(texts))
	for key, text := range texts {
		values[key] = text
	}
	return values
}
