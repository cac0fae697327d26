// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"strconv"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/forecast"
)

// The name of the tensor of a look-back, and of the metadata key for the length of its sequences.
const (
	lookBackLayers = "look_back_layers"
	lookBackFactor = "forecast.lookback.factor"
)

func addLookBack(arrays map[string]array, metadata map[string]string, m *forecast.LookBack) {
	metadata[lookBackLayers] = strconv.Itoa(m.Depth)
	arrays[lookBackFactor] = array{dtype: checkpoint.F32, shape: []int{m.Layers, m.Sequences(), m.Ranks}, floats: m.Factor}
}

// decodeLookBack adds the look-back to a plan whose placement and token table are already decoded.
func decodeLookBack(p *solver.Plan, arrays map[string]array, metadata map[string]string) error {
	m := &forecast.LookBack{Layers: len(p.Placement.Layers), Ranks: p.Placement.Ranks}
	maximum := forecast.LookBackDepth(m.Ranks)
	var err error
	if m.Depth, err = strconv.Atoi(metadata[lookBackLayers]); err != nil || m.Depth < 1 || m.Depth > maximum {
		return invalidf("%s: %s is %q; allowed is 1 to %d for %d ranks", TablesFile, lookBackLayers, metadata[lookBackLayers], maximum, m.Ranks)
	}
	a, err := take(arrays, lookBackFactor, checkpoint.F32, m.Layers, m.Sequences(), m.Ranks)
	if err != nil {
		return err
	}
	m.Factor, p.LookBack = a.floats, m
	return nil
}
