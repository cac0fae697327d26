// Package v1alpha1 holds the types of the semmoe.io API group, version v1alpha1.
//
// The package has types and their validation markers, and nothing else. Its rules: enums instead of booleans, no floats
// and no maps of our own, durations as int32 fields that end in Seconds, bounds on every list and number, cross-field
// rules as CEL. Status is a report of what was observed: no controller ever reads its own status to decide what to do.
//
// +kubebuilder:object:generate=true
// +kubebuilder:ac:generate=true
// +groupName=semmoe.io
package v1alpha1
