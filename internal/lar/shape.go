package lar

import (
	"fmt"
	"slices"
)

// Shape is what must be known of a model to count its activations.
type Shape struct {
	// Layers is the number of hidden layers, dense ones included; MoELayers are the indices of those with routed experts.
	Layers    int   `json:"layers"`
	MoELayers []int `json:"moeLayers"`
	// Experts is the number of routed experts of a layer, ExpertsPerToken how many of them a token is sent to.
	Experts         int `json:"experts"`
	ExpertsPerToken int `json:"expertsPerToken"`
	// Hidden is the width of the residual stream, Vocabulary the number of token ids; 0 where they are not known.
	Hidden     int `json:"hidden,omitempty"`
	Vocabulary int `json:"vocabulary,omitempty"`
}

// maxLayers and maxExperts bound a shape: far above any model, and small enough that no product of them overflows.
const maxLayers, maxExperts = 1 << 12, 1 << 16

// Validate refuses a shape by which nothing can be counted.
func (s Shape) Validate() error {
	switch {
	case s.Layers <= 0 || s.Experts <= 0 || s.ExpertsPerToken <= 0:
		return fmt.Errorf("layers, experts and expertsPerToken are %d, %d and %d: all must be positive", s.Layers, s.Experts, s.ExpertsPerToken)
	case s.Layers > maxLayers || s.Experts > maxExperts || s.ExpertsPerToken > s.Experts:
		return fmt.Errorf("layers, experts and expertsPerToken are %d, %d and %d: at most %d, %d and the experts are allowed", s.Layers, s.Experts, s.ExpertsPerToken, maxLayers, maxExperts)
	case len(s.MoELayers) > s.Layers:
		return fmt.Errorf("moeLayers has %d entries: at most the %d layers are allowed", len(s.MoELayers), s.Layers)
	case len(s.MoELayers) == 0:
		return fmt.Errorf("moeLayers is empty: a model without routed experts has no activations")
	case slices.Min(s.MoELayers) < 0 || slices.Max(s.MoELayers) >= s.Layers:
		return fmt.Errorf("moeLayers is %v: each must be a layer from 0 to %d", s.MoELayers, s.Layers-1)
	case s.Hidden < 0 || s.Vocabulary < 0:
		return fmt.Errorf("hidden and vocabulary are %d and %d: neither can be negative", s.Hidden, s.Vocabulary)
	}
	return nil
}

const (
	// dispatchBytes and combineBytes are what one value of a token costs on its way to a remote expert and back: fp8 with a
	// float32 scale for every scaledValues of them, and bf16. Engines that dispatch in bf16 move more, so what is estimated
	// is the less that an engine saves.
	dispatchBytes, combineBytes = 1, 2
	scaleBytes, scaledValues    = 4, 128
)

// BytesPerActivation is what an activation moves between ranks when its expert is remote: the token's hidden state there in
// fp8, hidden + 4 hidden/128 bytes, and the result back in bf16, 2 hidden bytes. It is 0 where the hidden size is not known.
func (s Shape) BytesPerActivation() float64 {
	hidden := float64(s.Hidden)
	return hidden*dispatchBytes + hidden*scaleBytes/scaledValues + hidden*combineBytes
}

// maxGroups is the number of layer groups: enough to tell early layers from late ones, few enough for metrics.
const maxGroups = 4

// groups is the number of layer groups of the model.
func (s Shape) groups() int { return min(maxGroups, len(s.MoELayers)) }

// Group returns the layer group of the i'th MoE layer: consecutive layers, as equal in number as possible.
func (s Shape) Group(i int) int { return i * s.groups() / len(s.MoELayers) }
