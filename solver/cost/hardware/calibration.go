// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
)

// Calibration contains times measured on the target machines.
type Calibration struct {
	// GPU is the name of the GPU.
	GPU string `json:"gpu"`
	// World is the number of ranks.
	World int `json:"world,omitempty"`
	// MemoryBytes is the memory of one GPU; 0 means unknown.
	MemoryBytes float64 `json:"gpu_memory_bytes,omitempty"`
	// AllToAll are single exchanges among all ranks. Products are the grouped GEMMs of a rank's gate and up
	// projections; they are optional.
	AllToAll []MeasuredExchange `json:"all_to_all"`
	Products []MeasuredProducts `json:"gate_up_gemm"`
	// Collectives, Attention and Bipartite (exchanges between a group of ranks with attention and one with experts) are
	// used for schedules inside the layer. They are optional.
	Collectives []MeasuredCollective `json:"collectives,omitempty"`
	Attention   []MeasuredAttention  `json:"attention,omitempty"`
	Bipartite   []MeasuredBipartite  `json:"send,omitempty"`
}

// MeasuredCollective is a measurement of the three collectives over all ranks on a buffer of the given size: the input
// of a reduction, the output of a gather.
type MeasuredCollective struct {
	Bytes         float64 `json:"bytes"`
	AllReduce     float64 `json:"all_reduce_us"`
	ReduceScatter float64 `json:"reduce_scatter_us"`
	AllGather     float64 `json:"all_gather_us"`
}

// MeasuredAttention is a measurement of causal attention over whole samples in bf16, without projections.
type MeasuredAttention struct {
	Heads        float64 `json:"heads"`
	HeadDim      float64 `json:"head_dim"`
	Batch        float64 `json:"batch"`
	Sequence     float64 `json:"seq"`
	Microseconds float64 `json:"sdpa_us"`
}

// MeasuredBipartite is an exchange in which each attention rank sends the given number of bytes, in equal parts, to all
// expert ranks, or receives them.
type MeasuredBipartite struct {
	AttentionRanks int     `json:"attention_ranks"`
	ExpertRanks    int     `json:"expert_ranks"`
	Bytes          float64 `json:"bytes"`
	Microseconds   float64 `json:"a2e_us"`
	// Back is the time for the same number of bytes in the reverse direction; 0 means not measured.
	Back float64 `json:"e2a_us,omitempty"`
}

// BusiestBytes returns the number of bytes that the busiest rank sends or receives.
func (m MeasuredBipartite) BusiestBytes() float64 {
	return m.Bytes * max(1, float64(m.AttentionRanks)/float64(m.ExpertRanks))
}

// MeasuredExchange is an all-to-all in which a rank sends, and receives, the given number of bytes.
type MeasuredExchange struct {
	Bytes        float64 `json:"remote_bytes_per_rank"`
	Microseconds float64 `json:"us"`
}

// MeasuredProducts is a kernel in bf16: for each expert of a rank, its tokens [tokens × hidden] times [hidden × 2
// inter].
type MeasuredProducts struct {
	Hidden          float64 `json:"hidden"`
	Inter           float64 `json:"inter"`
	Experts         float64 `json:"experts_per_rank"`
	TokensPerExpert float64 `json:"tokens_per_expert"`
	Microseconds    float64 `json:"grouped_us"`
	// Dense is the time of the same work with one kernel for each expert; 0 means not measured.
	Dense float64 `json:"dense_us,omitempty"`
}

// leastMeasurements is the minimum number of measurements for a fit of a link or a device with a meaningful error.
const leastMeasurements = 6

// ParseCalibration reads a calibration from JSON. It ignores unknown members.
func ParseCalibration(text []byte) (*Calibration, error) {
	c := &Calibration{}
	if err := json.Unmarshal(text, c); err != nil {
		return nil, err
	}
	if n := len(c.AllToAll); n < leastMeasurements {
		return nil, fmt.Errorf("all_to_all has %d measurements; at least %d are needed", n, leastMeasurements)
	}
	if n := len(c.Products); n > 0 && n < leastMeasurements {
		return nil, fmt.Errorf("gate_up_gemm has %d measurements; give none, or at least %d", n, leastMeasurements)
	}
	for i, m := range c.AllToAll {
		if !positive(m.Microseconds) || !(m.Bytes >= 0) || math.IsInf(m.Bytes, 0) {
			return nil, fmt.Errorf("all_to_all[%d] takes %v µs for %v bytes; the time must be above 0, the bytes at least 0", i, m.Microseconds, m.Bytes)
		}
	}
	for i, m := range c.Products {
		if !positive(m.Hidden, m.Inter, m.Experts, m.TokensPerExpert, m.Microseconds) {
			return nil, fmt.Errorf("gate_up_gemm[%d] is %+v; all must be above 0", i, m)
		}
	}
	return c, c.checkOthers()
}

// checkOthers validates the measurements for schedules inside the layer.
func (c *Calibration) checkOthers() error {
	for i, m := range c.Products {
		if !(m.Dense >= 0) || math.IsInf(m.Dense, 0) {
			return fmt.Errorf("gate_up_gemm[%d] takes %v µs with dense kernels; it must be above 0, or absent", i, m.Dense)
		}
	}
	if !(c.MemoryBytes >= 0) || math.IsInf(c.MemoryBytes, 0) {
		return fmt.Errorf("gpu_memory_bytes is %v; it must be above 0, or absent", c.MemoryBytes)
	}
	for i, m := range c.Collectives {
		if !positive(m.Bytes, m.AllReduce, m.ReduceScatter, m.AllGather) {
			return fmt.Errorf("collectives[%d] is %+v; all must be above 0", i, m)
		}
	}
	for i, m := range c.Attention {
		if !positive(m.Heads, m.HeadDim, m.Batch, m.Sequence, m.Microseconds) {
			return fmt.Errorf("attention[%d] is %+v; all must be above 0", i, m)
		}
	}
	for i, m := range c.Bipartite {
		if m.AttentionRanks < 1 || m.ExpertRanks < 1 || !positive(m.Bytes, m.Microseconds) || !atLeastZero(m.Back) {
			return fmt.Errorf("send[%d] is %+v; all must be above 0, but for the time back, which may be absent", i, m)
		}
	}
	return nil
}

func positive(values ...float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return !(v > 0) || math.IsInf(v, 0) })
}
