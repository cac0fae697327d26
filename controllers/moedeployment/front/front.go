// SPDX-License-Identifier: Apache-2.0

// Package front manages the objects in front of the engines of a MoEDeployment: the Services, the request router,
// disruption budgets, network policies, and what a Gateway needs to query the router.
//
// Invariants:
//   - All objects follow from the spec, from whether a router can replace engines as the target of the Service, and
//     from the ports that engines serve on.
//   - No object belongs to one revision: a rollout changes none of them, except for a rollout to another port, or from
//     engines with TLS to engines without it.
package front

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	policyac "k8s.io/client-go/applyconfigurations/policy/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/apply"
	"github.com/semmoe/operator/internal/kube/result"
)

// Front manages the objects in front of the engines.
type Front struct {
	client.Client
	// Live bypasses the cache, which may be out of date.
	Live client.Reader
	// Store is the access to the artifact store. Request routers read plans from it.
	Store *access.Access
	// ManagerAuthority contains the CA certificates (PEM) with which request routers verify managers.
	ManagerAuthority string
	// Image is the image of the request router.
	Image string
	// PullPolicy is the image pull policy. If empty, the API server sets its default.
	PullPolicy corev1.PullPolicy
	// Namespace is the operator's own namespace. It is empty if the operator runs outside the cluster.
	Namespace string
}

// State reports what prevents requests from reaching engines, or the best ranks.
type State struct {
	// PoolKindMissing reports that the mode needs an InferencePool, and the cluster lacks the kind.
	PoolKindMissing bool
	// ServiceTaken is why the Service for clients does not belong to the MoEDeployment; empty if it does.
	ServiceTaken string
}

// Reconcile writes all objects that do not belong to one revision: the Services, the disruption budgets, the network
// policies, the request router, and the objects for a Gateway. A failed write blocks only the objects that depend on
// it.
func (f *Front) Reconcile(ctx context.Context, moed *semmoev1.MoEDeployment, engines Engines) (State, error) {
	var state State
	podsErr := childobjects.Ensure(ctx, f.Client, f.Live, moed, &corev1.Service{}, podsService(moed), coreac.ExtractService)
	if podsErr != nil {
		podsErr = fmt.Errorf("failed to reconcile the Service of the pods: %w", podsErr)
	}
	budgetErr := childobjects.Ensure(ctx, f.Client, f.Live, moed, &policyv1.PodDisruptionBudget{}, engineBudget(moed), policyac.ExtractPodDisruptionBudget)
	if budgetErr != nil {
		budgetErr = fmt.Errorf("failed to reconcile the PodDisruptionBudget of the engines: %w", budgetErr)
	}
	var routingErr, gatewayErr error
	state.ServiceTaken, routingErr = f.reconcileRouting(ctx, moed, engines)
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeEndpointPicker {
		state.PoolKindMissing, gatewayErr = f.reconcilePicker(ctx, moed, engines)
	} else {
		gatewayErr = f.deletePicker(ctx, moed)
	}
	return state, errors.Join(podsErr, budgetErr, routingErr, gatewayErr)
}

// reconcileRouting writes the request router, the Service that may select it, and the network policies, which depend on
// the target of the Service. If the Service belongs to another owner, it reports this. The policies then protect the
// engine pods as if the Service selected the router.
func (f *Front) reconcileRouting(ctx context.Context, moed *semmoev1.MoEDeployment, engines Engines) (serviceTaken string, err error) {
	var routerErr, serviceErr error
	routerServes := false
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeNone {
		routerErr = f.deleteRouter(ctx, moed)
	} else {
		routerServes, routerErr = f.reconcileRouter(ctx, engines.withTLS(moed))
	}
	target, err := f.serviceTarget(ctx, moed, routerServes)
	if err != nil {
		return lastServiceTaken(moed), errors.Join(routerErr, err)
	}
	if err := childobjects.Ensure(ctx, f.Client, f.Live, moed, &corev1.Service{}, service(moed, target), coreac.ExtractService); err != nil {
		serviceErr = fmt.Errorf("failed to reconcile the Service: %w", err)
		var foreign *result.ForeignError
		if !errors.As(err, &foreign) {
			return lastServiceTaken(moed), errors.Join(routerErr, serviceErr)
		}
		serviceTaken = foreign.Message
	}
	return serviceTaken, errors.Join(routerErr, serviceErr, f.reconcileNetworkPolicies(ctx, moed, target, engines))
}

// lastServiceTaken returns the last reported state of a Service that cannot be read now. A Service that belonged to
// another owner keeps that report, because each read error would set Ready to True for a moment.
func lastServiceTaken(moed *semmoev1.MoEDeployment) string {
	if moed.Status.Endpoint != "" {
		return ""
	}
	return fmt.Sprintf("the Service %s belonged to another owner, and cannot be read now", moed.Name)
}

// serviceTarget returns the component that the Service selects: the request router, or the engines if the router is no
// proxy. An operator-managed Service that selects the engines is kept until a router can take over, so that a change of
// the mode drops no request, unless clients need TLS or a key: engines check neither.
func (f *Front) serviceTarget(ctx context.Context, moed *semmoev1.MoEDeployment, routerServes bool) (string, error) {
	if moed.Spec.Routing.Mode != semmoev1.RoutingModeRouter {
		return semmoev1.ComponentEngine, nil
	}
	if routerServes || secured(moed) {
		return semmoev1.ComponentRouter, nil
	}
	cached := &corev1.Service{}
	if err := f.Get(ctx, client.ObjectKeyFromObject(moed), cached); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("failed to read the Service: %w", err)
	}
	if childobjects.CheckOwn(f.Client, moed, cached) != nil || !selectsEngines(cached) {
		return semmoev1.ComponentRouter, nil
	}
	// The cache may show the Service before a router took over. Using it would switch the Service back.
	var live corev1.ServiceList // RBAC allows list; get is not needed
	if err := f.Live.List(ctx, &live, client.InNamespace(moed.Namespace), client.MatchingFields{"metadata.name": moed.Name}); err != nil {
		return "", fmt.Errorf("failed to read the Service: %w", err)
	}
	if len(live.Items) == 1 && !selectsEngines(&live.Items[0]) {
		return semmoev1.ComponentRouter, nil
	}
	return semmoev1.ComponentEngine, nil
}

func selectsEngines(service *corev1.Service) bool {
	return service.Spec.Selector[semmoev1.LabelComponent] == semmoev1.ComponentEngine
}

// remove deletes an object that the spec does not need. It checks the latest spec first, because the cache may be out
// of date.
func (f *Front) remove(ctx context.Context, moed *semmoev1.MoEDeployment, object client.Object) error {
	if changed, err := childobjects.SpecChanged(ctx, f.Live, moed); err != nil || changed {
		return err
	}
	err := f.Delete(ctx, object, client.Preconditions{UID: new(object.GetUID())}, client.PropagationPolicy(metav1.DeletePropagationBackground))
	if err == nil {
		apply.LogWrite(ctx, 1, "Deleted an object", object)
	}
	return client.IgnoreNotFound(err)
}

// service returns the Service for clients, which selects the pods of a component.
func service(moed *semmoev1.MoEDeployment, component string) *coreac.ServiceApplyConfiguration {
	return coreac.Service(moed.Name, moed.Namespace).
		WithLabels(desired.Labels(moed, component)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(coreac.ServiceSpec().
			WithType(corev1.ServiceTypeClusterIP).
			WithSelector(desired.Selector(moed, component)).
			WithPorts(httpPort(semmoev1.ServicePort, intstr.FromString("http")).WithAppProtocol(scheme(moed))))
}

// scheme returns the URL scheme of the Service for clients.
func scheme(moed *semmoev1.MoEDeployment) string {
	if moed.Spec.Routing.TLS != nil {
		return "https"
	}
	return "http"
}

// engineScheme returns the URL scheme of engines.
func engineScheme(moed *semmoev1.MoEDeployment) string {
	if moed.Spec.Engine.TLS != nil {
		return semmoev1.SchemeHTTPS
	}
	return "http"
}

// podsService returns the headless Service that gives each engine pod a DNS name.
func podsService(moed *semmoev1.MoEDeployment) *coreac.ServiceApplyConfiguration {
	return coreac.Service(desired.PodsServiceName(moed), moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentEngine)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(coreac.ServiceSpec().
			WithClusterIP(corev1.ClusterIPNone).
			WithSelector(desired.Selector(moed, semmoev1.ComponentEngine)).
			WithPorts(httpPort(moed.Spec.Engine.Port, intstr.FromString("http")).WithAppProtocol(engineScheme(moed))))
}

func httpPort(port int32, target intstr.IntOrString) *coreac.ServicePortApplyConfiguration {
	return coreac.ServicePort().WithName("http").WithProtocol(corev1.ProtocolTCP).WithAppProtocol("http").WithPort(port).WithTargetPort(target)
}

// engineBudget limits node drains to as many replicas at once as a rollout. In a replica with several pods, the
// eviction of one pod stops the others too.
func engineBudget(moed *semmoev1.MoEDeployment) *policyac.PodDisruptionBudgetApplyConfiguration {
	return policyac.PodDisruptionBudget(moed.Name, moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentEngine)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(policyac.PodDisruptionBudgetSpec().
			WithUnhealthyPodEvictionPolicy(policyv1.AlwaysAllow). // a pod that does not serve must not block the drain of its node
			WithMaxUnavailable(intstr.FromInt32(max(1, *moed.Spec.Rollout.MaxUnavailable))).
			WithSelector(replicaSelector(moed)))
}

// replicaSelector selects all pods of the replicas, even if the spec needs one pod per replica: after a change,
// replicas of the previous revision continue to serve, and need all of their pods.
func replicaSelector(moed *semmoev1.MoEDeployment) *metav1ac.LabelSelectorApplyConfiguration {
	return metav1ac.LabelSelector().
		WithMatchLabels(map[string]string{semmoev1.LabelDeployment: moed.Name}).
		WithMatchExpressions(metav1ac.LabelSelectorRequirement().WithKey(semmoev1.LabelComponent).WithOperator(metav1.LabelSelectorOpIn).
			WithValues(semmoev1.ComponentEngine, semmoev1.ComponentWorker))
}
