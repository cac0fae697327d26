// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"encoding/json"
	"fmt"
	"math"

	"github.com/semmoe/operator/solver/modelconfig"
	"github.com/semmoe/operator/solver/trace"
)

// Layer models the time of a MoE layer on given machines.
type Layer struct {
	Machines
	// TopK experts of HiddenSize × ExpertSize are activated by a token. Each of Ranks ranks has SlotsPerRank experts.
	TopK, HiddenSize, ExpertSize int
	Ranks, SlotsPerRank          int
}

// defaultExpertSize is the default width of an expert relative to the hidden size. Common values are 0.29 to 0.69.
const defaultExpertSize = 0.375

// expertSize returns the width of a routed expert, or 0 if the trace's model does not contain it in a supported form.
func expertSize(m *trace.Model) int {
	var config struct {
		Intermediate    modelconfig.Size `json:"intermediate_size"`
		MoEIntermediate modelconfig.Size `json:"moe_intermediate_size"`
	}
	if json.Unmarshal([]byte(m.TextConfig()), &config) != nil {
		return 0
	}
	if config.MoEIntermediate > 0 {
		return int(config.MoEIntermediate)
	}
	return max(int(config.Intermediate), 0)
}

// ExpertWeights returns the number of weights of a routed expert: gate, up and down projection. It returns 0 if the
// trace's model does not contain their sizes.
func ExpertWeights(m *trace.Model) int64 {
	const matrices = 3
	return matrices * int64(max(m.HiddenSize, 0)) * int64(expertSize(m))
}

// ExpertBytes returns the memory of a routed expert of one layer in bytes, including scales of quantized weights. It
// returns an error if the trace's model lacks the sizes, or uses an unknown quantization.
func ExpertBytes(m *trace.Model) (int64, error) {
	const widest = 1 << 20
	weights := ExpertWeights(m)
	if weights <= 0 || expertSize(m) > widest {
		return 0, fmt.Errorf("the size of an expert is unknown: the model's configuration lacks hidden_size, or the width of an expert (moe_intermediate_size or intermediate_size)")
	}
	bits, err := modelconfig.WeightBits([]byte(m.Config))
	if err != nil {
		return 0, err
	}
	return int64(math.Ceil(float64(weights) * bits / 8)), nil
}

// LayerOf returns the layer of a trace's model. Missing sizes default to those of common large models.
func LayerOf(m *trace.Model, machines Machines, ranks, slotsPerRank int) Layer {
	l := Layer{
		Machines: machines, TopK: m.TopK, HiddenSize: m.HiddenSize, ExpertSize: expertSize(m), Ranks: ranks, SlotsPerRank: slotsPerRank,
	}
	if l.HiddenSize <= 0 {
		l.HiddenSize = defaultHiddenSize
	}
	if l.ExpertSize <= 0 {
		l.ExpertSize = int(defaultExpertSize * float64(l.HiddenSize))
	}
	return l
}

// LayerTime is the modelled time of a MoE layer in microseconds.
type LayerTime struct {
	// Exchange is the time of dispatch and combine on the busiest rank, sending or receiving. Compute is the time of
	// the experts on the slowest rank.
	Exchange float64 `json:"exchange_us"`
	Compute  float64 `json:"compute_us"`
}

// Total returns the time of the layer's experts and exchanges.
func (t LayerTime) Total() float64 { return t.Exchange + t.Compute }

// Time returns the time of a batch over all ranks. exchange and load are the exchange of the busiest rank and the
// computation of the slowest rank, as multiples of a rank's fair share of the activations.
func (l Layer) Time(batchTokens int, exchange, load float64) LayerTime {
	share := float64(batchTokens) / float64(l.Ranks)
	expert, activations, slots := float64(l.HiddenSize*l.ExpertSize), share*float64(l.TopK)*load, float64(l.SlotsPerRank)
	// Weights of experts without an activation are not read; the others share the activations equally.
	weights, rows := expert*min(slots, activations), max(1, activations/slots)
	return LayerTime{
		Exchange: layerMicroseconds(&l.Link, share, exchange, l.TopK, l.HiddenSize),
		Compute:  l.Grouped.Block(weights, rows),
	}
}

// LocalTime returns the time of a batch whose activations are all local and balanced. It is a lower bound for every
// plan.
func (l Layer) LocalTime(batchTokens int) LayerTime { return l.Time(batchTokens, 0, 1) }

// TimeOf returns the time of a batch with the exchange and load of a report.
func (l Layer) TimeOf(batchTokens int, r *Report) LayerTime {
	return l.Time(batchTokens, max(r.MaxSend, r.MaxRecv), r.ExpertWindowImbalance)
}
