package v1alpha1

// HardwareReference names a hardware profile: what kernels and exchanges take on the machines that are to serve.
//
// +kubebuilder:validation:XValidation:rule="has(self.builtIn) != has(self.configMap)",message="name the hardware profile in exactly one of builtIn and configMap"
type HardwareReference struct {
	// builtIn is the name of a profile that the operator has: h200-nvlink.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	BuiltIn string `json:"builtIn,omitempty"`

	// configMap holds a profile of yours under one of its keys.
	// +optional
	ConfigMap *HardwareConfigMap `json:"configMap,omitempty"`
}

// HardwareConfigMap is a key of a ConfigMap.
type HardwareConfigMap struct {
	// name of the ConfigMap, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// key under which stands what semmoe fit wrote, or what semmoe calibrate measured.
	// +optional
	// +kubebuilder:default="hardware.json"
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	Key string `json:"key,omitempty"`
}
