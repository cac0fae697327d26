// SPDX-License-Identifier: Apache-2.0

package pipeline

import "math"

// closedForm returns the exact makespan of the order ASAS.
//
// P is the attention group's time for a micro-batch, Q the time after which the next micro-batch can follow, and Y the
// time of one micro-batch through all stages. A layer begins max(r1 Q, Y, P) after the previous one. (The paper's
// wording suggests max(r1 P, Y), which is correct only if the attention group is the bottleneck.)
func closedForm(d Durations, s Sizes) float64 {
	own, through := d.own(), d.through(s.Chunks)
	next := max(own, float64(s.Chunks)*d.slowest())
	layer := max(float64(s.MicroBatches)*next, through, own)
	return float64(s.Layers-1)*layer + max(through, own) + float64(s.MicroBatches-1)*next
}

// lateBound returns a lower bound of the makespan of the order AASS, which is nearly always tight: a layer begins after
// the previous layer has given each resource its work, or after the first micro-batch has passed through it.
func lateBound(d Durations, s Sizes) float64 {
	batches, through := float64(s.MicroBatches), d.through(s.Chunks)
	next := max(d.Attention, float64(s.Chunks)*d.slowest())
	return float64(s.Layers-1)*max(batches*d.own(), batches*next, through) + max(through+(batches-1)*next, batches*d.own())
}

// Bound returns a lower bound of the makespan over all orders of the attention group's tasks: each resource must do all
// of its work, between the shortest path to its first task and the shortest path from its last task, and each
// micro-batch must pass through all layers.
func Bound(d Durations, s Sizes) float64 {
	layers, batches, chunks := float64(s.Layers), float64(s.MicroBatches), float64(s.Chunks)
	all := layers * batches * chunks
	around := d.Attention + d.Dispatch + d.Experts + d.Combine
	through := d.through(s.Chunks)
	return max(
		layers*batches*d.own(),
		// The last attention task follows every other one, and the shared experts of all layers but the last.
		layers*batches*d.own()-batches*d.Shared+through-d.Attention,
		all*d.Dispatch+around-d.Dispatch,
		all*d.Experts+around-d.Experts,
		all*d.Combine+around-d.Combine,
		layers*max(through, d.own()),
	)
}

// evaluator computes makespans of arbitrary orders in time proportional to layers and micro-batches, but not to chunks.
// It is reusable.
type evaluator struct {
	// The end times, per micro-batch, of its attention, its shared experts and its last chunk, and whether its shared
	// experts are pending.
	attended, shared, back []float64
	pending                []bool
	// before is the state one layer earlier.
	before []float64
	// The times at which the resources become idle.
	group, dispatch, experts, combine float64
}

// makespan returns the makespan of an order.
//
// The chunks of a micro-batch are equal. The end of the last chunk of a stage is therefore the longest of a few paths:
// max-plus sums of equal terms have their maximum at one end of the range.
func (e *evaluator) makespan(d Durations, s Sizes, o Order) float64 {
	e.reset(s.MicroBatches)
	for layer := range s.Layers {
		for _, step := range o {
			if step >= 0 {
				e.attention(d, float64(s.Chunks), int(step))
			} else if i := int(^step); e.pending[i] {
				e.sharedExperts(d, i)
			}
		}
		if by, same := e.shift(); same && layer > 0 {
			// The state equals the previous layer's state, shifted in time. Times depend only on differences, so each
			// further layer adds the same shift.
			e.advance(by * float64(s.Layers-1-layer))
			break
		}
	}
	for _, step := range o {
		if step < 0 && e.pending[^step] {
			e.sharedExperts(d, int(^step))
		}
	}
	return max(e.group, e.combine)
}

func (e *evaluator) reset(microBatches int) {
	if cap(e.attended) < microBatches {
		e.attended, e.shared, e.back = make([]float64, microBatches), make([]float64, microBatches), make([]float64, microBatches)
		e.pending = make([]bool, microBatches)
		e.before = make([]float64, 2*microBatches+4)
	}
	e.attended, e.shared, e.back = e.attended[:microBatches], e.shared[:microBatches], e.back[:microBatches]
	e.pending, e.before = e.pending[:microBatches], e.before[:2*microBatches+4]
	for _, times := range [][]float64{e.attended, e.shared, e.back, e.before} {
		clear(times)
	}
	clear(e.pending)
	e.group, e.dispatch, e.experts, e.combine = 0, 0, 0, 0
}

// attention executes the attention of micro-batch i and all tasks of its chunks.
func (e *evaluator) attention(d Durations, chunks float64, i int) {
	e.group = max(e.group, e.back[i], e.shared[i]) + d.Attention
	e.attended[i], e.pending[i] = e.group, true

	first := max(e.dispatch, e.group)
	e.dispatch = first + chunks*d.Dispatch
	e.combine = max(
		e.combine+chunks*d.Combine,
		e.experts+d.Experts+d.Combine+(chunks-1)*max(d.Experts, d.Combine),
		first+d.Dispatch+d.Experts+d.Combine+(chunks-1)*d.slowest(),
	)
	e.experts = max(e.experts+chunks*d.Experts, first+d.Dispatch+d.Experts+(chunks-1)*max(d.Dispatch, d.Experts))
	e.back[i] = e.combine
}

func (e *evaluator) sharedExperts(d Durations, i int) {
	e.group = max(e.group, e.attended[i]) + d.Shared
	e.shared[i], e.pending[i] = e.group, false
}

// shift returns the time shift of the state since the last call, and whether the whole state has the same shift.
func (e *evaluator) shift() (by float64, same bool) {
	const rounding = 1e-13
	by, same = e.group-e.before[0], true
	at := 0
	compare := func(v float64) {
		if math.Abs(v-e.before[at]-by) > rounding*e.combine {
			same = false
		}
		e.before[at] = v
		at++
	}
	for _, v := range [...]float64{e.group, e.dispatch, e.experts, e.combine} {
		compare(v)
	}
	for i := range e.back {
		compare(e.back[i])
		// Pending shared experts wait for the end of attention; attention waits for the end of shared experts.
		if e.pending[i] {
			compare(e.attended[i])
		} else {
			compare(e.shared[i])
		}
	}
	return by, same
}

func (e *evaluator) advance(by float64) {
	e.group, e.dispatch, e.experts, e.combine = e.group+by, e.dispatch+by, e.experts+by, e.combine+by
	for _, times := range [][]float64{e.attended, e.shared, e.back} {
		for i := range times {
			times[i] += by
		}
	}
}
