// Package desired is what the parts of the controller for MoEDeployments have in common: what a spec comes to where it leaves something
// open, and how children are called, labelled and written.
package desired

import (
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/owned"
)

// Manager is the field manager of everything that this controller writes.
const Manager = "semmoe-moedeployment"

// What follows a MoEDeployment's name in those of its children whose names hold no hash.
const (
	podsSuffix   = "-pods"
	routerSuffix = "-router"
	tablesSuffix = "-tables"
)

// ChildSuffixes are what follows a MoEDeployment's name in those of its children: no other MoEDeployment of the namespace may be
// called so.
func ChildSuffixes() []string { return []string{podsSuffix, routerSuffix, tablesSuffix} }

// PodsServiceName is the headless Service that gives each engine pod its name.
func PodsServiceName(moed *semmoev1.MoEDeployment) string { return moed.Name + podsSuffix }

// RouterName is that of the request router and of all that belongs to it.
func RouterName(moed *semmoev1.MoEDeployment) string { return moed.Name + routerSuffix }

// TablesName is the ConfigMap that says whose tables the request router uses. There may be none.
func TablesName(moed *semmoev1.MoEDeployment) string { return moed.Name + tablesSuffix }

// Selector selects the pods of one component of a MoEDeployment.
func Selector(moed *semmoev1.MoEDeployment, component string) map[string]string {
	return map[string]string{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: component}
}

// Labels are those of every object of one component.
func Labels(moed *semmoev1.MoEDeployment, component string, more ...string) map[string]string {
	return owned.Labels(component, moed.Name, append(more, semmoev1.LabelDeployment, moed.Name)...)
}

// OwnerReference makes the object a child that is garbage-collected with the MoEDeployment.
func OwnerReference(moed *semmoev1.MoEDeployment) *metav1ac.OwnerReferenceApplyConfiguration {
	return owned.Reference(moed, "MoEDeployment")
}
