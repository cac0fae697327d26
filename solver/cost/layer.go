package cost

import (
	"encoding/json"

	"github.com/semmoe/operator/solver/trace"
)

// Device models the matrix products of a rank's experts, grouped in one kernel: a start-up time, and then the longer of reading the
// weights and multiplying.
type Device struct {
	// StartMicroseconds is the time of a kernel without work.
	StartMicroseconds float64
	// BytesPerMicrosecond is how fast weights are read, FlopsPerMicrosecond how fast they are multiplied.
	BytesPerMicrosecond, FlopsPerMicrosecond float64
}

// H200 is fitted to 36 measured grouped products of one H200 in bf16: 1 to 4,096 tokens for each of 8 to 32 experts, hidden size
// 2,048 to 7,168. Its error is below 16%, but for the largest of them all (31%).
var H200 = Device{StartMicroseconds: 31, BytesPerMicrosecond: 3.09e6, FlopsPerMicrosecond: flopsPerMicrosecond}

// Products is the time of a kernel that reads that many weights and multiplies that many pairs of an activation with a weight.
func (d Device) Products(weights, products float64) float64 {
	const bf16, multiplyAndAdd = 2, 2
	return d.StartMicroseconds + max(weights*bf16/d.BytesPerMicrosecond, products*multiplyAndAdd/d.FlopsPerMicrosecond)
}

// Layer is what a MoE layer costs in time: its exchanges over a link, and its experts on a device.
type Layer struct {
	Link   Link
	Device Device
	// TopK experts of HiddenSize × ExpertSize are activated by a token; a rank of Ranks holds SlotsPerRank experts.
	TopK, HiddenSize, ExpertSize int
	Ranks, SlotsPerRank          int
}

// usualExpertSize is the width of an expert over the hidden size, where it is not known: common are 0.29 to 0.69.
const usualExpertSize = 0.375

// LayerOf is the layer of a trace's model. What the trace does not tell is taken to be as in large models.
func LayerOf(m *trace.Model, link Link, ranks, slotsPerRank int) Layer {
	var config struct {
		Intermediate    int `json:"intermediate_size"`
		MoEIntermediate int `json:"moe_intermediate_size"`
	}
	_ = json.Unmarshal([]byte(m.Config), &config) // an empty or foreign text tells nothing
	l := Layer{
		Link: link, Device: H200, TopK: m.TopK, HiddenSize: m.HiddenSize, ExpertSize: config.MoEIntermediate, Ranks: ranks, SlotsPerRank: slotsPerRank,
	}
	if l.HiddenSize <= 0 {
		l.HiddenSize = usualHiddenSize
	}
	if l.ExpertSize <= 0 {
		l.ExpertSize = config.Intermediate
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
	// Gate and up projection are one kernel, the down projection another.
	const up, down = 2, 1
	expert, activations := float64(l.HiddenSize*l.ExpertSize), share*float64(l.TopK)*load
	weights := expert * min(float64(l.SlotsPerRank), activations)
	return LayerTime{
		Exchange: layerMicroseconds(l.Link, share, exchange, l.TopK, l.HiddenSize),
		Compute:  l.Device.Products(up*weights, up*expert*activations) + l.Device.Products(down*weights, down*expert*activations),
	}
}

// LocalTime is that of a batch all of whose activations are local and balanced: no plan is faster.
func (l Layer) LocalTime(batchTokens int) LayerTime { return l.Time(batchTokens, 0, 1) }

// TimeOf is that of a batch under the conditions of a report.
func (l Layer) TimeOf(batchTokens int, r *Report) LayerTime {
	return l.Time(batchTokens, max(r.MaxSend, r.MaxRecv), r.ExpertWindowImbalance)
}
