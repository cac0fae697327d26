// Package front makes what stands before the engines of a MoEDeployment: the Services, the request router, disruption budgets and
// network policies, and what a Gateway needs to ask the router.
//
// Invariants:
//   - All of it follows from the spec, from whether a router can take over from engines that the Service leads to, and from the ports that
//     engines serve on.
//   - Nothing here belongs to one revision: a roll-out changes none of it, unless that is to another port.
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
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/outcome"
)

// Front makes and keeps what stands before engines.
type Front struct {
	client.Client
	// Live reads past the cache what that may not show yet.
	Live client.Reader
	// Store is how the artifact store is reached; request routers read plans from it.
	Store *access.Access
	// ManagerAuthority holds the certificates, as PEM, by which request routers verify managers.
	ManagerAuthority string
	// Image is the image of the request router.
	Image string
	// PullPolicy is when nodes pull it; empty leaves that to the API server.
	PullPolicy corev1.PullPolicy
	// Namespace is the operator's own; empty where it runs outside of the cluster.
	Namespace string
}

// State is what keeps requests from coming to engines, or to the ranks that are best for them.
type State struct {
	// PoolKindMissing tells that the mode needs an InferencePool, and the cluster has no such kind.
	PoolKindMissing bool
	// ServiceTaken is why the Service that clients talk to is not the MoEDeployment's own; empty where it is.
	ServiceTaken string
}

// Reconcile writes everything that does not belong to one revision: the Services, the disruption budgets, the network
// policies, the request router, and what a Gateway needs to ask it. What cannot be written keeps nothing else from being done but what rests
// on it.
func (f *Front) Reconcile(ctx context.Context, moed *semmoev1.MoEDeployment, engines Engines) (State, error) {
	var state State
	podsErr := desired.Ensure(ctx, f.Client, f.Live, moed, &corev1.Service{}, podsService(moed), coreac.ExtractService)
	if podsErr != nil {
		podsErr = fmt.Errorf("reconcile Service of the pods: %w", podsErr)
	}
	budgetErr := desired.Ensure(ctx, f.Client, f.Live, moed, &policyv1.PodDisruptionBudget{}, engineBudget(moed), policyac.ExtractPodDisruptionBudget)
	if budgetErr != nil {
		budgetErr = fmt.Errorf("reconcile PodDisruptionBudget of the engines: %w", budgetErr)
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

// reconcileRouting writes the request router, the Service that may lead to it, and the network policies, which rest on where that leads.
// A Service of somebody else, of which it tells, leads none of our clients anywhere: the pods are protected as if the router had them all.
func (f *Front) reconcileRouting(ctx context.Context, moed *semmoev1.MoEDeployment, engines Engines) (serviceTaken string, err error) {
	var routerErr, serviceErr error
	routerServes := false
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeNone {
		routerErr = f.deleteRouter(ctx, moed)
	} else {
		routerServes, routerErr = f.reconcileRouter(ctx, moed)
	}
	target, err := f.serviceTarget(ctx, moed, routerServes)
	if err != nil {
		return untold(moed), errors.Join(routerErr, err)
	}
	if err := desired.Ensure(ctx, f.Client, f.Live, moed, &corev1.Service{}, service(moed, target), coreac.ExtractService); err != nil {
		serviceErr = fmt.Errorf("reconcile Service: %w", err)
		var foreign *outcome.ForeignError
		if !errors.As(err, &foreign) {
			return untold(moed), errors.Join(routerErr, serviceErr)
		}
		serviceTaken = foreign.Message
	}
	return serviceTaken, errors.Join(routerErr, serviceErr, f.reconcileNetworkPolicies(ctx, moed, target, engines))
}

// untold is what is told of a Service that cannot be looked at now. One that was not the MoEDeployment's own is not taken for it: each error
// would have it ready for a moment.
func untold(moed *semmoev1.MoEDeployment) string {
	if moed.Status.Endpoint != "" {
		return ""
	}
	return fmt.Sprintf("the Service %s was not the MoEDeployment's own, and cannot be looked at now", moed.Name)
}

// serviceTarget is the component that the Service leads to: the request router, or, where that is no proxy, the engines
// themselves. A Service of ours that leads to the engines stays there until a router can take over: a change of the mode drops
// no request.
func (f *Front) serviceTarget(ctx context.Context, moed *semmoev1.MoEDeployment, routerServes bool) (string, error) {
	if moed.Spec.Routing.Mode != semmoev1.RoutingModeRouter {
		return semmoev1.ComponentEngine, nil
	}
	if routerServes {
		return semmoev1.ComponentRouter, nil
	}
	cached := &corev1.Service{}
	if err := f.Get(ctx, client.ObjectKeyFromObject(moed), cached); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read Service: %w", err)
	}
	if desired.CheckOwn(f.Client, moed, cached) != nil || !leadsToEngines(cached) {
		return semmoev1.ComponentRouter, nil
	}
	// The cache may show the Service as it was before a router took over: by that it would be led back.
	var live corev1.ServiceList // the operator may list them, and needs no other right
	if err := f.Live.List(ctx, &live, client.InNamespace(moed.Namespace), client.MatchingFields{"metadata.name": moed.Name}); err != nil {
		return "", fmt.Errorf("read Service: %w", err)
	}
	if len(live.Items) == 1 && !leadsToEngines(&live.Items[0]) {
		return semmoev1.ComponentRouter, nil
	}
	return semmoev1.ComponentEngine, nil
}

func leadsToEngines(service *corev1.Service) bool {
	return service.Spec.Selector[semmoev1.LabelComponent] == semmoev1.ComponentEngine
}

// remove deletes an object that the spec does not want: by the latest spec, as the cache may show an older one.
func (f *Front) remove(ctx context.Context, moed *semmoev1.MoEDeployment, object client.Object) error {
	if changed, err := desired.SpecChanged(ctx, f.Live, moed); err != nil || changed {
		return err
	}
	err := f.Delete(ctx, object, client.Preconditions{UID: new(object.GetUID())}, client.PropagationPolicy(metav1.DeletePropagationBackground))
	return client.IgnoreNotFound(err)
}

// service is what clients talk to, and leads to the pods of a component.
func service(moed *semmoev1.MoEDeployment, component string) *coreac.ServiceApplyConfiguration {
	return coreac.Service(moed.Name, moed.Namespace).
		WithLabels(desired.Labels(moed, component)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(coreac.ServiceSpec().
			WithType(corev1.ServiceTypeClusterIP).
			WithSelector(desired.Selector(moed, component)).
			WithPorts(httpPort(semmoev1.ServicePort, intstr.FromString("http"))))
}

// podsService is headless: it gives each engine pod its name.
func podsService(moed *semmoev1.MoEDeployment) *coreac.ServiceApplyConfiguration {
	return coreac.Service(desired.PodsServiceName(moed), moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentEngine)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(coreac.ServiceSpec().
			WithClusterIP(corev1.ClusterIPNone).
			WithSelector(desired.Selector(moed, semmoev1.ComponentEngine)).
			WithPorts(httpPort(moed.Spec.Engine.Port, intstr.FromString("http"))))
}

func httpPort(port int32, target intstr.IntOrString) *coreac.ServicePortApplyConfiguration {
	return coreac.ServicePort().WithName("http").WithProtocol(corev1.ProtocolTCP).WithAppProtocol("http").WithPort(port).WithTargetPort(target)
}

// engineBudget lets a drain of nodes take no more replicas at once than a roll-out may. Of a replica of several pods any one that
// goes takes the others with it.
func engineBudget(moed *semmoev1.MoEDeployment) *policyac.PodDisruptionBudgetApplyConfiguration {
	return policyac.PodDisruptionBudget(moed.Name, moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentEngine)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(policyac.PodDisruptionBudgetSpec().
			WithUnhealthyPodEvictionPolicy(policyv1.AlwaysAllow). // what does not serve would only hold up the drain of its node
			WithMaxUnavailable(intstr.FromInt32(max(1, *moed.Spec.Rollout.MaxUnavailable))).
			WithSelector(replicaSelector(moed)))
}

// replicaSelector selects all pods of the replicas, also where the spec wants one of each: after a change those of the revision before it
// go on serving, and are whole only together.
func replicaSelector(moed *semmoev1.MoEDeployment) *metav1ac.LabelSelectorApplyConfiguration {
	return metav1ac.LabelSelector().
		WithMatchLabels(map[string]string{semmoev1.LabelDeployment: moed.Name}).
		WithMatchExpressions(metav1ac.LabelSelectorRequirement().WithKey(semmoev1.LabelComponent).WithOperator(metav1.LabelSelectorOpIn).
			WithValues(semmoev1.ComponentEngine, semmoev1.ComponentWorker))
}
