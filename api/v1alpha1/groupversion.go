// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	// GroupVersion is the API group and version of every kind in this package.
	GroupVersion = schema.GroupVersion{Group: "semmoe.io", Version: "v1alpha1"}

	// SchemeGroupVersion is GroupVersion under the name that generated code expects.
	SchemeGroupVersion = GroupVersion

	// SchemeBuilder registers the kinds of this package.
	SchemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

	// AddToScheme adds the kinds of this package to a scheme.
	AddToScheme = SchemeBuilder.AddToScheme
)

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, &MoEDeployment{}, &MoEDeploymentList{},
		&AffinityProfile{}, &AffinityProfileList{}, &PlacementPlan{}, &PlacementPlanList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
