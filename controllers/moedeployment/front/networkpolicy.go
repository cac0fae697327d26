// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	networkingac "k8s.io/client-go/applyconfigurations/networking/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/router/managerauth"
)

const largestPort = 65535

// reconcileNetworkPolicies writes the policies that the spec needs, and deletes the others. Policies restrict ingress
// only. Probes of the kubelet are not affected: traffic from a pod's own node is always allowed.
func (f *Front) reconcileNetworkPolicies(ctx context.Context, moed *semmoev1.MoEDeployment, serviceTarget string, engines Engines) error {
	wanted := networkPolicies(moed, serviceTarget, f.Namespace, engines)
	var failed error
	for _, name := range []string{moed.Name, desired.RouterName(moed)} {
		policy := wanted[name]
		if policy == nil {
			if err := f.deletePolicy(ctx, moed, name); err != nil {
				failed = errors.Join(failed, fmt.Errorf("failed to delete NetworkPolicy %s: %w", name, err))
			}
			continue
		}
		if err := childobjects.EnsureLatest(ctx, f.Client, f.Live, moed, &networkingv1.NetworkPolicy{}, policy, networkingac.ExtractNetworkPolicy); err != nil {
			failed = errors.Join(failed, fmt.Errorf("failed to reconcile NetworkPolicy %s: %w", name, err))
		}
	}
	return failed
}

func (f *Front) deletePolicy(ctx context.Context, moed *semmoev1.MoEDeployment, name string) error {
	policy := &networkingv1.NetworkPolicy{}
	err := f.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: name}, policy)
	if err == nil && metav1.IsControlledBy(policy, moed) && policy.DeletionTimestamp == nil {
		err = f.remove(ctx, moed, policy)
	}
	return client.IgnoreNotFound(err)
}

// networkPolicies returns the policies that the spec needs, by name. Engines get a policy only while the Service
// selects the request router; in other modes, clients and Gateways of any namespace connect to them. operator is the
// operator's namespace; empty if it runs outside the cluster.
func networkPolicies(moed *semmoev1.MoEDeployment, serviceTarget, operator string, engines Engines) map[string]*networkingac.NetworkPolicyApplyConfiguration {
	wanted := map[string]*networkingac.NetworkPolicyApplyConfiguration{}
	if moed.Spec.Routing.NetworkPolicy == semmoev1.NetworkPolicyNone || moed.Spec.Routing.Mode == semmoev1.RoutingModeNone {
		return wanted
	}
	open := networkingac.NetworkPolicyIngressRule().WithPorts(tcpPorts(semmoev1.ServicePort)...)
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeEndpointPicker {
		open = networkingac.NetworkPolicyIngressRule().
			WithPorts(tcpPorts(semmoev1.PickerPort, semmoev1.PickerHealthPort)...).
			WithFrom(gateways(moed)...)
	}
	if serviceTarget == semmoev1.ComponentRouter {
		first, last := revisions.Launch(moed).KVEventPorts()
		wanted[moed.Name] = enginePolicy(moed, operator, engines.ports(moed), first, last)
	}
	wanted[desired.RouterName(moed)] = ingressPolicy(moed, desired.RouterName(moed), semmoev1.ComponentRouter,
		open,
		networkingac.NetworkPolicyIngressRule().WithPorts(tcpPorts(desired.RouterMetricsPort)...).WithFrom(observers(operator)...),
		networkingac.NetworkPolicyIngressRule().WithPorts(tcpPorts(managerauth.Port)...).WithFrom(managers(operator)...))
	return wanted
}

// enginePolicy restricts the serving ports (ascending) to the router, the operator and monitoring: engines have
// unauthenticated administrative routes there. It restricts the ports of KV events, from first to last unless 0, to the
// router: events contain prompts. All other ports stay open, because collective libraries choose ports
// freely, and so do user-provided containers.
func enginePolicy(moed *semmoev1.MoEDeployment, operator string, ports []int32, first, last int32) *networkingac.NetworkPolicyApplyConfiguration {
	serving := networkingac.NetworkPolicyIngressRule().WithPorts(tcpPorts(ports...)...)
	if peers := observers(operator); len(peers) > 0 { // the operator requests the baseline outputs without a plan
		serving.WithFrom(podsOf(moed, semmoev1.ComponentRouter), podsOf(moed, semmoev1.ComponentEngine)).WithFrom(peers...)
	}
	rules := []*networkingac.NetworkPolicyIngressRuleApplyConfiguration{serving}
	restricted := slices.Clone(ports)
	if first > 0 {
		rules = append(rules, networkingac.NetworkPolicyIngressRule().WithPorts(portRange(corev1.ProtocolTCP, first, last)).WithFrom(podsOf(moed, semmoev1.ComponentRouter)))
		for port := first; port <= last; port++ {
			restricted = append(restricted, port)
		}
		slices.Sort(restricted)
	}
	rules = append(rules, networkingac.NetworkPolicyIngressRule().WithPorts(portsBut(restricted)...))
	return ingressPolicy(moed, moed.Name, semmoev1.ComponentEngine, rules...)
}

func ingressPolicy(moed *semmoev1.MoEDeployment, name, component string, rules ...*networkingac.NetworkPolicyIngressRuleApplyConfiguration) *networkingac.NetworkPolicyApplyConfiguration {
	return networkingac.NetworkPolicy(name, moed.Namespace).
		WithLabels(desired.Labels(moed, component)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(networkingac.NetworkPolicySpec().
			WithPodSelector(metav1ac.LabelSelector().WithMatchLabels(desired.Selector(moed, component))).
			WithPolicyTypes(networkingv1.PolicyTypeIngress).
			WithIngress(rules...))
}

// observers returns the operator and monitoring as peers. It returns no peer, which in a rule admits every client, if
// the operator's namespace is unknown: the policy would lock out the operator.
func observers(operator string) []*networkingac.NetworkPolicyPeerApplyConfiguration {
	if operator == "" {
		return nil
	}
	return append(managers(operator), networkingac.NetworkPolicyPeer().WithNamespaceSelector(metav1ac.LabelSelector().
		WithMatchExpressions(metav1ac.LabelSelectorRequirement().WithKey(semmoev1.LabelMonitoring).WithOperator(metav1.LabelSelectorOpExists))))
}

// managers returns the operator's namespace as a peer. It returns no peer, which in a rule admits every client, where
// the namespace is unknown.
func managers(operator string) []*networkingac.NetworkPolicyPeerApplyConfiguration {
	if operator == "" {
		return nil
	}
	return []*networkingac.NetworkPolicyPeerApplyConfiguration{
		networkingac.NetworkPolicyPeer().WithNamespaceSelector(metav1ac.LabelSelector().
			WithMatchLabels(map[string]string{corev1.LabelMetadataName: operator})),
	}
}

// gateways returns the peers that may use the endpoint picker. The default is no peer, which in a rule admits every
// client.
func gateways(moed *semmoev1.MoEDeployment) []*networkingac.NetworkPolicyPeerApplyConfiguration {
	namespaces := moed.Spec.Routing.GatewayNamespaces
	if len(namespaces) == 0 {
		return nil
	}
	return []*networkingac.NetworkPolicyPeerApplyConfiguration{
		networkingac.NetworkPolicyPeer().WithNamespaceSelector(metav1ac.LabelSelector().
			WithMatchExpressions(metav1ac.LabelSelectorRequirement().
				WithKey(corev1.LabelMetadataName).WithOperator(metav1.LabelSelectorOpIn).WithValues(namespaces...))),
	}
}

func podsOf(moed *semmoev1.MoEDeployment, component string) *networkingac.NetworkPolicyPeerApplyConfiguration {
	return networkingac.NetworkPolicyPeer().WithPodSelector(metav1ac.LabelSelector().WithMatchLabels(desired.Selector(moed, component)))
}

func tcpPorts(numbers ...int32) []*networkingac.NetworkPolicyPortApplyConfiguration {
	var ports []*networkingac.NetworkPolicyPortApplyConfiguration
	for _, number := range numbers {
		ports = append(ports, networkingac.NetworkPolicyPort().WithProtocol(corev1.ProtocolTCP).WithPort(intstr.FromInt32(number)))
	}
	return ports
}

// portsBut returns all ports except the given TCP ports, which are in ascending order.
func portsBut(taken []int32) []*networkingac.NetworkPolicyPortApplyConfiguration {
	ports := []*networkingac.NetworkPolicyPortApplyConfiguration{
		portRange(corev1.ProtocolUDP, 1, largestPort), portRange(corev1.ProtocolSCTP, 1, largestPort),
	}
	next := int32(1)
	for _, port := range append(slices.Clone(taken), largestPort+1) {
		if port > next {
			ports = append(ports, portRange(corev1.ProtocolTCP, next, port-1))
		}
		next = port + 1
	}
	return ports
}

func portRange(protocol corev1.Protocol, first, last int32) *networkingac.NetworkPolicyPortApplyConfiguration {
	return networkingac.NetworkPolicyPort().WithProtocol(protocol).WithPort(intstr.FromInt32(first)).WithEndPort(last)
}
