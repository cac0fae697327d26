// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"strconv"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/forecast"
)

// The names of the tensors of a corrected look-ahead, and of the metadata key for its number of experts.
const (
	lookAheadExperts = "lookahead_experts"
	lookAheadSlope   = "forecast.lookahead.slope"
	lookAheadBias    = "forecast.lookahead.bias"
	lookAheadGate    = "forecast.lookahead.gate_weight"
	lookAheadEarlier = "forecast.lookahead.earlier_weight"
)

func addLookAhead(arrays map[string]array, metadata map[string]string, m *forecast.LookAhead) {
	metadata[topK], metadata[lookAheadExperts] = strconv.Itoa(m.TopK), strconv.Itoa(m.Width)
	square := []int{m.Layers, m.Experts, m.Experts}
	arrays[lookAheadSlope] = array{dtype: checkpoint.F32, shape: []int{m.Layers}, floats: m.Slope}
	arrays[lookAheadBias] = array{dtype: checkpoint.F32, shape: []int{m.Layers, m.Experts}, floats: m.Bias}
	arrays[lookAheadGate] = array{dtype: checkpoint.F32, shape: square, floats: m.Gate}
	arrays[lookAheadEarlier] = array{dtype: checkpoint.F32, shape: square, floats: m.Earlier}
}

// decodeLookAhead adds the correction to a plan whose placement is already decoded.
func decodeLookAhead(p *solver.Plan, arrays map[string]array, metadata map[string]string) error {
	m := &forecast.LookAhead{Layers: len(p.Placement.Layers), Experts: p.Placement.Experts}
	for key, number := range map[string]*int{topK: &m.TopK, lookAheadExperts: &m.Width} {
		var err error
		if *number, err = strconv.Atoi(metadata[key]); err != nil || *number < 1 || *number > m.Experts {
			return invalidf("%s: %s is %q; allowed is 1 to the number of experts, %d", TablesFile, key, metadata[key], m.Experts)
		}
	}
	square := []int{m.Layers, m.Experts, m.Experts}
	for _, t := range []struct {
		name  string
		shape []int
		to    *[]float32
	}{
		{lookAheadSlope, []int{m.Layers}, &m.Slope},
		{lookAheadBias, []int{m.Layers, m.Experts}, &m.Bias},
		{lookAheadGate, square, &m.Gate},
		{lookAheadEarlier, square, &m.Earlier},
	} {
		a, err := take(arrays, t.name, checkpoint.F32, t.shape...)
		if err != nil {
			return err
		}
		*t.to = a.floats
	}
	p.LookAhead = m
	return nil
}
