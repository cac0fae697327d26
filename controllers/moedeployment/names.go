package moedeployment

import (
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/owned"
)

// manager is the field manager of everything that this controller writes.
const manager = "semmoe-moedeployment"

// What follows a MoEDeployment's name in those of its children whose names hold no hash.
const (
	podsSuffix   = "-pods"
	routerSuffix = "-router"
	tablesSuffix = "-tables"
)

// ChildSuffixes are what follows a MoEDeployment's name in those of its children: no other MoEDeployment of the namespace may be
// called so.
func ChildSuffixes() []string { return []string{podsSuffix, routerSuffix, tablesSuffix} }

func podsServiceName(moed *semmoev1.MoEDeployment) string { return moed.Name + podsSuffix }
func routerName(moed *semmoev1.MoEDeployment) string      { return moed.Name + routerSuffix }

// tablesName is the ConfigMap that says whose tables the request router uses. There may be none.
func tablesName(moed *semmoev1.MoEDeployment) string { return moed.Name + tablesSuffix }

// selector selects the pods of one component of a MoEDeployment.
func selector(moed *semmoev1.MoEDeployment, component string) map[string]string {
	return map[string]string{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: component}
}

// labelsOf are those of every object of one component.
func labelsOf(moed *semmoev1.MoEDeployment, component string, more ...string) map[string]string {
	return owned.Labels(component, moed.Name, append(more, semmoev1.LabelDeployment, moed.Name)...)
}

// ownerReference makes the object a child that is garbage-collected with the MoEDeployment.
func ownerReference(moed *semmoev1.MoEDeployment) *metav1ac.OwnerReferenceApplyConfiguration {
	return owned.Reference(moed, "MoEDeployment")
}
