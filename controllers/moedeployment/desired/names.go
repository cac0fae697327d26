// SPDX-License-Identifier: Apache-2.0

// Package desired contains helpers shared by the parts of the MoEDeployment controller: defaults of the spec,
// and names and labels of children.
package desired

import (
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/ownership"
)

// Manager is the field manager of everything that this controller writes.
const Manager = "semmoe-moedeployment"

// Suffixes of children whose names contain no hash. The prefix is the MoEDeployment's name.
const (
	podsSuffix   = "-pods"
	routerSuffix = "-router"
	tablesSuffix = "-tables"
)

// ChildSuffixes returns the suffixes of children. No other MoEDeployment in the namespace may be named like a child.
func ChildSuffixes() []string { return []string{podsSuffix, routerSuffix, tablesSuffix} }

// PodsServiceName returns the name of the headless Service that gives each engine pod a DNS name.
func PodsServiceName(moed *semmoev1.MoEDeployment) string { return moed.Name + podsSuffix }

// EngineServerName returns the name in the certificates of engines with TLS: the DNS name of the Service of their pods.
func EngineServerName(moed *semmoev1.MoEDeployment) string {
	return PodsServiceName(moed) + "." + moed.Namespace + ".svc"
}

// RouterName returns the name of the request router and of its objects.
func RouterName(moed *semmoev1.MoEDeployment) string { return moed.Name + routerSuffix }

// TablesName returns the name of the optional ConfigMap that selects the tables for the request router.
func TablesName(moed *semmoev1.MoEDeployment) string { return moed.Name + tablesSuffix }

// Selector returns the labels that select the pods of one component of a MoEDeployment.
func Selector(moed *semmoev1.MoEDeployment, component string) map[string]string {
	return map[string]string{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: component}
}

// Labels returns the labels of every object of one component.
func Labels(moed *semmoev1.MoEDeployment, component string, more ...string) map[string]string {
	return ownership.Labels(component, moed.Name, append(more, semmoev1.LabelDeployment, moed.Name)...)
}

// OwnerReference returns the controller reference with which children are garbage-collected.
func OwnerReference(moed *semmoev1.MoEDeployment) *metav1ac.OwnerReferenceApplyConfiguration {
	return ownership.Reference(moed, "MoEDeployment")
}
