// SPDX-License-Identifier: Apache-2.0

package counts

import "github.com/semmoe/operator/solver/affinity"

// Layers returns the counts in the format of the solver, one element for each MoE layer.
func (c *Counts) Layers() []affinity.Counts {
	layers, occurrences := make([]affinity.Counts, len(c.layers)), make([]float32, c.Model.Vocabulary)
	for token, n := range c.occurrences {
		occurrences[token] = float32(n)
	}
	for layer := range c.layers {
		layers[layer] = c.layer(layer, occurrences)
	}
	return layers
}

func (c *Counts) layer(layer int, occurrences []float32) affinity.Counts {
	l := affinity.Counts{
		Experts: c.Model.Experts, TopK: c.Model.ExpertsPerToken,
		Start: make([]int, c.Model.Vocabulary+1), Occurrences: occurrences,
	}
	c.ForEach(layer, func(token int32, expert uint16, n uint32) {
		l.Expert, l.Count = append(l.Expert, expert), append(l.Count, float32(n))
		l.Start[token+1] = len(l.Expert)
	})
	for token := range c.Model.Vocabulary { // a token without occurrences has an empty range
		l.Start[token+1] = max(l.Start[token+1], l.Start[token])
	}
	return l
}
