// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// HardwareReference identifies a hardware profile: the measured times of kernels and exchanges on the serving machines.
//
// +kubebuilder:validation:XValidation:rule="has(self.builtIn) != has(self.configMap)",message="name the hardware profile in exactly one of builtIn and configMap"
type HardwareReference struct {
	// builtIn is the name of a profile that the operator contains: h200-nvlink.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	BuiltIn string `json:"builtIn,omitempty"`

	// configMap contains a user-provided profile in one of its keys.
	// +optional
	ConfigMap *HardwareConfigMap `json:"configMap,omitempty"`
}

// HardwareConfigMap identifies a key of a ConfigMap.
type HardwareConfigMap struct {
	// name is the name of the ConfigMap, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// key is the key of the profile: the output of semmoe-lab fit or semmoe calibrate. Default hardware.json.
	// +optional
	// +kubebuilder:default="hardware.json"
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	Key string `json:"key,omitempty"`
}
