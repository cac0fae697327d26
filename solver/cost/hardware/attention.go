// SPDX-License-Identifier: Apache-2.0

package hardware

import "fmt"

// Attention models the kernel of scores, softmax and values, without projections.
type Attention struct {
	// Line is a function of floating-point operations.
	Line
	// RowFlops is the cost of each row of scores in addition to its products, in equivalent operations: the softmax,
	// and the causally masked part of tiles that a kernel computes. It is 0 if the operations explain the whole time.
	RowFlops float64 `json:"row_flops,omitempty"`
	Fit      Fit     `json:"fit"`
}

// AttentionWork is the work of a kernel: the operations of its products, and the rows of scores, one for each query of
// each head.
type AttentionWork struct{ Flops, Rows float64 }

// CausalAttention returns the work of attention over a batch of sequences: scores and values, without the masked upper
// half.
func CausalAttention(batch, heads, sequence, queryDim, valueDim float64) AttentionWork {
	const multiplyAndAdd, causal = 2, 0.5
	return AttentionWork{
		Flops: multiplyAndAdd * causal * batch * heads * sequence * sequence * (queryDim + valueDim), Rows: batch * heads * sequence,
	}
}

// Microseconds returns the time of a kernel with the given work.
func (a *Attention) Microseconds(w AttentionWork) float64 { return a.Line.Microseconds(a.flops(w)) }

// Computing returns this time without the start-up time, in microseconds.
func (a *Attention) Computing(w AttentionWork) float64 { return a.flops(w) / a.PerMicrosecond }

// flops returns the operations, including the equivalent operations of rows.
func (a *Attention) flops(w AttentionWork) float64 { return w.Flops + a.RowFlops*w.Rows }

func (a *Attention) check() error {
	if !atLeastZero(a.RowFlops) {
		return fmt.Errorf("row_flops is %v; it must be at least 0", a.RowFlops)
	}
	return a.Line.check()
}
