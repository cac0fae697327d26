package cost

import (
	"encoding/json"
	"fmt"
	"math"

	"github.com/semmoe/operator/solver/modelconfig"
	"github.com/semmoe/operator/solver/trace"
)

// Layer is what a MoE layer costs in time on given machines.
type Layer struct {
	Machines
	// TopK experts of HiddenSize × ExpertSize are activated by a token; a rank of Ranks holds SlotsPerRank experts.
	TopK, HiddenSize, ExpertSize int
	Ranks, SlotsPerRank          int
}

// usualExpertSize is the width of an expert over the hidden size, where it is not known: common are 0.29 to 0.69.
const usualExpertSize = 0.375

// expertSize is the width of a routed expert; 0 where the trace's model does not tell it, or in a way that cannot be read.
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

// ExpertWeights is the number of weights of a routed expert: gate, up and down projection. It is 0 where the trace's model does not
// tell their sizes.
func ExpertWeights(m *trace.Model) int64 {
	const matrices = 3
	return matrices * int64(max(m.HiddenSize, 0)) * int64(expertSize(m))
}

// ExpertBytes returns the memory of a routed expert of one layer in bytes, scales of quantised weights included. It fails where the trace's model does
// not name the sizes, or has them quantised in a way whose size is not known.
func ExpertBytes(m *trace.Model) (int64, error) {
	const widest = 1 << 20
	weights := ExpertWeights(m)
	if weights <= 0 || expertSize(m) > widest {
		return 0, fmt.Errorf("the size of an expert is not known: the model's configuration lacks hidden_size, or the width of an expert (moe_intermediate_size or intermediate_size)")
	}
	bits, err := modelconfig.WeightBits([]byte(m.Config))
	if err != nil {
		return 0, err
	}
	return int64(math.Ceil(float64(weights) * bits / 8)), nil
}

// LayerOf is the layer of a trace's model. What the trace does not tell is taken to be as in large models.
func LayerOf(m *trace.Model, machines Machines, ranks, slotsPerRank int) Layer {
	l := Layer{
		Machines: machines, TopK: m.TopK, HiddenSize: m.HiddenSize, ExpertSize: expertSize(m), Ranks: ranks, SlotsPerRank: slotsPerRank,
	}
	if l.HiddenSize <= 0 {
		l.HiddenSize = usualHiddenSize
	}
	if l.ExpertSize <= 0 {
		l.ExpertSize = int(usualExpertSize * float64(l.HiddenSize))
	}
	return l
}

// LayerTime is the modelled time of a MoE layer in microseconds.
type LayerTime struct {
	// Exchange is that of dispatch and combine: the busiest rank's, sending or receiving. Compute is that of the experts of the
	// slowest rank.
	Exchange float64 `json:"exchange_us"`
	Compute  float64 `json:"compute_us"`
}

// Total is the time of the layer's experts, exchanges included.
func (t LayerTime) Total() float64 { return t.Exchange + t.Compute }

// Time is that of a batch over all ranks, when the busiest rank exchanges and the slowest computes the given multiples of a rank's
// fair share of the activations.
func (l Layer) Time(batchTokens int, exchange, load float64) LayerTime {
	share := float64(batchTokens) / float64(l.Ranks)
	expert, activations, slots := float64(l.HiddenSize*l.ExpertSize), share*float64(l.TopK)*load, float64(l.SlotsPerRank)
	// Experts without an activation are not read; the others share the activations equally.
	weights, rows := expert*min(slots, activations), max(1, activations/slots)
	return LayerTime{
		Exchange: layerMicroseconds(&l.Link, share, exchange, l.TopK, l.HiddenSize),
		Compute:  l.Grouped.Block(weights, rows),
	}
}

// LocalTime is that of a batch all of whose activations are local and balanced: no plan is faster.
func (l Layer) LocalTime(batchTokens int) LayerTime { return l.Time(batchTokens, 0, 1) }

// TimeOf is that of a batch under the conditions of a report.
func (l Layer) TimeOf(batchTokens int, r *Report) LayerTime {
	return l.Time(batchTokens, max(r.MaxSend, r.MaxRecv), r.ExpertWindowImbalance)
}
