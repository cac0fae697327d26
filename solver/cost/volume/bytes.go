package volume

import "github.com/semmoe/operator/solver/placement"

// Row is what a message carries.
type Row struct {
	// HiddenSize values are a token's; TopK experts are activated by it.
	HiddenSize, TopK int
}

const (
	bf16, fp8 = 2, 1
	// scaleValues is how many FP8 values share a scale of four bytes, as DeepEP's kernels and block-quantised checkpoints have it.
	scaleValues, scaleBytes = 128, 4
	// lowLatencyHeader says which of the sender's tokens a row is. A row for several experts names each with its index (8) and gate weight (4), and its origin
	// (8) instead. These are the sizes of DeepEP's messages.
	lowLatencyHeader                        = 16
	originHeader, indexHeader, weightHeader = 8, 8, 4
	// countBytes tell a rank how many rows come for one of its experts.
	countBytes = 4
)

// header is the bytes of a message that are not the row's values.
func (r Row) header(o placement.Objective) float64 {
	if o == placement.Activation {
		return lowLatencyHeader
	}
	return float64(originHeader + r.TopK*(indexHeader+weightHeader))
}

// values is the bytes of the row's values.
func (r Row) values(width int) float64 {
	bytes := r.HiddenSize * width
	if width == fp8 {
		bytes += (r.HiddenSize + scaleValues - 1) / scaleValues * scaleBytes
	}
	return float64(bytes)
}

// Volume is the traffic of a MoE layer under one objective, of a batch.
type Volume struct {
	Objective placement.Objective `json:"objective"`
	Messages  Links               `json:"messages"`
	// DispatchBF16 and DispatchFP8 are bytes, headers included. Combine goes the ways back, in bf16: what a rank's experts add to a token is
	// summed there, and where a token has come by way of its node, on the way.
	DispatchBF16 Links `json:"dispatch_bf16_bytes"`
	DispatchFP8  Links `json:"dispatch_fp8_bytes"`
	Combine      Links `json:"combine_bf16_bytes"`
	// HeaderBytes are the part of either dispatch that is headers. CountBytes go before it, unless parts are padded.
	HeaderBytes float64 `json:"header_bytes"`
	CountBytes  float64 `json:"count_bytes"`
}

// Volumes turns messages into bytes, for ranks with that many experts each.
func (m *Messages) Volumes(r Row, ranks, slotsPerRank int) []Volume {
	list := make([]Volume, len(m))
	for i, o := range placement.MessageObjectives {
		header := r.header(o)
		list[i] = Volume{
			Objective: o, Messages: m[i],
			DispatchBF16: m[i].scaled(r.values(bf16) + header), DispatchFP8: m[i].scaled(r.values(fp8) + header), Combine: m[i].back().scaled(r.values(bf16)),
			HeaderBytes: header * (m[i].Node.Total + m[i].Network.Total), CountBytes: float64(ranks * (ranks - 1) * slotsPerRank * countBytes),
		}
	}
	return list
}
