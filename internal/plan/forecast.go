// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"strconv"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/forecast"
)

// The names of the tensors of a context forecast, and of the metadata key for the number of activations per token.
const (
	topK                 = "top_k"
	forecastTokenLevel   = "forecast.token_level"
	forecastPairStart    = "forecast.pair_start"
	forecastPairPrevious = "forecast.pair_previous"
	forecastPairLevel    = "forecast.pair_level"
	forecastPairScore    = "forecast.pair_score"
	forecastVector       = "forecast.source_weight"
	forecastBias         = "forecast.bias"
	forecastExpert       = "forecast.expert_weight"
)

// addForecast adds the tensors of a context forecast.
func addForecast(arrays map[string]array, m *forecast.Model) {
	pairs, rows := m.Pairs(), forecast.ExpertRows(m.TopK, m.Experts)
	arrays[forecastTokenLevel] = array{dtype: u8, shape: []int{m.Vocabulary}, values: widen(m.TokenLevel)}
	arrays[forecastPairStart] = array{dtype: i32, shape: []int{m.Vocabulary + 1}, integers: m.PairStart}
	arrays[forecastPairPrevious] = array{dtype: i32, shape: []int{pairs}, integers: m.PairPrevious}
	arrays[forecastPairLevel] = array{dtype: u8, shape: []int{pairs}, values: widen(m.PairLevel)}
	arrays[forecastPairScore] = array{dtype: u16, shape: []int{m.Layers, pairs, m.Ranks}, values: m.PairScore}
	arrays[forecastVector] = array{dtype: checkpoint.F32, shape: []int{m.Layers, forecast.VectorWeights}, floats: m.Vector}
	arrays[forecastBias] = array{dtype: checkpoint.F32, shape: []int{m.Layers, m.Ranks}, floats: m.Bias}
	arrays[forecastExpert] = array{dtype: checkpoint.F32, shape: []int{m.Layers, rows, m.Ranks}, floats: m.Expert}
}

func widen(bytes []uint8) []uint16 {
	wide := make([]uint16, len(bytes))
	for i, v := range bytes {
		wide[i] = uint16(v)
	}
	return wide
}

func narrow(values []uint16) []uint8 {
	bytes := make([]uint8, len(values))
	for i, v := range values {
		bytes[i] = uint8(v)
	}
	return bytes
}

// decodeForecast adds the context forecast to a plan whose placement and token table are already decoded.
func decodeForecast(p *solver.Plan, arrays map[string]array, metadata map[string]string) error {
	m := &forecast.Model{
		History: p.Forecast == solver.Decode, Ranks: p.Placement.Ranks, Layers: len(p.Placement.Layers), Experts: p.Placement.Experts, Vocabulary: p.Vocabulary,
	}
	pairs := 0
	if a := arrays[forecastPairPrevious]; len(a.shape) == 1 {
		pairs = a.shape[0]
	}
	var err error
	if m.TopK, err = strconv.Atoi(metadata[topK]); err != nil || m.TopK < 1 || m.TopK > m.Experts {
		return invalidf("%s: %s is %q; allowed is 1 to the number of experts, %d", TablesFile, topK, metadata[topK], m.Experts)
	}
	for _, t := range []struct {
		name  string
		dtype checkpoint.DType
		shape []int
		set   func(array)
	}{
		{forecastTokenLevel, u8, []int{m.Vocabulary}, func(a array) { m.TokenLevel = narrow(a.values) }},
		{forecastPairStart, i32, []int{m.Vocabulary + 1}, func(a array) { m.PairStart = a.integers }},
		{forecastPairPrevious, i32, []int{pairs}, func(a array) { m.PairPrevious = a.integers }},
		{forecastPairLevel, u8, []int{pairs}, func(a array) { m.PairLevel = narrow(a.values) }},
		{forecastPairScore, u16, []int{m.Layers, pairs, m.Ranks}, func(a array) { m.PairScore = a.values }},
		{forecastVector, checkpoint.F32, []int{m.Layers, forecast.VectorWeights}, func(a array) { m.Vector = a.floats }},
		{forecastBias, checkpoint.F32, []int{m.Layers, m.Ranks}, func(a array) { m.Bias = a.floats }},
		{forecastExpert, checkpoint.F32, []int{m.Layers, forecast.ExpertRows(m.TopK, m.Experts), m.Ranks}, func(a array) { m.Expert = a.floats }},
	} {
		a, err := take(arrays, t.name, t.dtype, t.shape...)
		if err != nil {
			return err
		}
		t.set(a)
	}
	p.Context = m
	return nil
}
