// SPDX-License-Identifier: Apache-2.0

package trace

// WithLayers returns the trace of the MoE layers with the given indices, without look-ahead. It shares the tokens.
func (t *Trace) WithLayers(layers []int) *Trace {
	part := *t
	part.LookAhead, part.Model.Layers = nil, make([]int, 0, len(layers))
	for _, l := range layers {
		part.Model.Layers = append(part.Model.Layers, t.Model.Layers[l])
	}
	part.Experts = make([]uint16, 0, len(t.Tokens)*len(layers)*t.Model.TopK)
	for position := range t.Tokens {
		for _, l := range layers {
			part.Experts = append(part.Experts, t.Row(position, l)...)
		}
	}
	return &part
}
