package hardware

import "fmt"

// Attention is the kernel of scores, softmax and values, without projections.
type Attention struct {
	// Line is by floating-point operations.
	Line
	// RowFlops is what each row of scores costs beside its products, in operations that would take as long: the softmax, and what a kernel computes
	// of a tile that causality leaves out. It is 0 where operations alone tell the time as well.
	RowFlops float64 `json:"row_flops,omitempty"`
	Fit      Fit     `json:"fit"`
}

// AttentionWork is what a kernel does: the operations of its products, and the rows of scores, one for each query of each head.
type AttentionWork struct{ Flops, Rows float64 }

// CausalAttention is the work of attention over a batch of sequences: scores and values, of which the upper half is left out.
func CausalAttention(batch, heads, sequence, queryDim, valueDim float64) AttentionWork {
	const multiplyAndAdd, causal = 2, 0.5
	return AttentionWork{
		Flops: multiplyAndAdd * causal * batch * heads * sequence * sequence * (queryDim + valueDim), Rows: batch * heads * sequence,
	}
}

// Microseconds is the time of a kernel with that work.
func (a *Attention) Microseconds(w AttentionWork) float64 { return a.Line.Microseconds(a.flops(w)) }

// Computing is that time without the start of a kernel, in microseconds.
func (a *Attention) Computing(w AttentionWork) float64 { return a.flops(w) / a.PerMicrosecond }

// flops are the operations, with those that rows are worth.
func (a *Attention) flops(w AttentionWork) float64 { return w.Flops + a.RowFlops*w.Rows }

func (a *Attention) check() error {
	if !atLeastZero(a.RowFlops) {
		return fmt.Errorf("row_flops is %v; it must be at least 0", a.RowFlops)
	}
	return a.Line.check()
}
