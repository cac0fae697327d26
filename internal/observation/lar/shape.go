// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"fmt"
	"slices"
)

// Shape contains the model properties needed to count its activations.
type Shape struct {
	// Layers is the number of hidden layers, including dense ones. MoELayers are the indices of the layers with routed
	// experts.
	Layers    int   `json:"layers"`
	MoELayers []int `json:"moeLayers"`
	// Experts is the number of routed experts per layer; ExpertsPerToken is the number of them that a token is sent to.
	Experts         int `json:"experts"`
	ExpertsPerToken int `json:"expertsPerToken"`
	// Hidden is the width of the residual stream, Vocabulary the number of token IDs; 0 if unknown.
	Hidden     int `json:"hidden,omitempty"`
	Vocabulary int `json:"vocabulary,omitempty"`
}

// maxLayers and maxExperts limit a shape: far above any model, and small enough that no product overflows.
const maxLayers, maxExperts = 1 << 12, 1 << 16

// Validate rejects a shape with which activations cannot be counted.
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
	// dispatchBytes and combineBytes are the bytes per value of a token's hidden state on the way to a remote expert
	// and back: fp8 with a float32 scale per scaledValues values, and bf16. Engines that dispatch in bf16 move more, so
	// the estimate is a lower bound of the savings.
	dispatchBytes, combineBytes = 1, 2
	scaleBytes, scaledValues    = 4, 128
)

// BytesPerActivation returns the bytes that an activation moves between ranks if its expert is remote: the token's
// hidden state in fp8, hidden + 4 hidden/128 bytes, and the result in bf16, 2 hidden bytes. It is 0 if the hidden size
// is unknown.
func (s Shape) BytesPerActivation() float64 {
	hidden := float64(s.Hidden)
	return hidden*dispatchBytes + hidden*scaleBytes/scaledValues + hidden*combineBytes
}

// maxGroups is the number of layer groups: enough to distinguish early from late layers, few enough for metrics.
const maxGroups = 4

// groups returns the number of layer groups of the model.
func (s Shape) groups() int { return min(maxGroups, len(s.MoELayers)) }

// Group returns the layer group of the i-th MoE layer. Groups are consecutive layers, as equal in number as possible.
func (s Shape) Group(i int) int { return i * s.groups() / len(s.MoELayers) }
