package router

import (
	"fmt"
	"slices"
)

// Shape is what a router must know of a model to count its activations.
type Shape struct {
	// Layers is the number of hidden layers, dense ones included; MoELayers are the indices of those with routed experts.
	Layers    int   `json:"layers"`
	MoELayers []int `json:"moeLayers"`
	// Experts is the number of routed experts of a layer, ExpertsPerToken how many of them a token is sent to.
	Experts         int `json:"experts"`
	ExpertsPerToken int `json:"expertsPerToken"`
}

// Validate refuses a shape by which nothing can be counted.
func (s Shape) Validate() error {
	switch {
	case s.Layers <= 0 || s.Experts <= 0 || s.ExpertsPerToken <= 0:
		return fmt.Errorf("layers, experts and expertsPerToken are %d, %d and %d: all must be positive", s.Layers, s.Experts, s.ExpertsPerToken)
	case len(s.MoELayers) == 0:
		return fmt.Errorf("moeLayers is empty: a model without routed experts has no activations")
	case slices.Min(s.MoELayers) < 0 || slices.Max(s.MoELayers) >= s.Layers:
		return fmt.Errorf("moeLayers is %v: each must be a layer from 0 to %d", s.MoELayers, s.Layers-1)
	}
	return nil
}

// Activations counts (token, layer, expert) triples of routed experts.
type Activations struct {
	// Local are those whose expert has a copy on the rank that served the token; Total are all.
	Local int64 `json:"local"`
	Total int64 `json:"total"`
}

// Locality reports whether an expert of a layer (the model's index) has a copy on the rank that served.
type Locality func(layer, expert int) bool

// Contiguous is the locality of a rank under the engine's own placement: the experts of each layer spread over the ranks
// in order.
func Contiguous(shape Shape, ranks, rank int) (Locality, error) {
	if ranks <= 0 || shape.Experts%ranks != 0 || rank < 0 || rank >= ranks {
		return nil, fmt.Errorf("rank %d of %d does not fit %d experts", rank, ranks, shape.Experts)
	}
	perRank := shape.Experts / ranks
	return func(_, expert int) bool { return expert/perRank == rank }, nil
}

// CountActivations counts the activations of a request that one rank served. experts is
// [tokens][Shape.Layers][Shape.ExpertsPerToken]. Ids at or above the number of experts are shared experts that an engine
// reports with the routed ones; they do not count.
func CountActivations(experts []int32, shape Shape, local Locality) (Activations, error) {
	row := shape.Layers * shape.ExpertsPerToken
	if row <= 0 || len(experts)%row != 0 {
		return Activations{}, fmt.Errorf("%d expert ids do not fit %d layers of %d experts per token", len(experts), shape.Layers, shape.ExpertsPerToken)
	}
	var count Activations
	for token := 0; token < len(experts); token += row {
		for _, layer := range shape.MoELayers {
			start := token + layer*shape.ExpertsPerToken
			for _, expert := range experts[start : start+shape.ExpertsPerToken] {
				if expert < 0 || int(expert) >= shape.Experts {
					continue
				}
				count.Total++
				if local(layer, int(expert)) {
					count.Local++
				}
			}
		}
	}
	return count, nil
}
