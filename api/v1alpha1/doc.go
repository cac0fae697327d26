// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 contains the types of the API group semmoe.io, version v1alpha1.
//
// The package contains only types and their validation markers. Its rules: enums instead of booleans; no floats, and no
// maps except those that mirror Kubernetes types; durations are int32 fields with the suffix Seconds; every list and
// number has bounds; cross-field rules are CEL. Status reports observations: no controller reads its status to make
// decisions.
//
// +kubebuilder:object:generate=true
// +kubebuilder:ac:generate=true
// +groupName=semmoe.io
package v1alpha1
