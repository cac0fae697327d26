// SPDX-License-Identifier: Apache-2.0

package volume

import "github.com/semmoe/operator/solver/placement"

// Row describes the payload of a message.
type Row struct {
	// HiddenSize is the number of values of a token. TopK is the number of experts that a token activates.
	HiddenSize, TopK int
}

const (
	bf16, fp8 = 2, 1
	// scaleValues is the number of FP8 values that share a scale of four bytes, as in DeepEP's kernels and
	// block-quantized checkpoints.
	scaleValues, scaleBytes = 128, 4
	// lowLatencyHeader identifies the sender's token of a row. A row for several experts instead contains the index (8)
	// and gate weight (4) of each expert, and its origin (8). These are the sizes of DeepEP's messages, in bytes.
	lowLatencyHeader                        = 16
	originHeader, indexHeader, weightHeader = 8, 8, 4
	// countBytes is the size of the number of rows for one expert of a rank.
	countBytes = 4
)

// header returns the bytes of a message in addition to the row's values.
func (r Row) header(o placement.Objective) float64 {
	if o == placement.Activation {
		return lowLatencyHeader
	}
	return float64(originHeader + r.TopK*(indexHeader+weightHeader))
}

// values returns the bytes of the row's values.
func (r Row) values(width int) float64 {
	bytes := r.HiddenSize * width
	if width == fp8 {
		bytes += (r.HiddenSize + scaleValues - 1) / scaleValues * scaleBytes
	}
	return float64(bytes)
}

// Volume is the traffic of a MoE layer under one objective, for one batch.
type Volume struct {
	Objective placement.Objective `json:"objective"`
	Messages  Links               `json:"messages"`
	// DispatchBF16 and DispatchFP8 are bytes, including headers. Combine uses the reverse paths, in bf16. Contributions
	// to a token are summed on each rank, and on the way if the token was routed through its node.
	DispatchBF16 Links `json:"dispatch_bf16_bytes"`
	DispatchFP8  Links `json:"dispatch_fp8_bytes"`
	Combine      Links `json:"combine_bf16_bytes"`
	// HeaderBytes is the part of either dispatch that consists of headers. CountBytes are sent first, unless padded.
	HeaderBytes float64 `json:"header_bytes"`
	CountBytes  float64 `json:"count_bytes"`
}

// Volumes converts messages to bytes, for ranks with the given number of experts each.
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
