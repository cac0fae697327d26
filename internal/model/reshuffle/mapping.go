// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"slices"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// mapping maps each tensor of the output to its source.
type mapping struct {
	config *checkpoint.Config
	// toOld and toNew hold the permutations of the layers that change.
	toOld, toNew map[int][]int
	// gathered maps each tensor that contains values of all experts of a layer to the location and the permutation of
	// these values.
	gathered map[string]gathered
}

// gathered describes how the values of experts move within a tensor. The values of expert j come from expert
// newToOld[j].
type gathered struct {
	axis     checkpoint.Axis
	newToOld []int
}

// newMapping returns the mapping of a permutation, and an error if the permutation does not fit the checkpoint.
func newMapping(c *checkpoint.Checkpoint, p *Permutation) (*mapping, error) {
	layers, err := c.MoELayers()
	if err != nil {
		return nil, err
	}
	m := &mapping{c.Config, map[int][]int{}, map[int][]int{}, map[string]gathered{}}
	for _, layer := range p.Layers {
		l := layers[layer.Layer]
		if l == nil {
			return nil, checkpoint.Invalidf("the permutation lists layer %d, which is not an MoE layer of the checkpoint %s (%d hidden layers, MoE layers %v): use the permutation of this model",
				layer.Layer, c.Dir, c.Config.Layers, c.Config.MoELayers)
		}
		if len(layer.NewToOld) != c.Config.Experts {
			return nil, checkpoint.Invalidf("the permutation lists %d experts in layer %d; the checkpoint %s has %d: use the permutation of this model",
				len(layer.NewToOld), layer.Layer, c.Dir, c.Config.Experts)
		}
		if err := checkGroups(layer, c.Config.Groups); err != nil {
			return nil, err
		}
	}
	var predicting []int
	for _, layer := range p.canonical().Layers {
		axes, err := c.ExpertAxes(layers[layer.Layer])
		if err != nil {
			return nil, err
		}
		m.toOld[layer.Layer], m.toNew[layer.Layer] = layer.NewToOld, invert(layer.NewToOld)
		for name, axis := range axes {
			m.gathered[name] = gathered{axis, withFixed(layer.NewToOld, axis.Fixed)}
		}
		if layer.Layer >= c.Config.Layers {
			predicting = append(predicting, layer.Layer)
		}
	}
	if len(m.toOld) == 0 {
		return m, nil
	}
	return m, c.CheckOutside(layers, predicting)
}

// withFixed returns a permutation of rows, the last of which do not move.
func withFixed(newToOld []int, fixed int) []int {
	if fixed == 0 {
		return newToOld
	}
	rows := slices.Clone(newToOld)
	for range fixed {
		rows = append(rows, len(rows))
	}
	return rows
}

// newName returns the output name of an input tensor or module.
func (m *mapping) newName(old string) string { return m.rename(old, m.toNew) }

// oldName returns the input name of an output tensor or module.
func (m *mapping) oldName(new string) string { return m.rename(new, m.toOld) }

func (m *mapping) rename(name string, experts map[int][]int) string {
	if len(experts) == 0 {
		return name
	}
	part := m.config.Classify(name)
	permutation := experts[part.Layer]
	if part.Role != checkpoint.Expert || part.Expert >= len(permutation) {
		return name
	}
	return part.ExpertName(permutation[part.Expert])
}
