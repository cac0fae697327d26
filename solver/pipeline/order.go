// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"fmt"
	"slices"
	"strings"
)

// Durations are the times of the tasks of one micro-batch in one layer, in microseconds.
type Durations struct {
	// Attention (t_a) and Shared (t_s, the shared experts; 0 if there are none) are tasks of the attention group.
	Attention float64 `json:"attention_us"`
	Shared    float64 `json:"shared_us"`
	// Dispatch, Experts and Combine are the times of one chunk on the link to the expert group, on the expert group,
	// and on the link back. The paper assumes equal times of the links (t_c); they differ if tokens are sent in FP8 and
	// returned in bf16.
	Dispatch float64 `json:"dispatch_us"`
	Experts  float64 `json:"experts_us"`
	Combine  float64 `json:"combine_us"`
}

// own returns the time of a micro-batch on the attention group in a layer (P).
func (d Durations) own() float64 { return d.Attention + d.Shared }

// slowest returns the time of the slowest stage of a chunk (q).
func (d Durations) slowest() float64 { return max(d.Dispatch, d.Experts, d.Combine) }

// through returns the time from the start of a micro-batch's attention to the return of its last chunk, on idle
// resources (Y).
func (d Durations) through(chunks int) float64 {
	return d.Attention + d.Dispatch + d.Experts + d.Combine + float64(chunks-1)*d.slowest()
}

// Sizes are the counts of a schedule: layers (T), micro-batches of a rank of the attention group (r1), and chunks of a
// micro-batch (r2).
type Sizes struct {
	Layers       int `json:"layers"`
	MicroBatches int `json:"micro_batches"`
	Chunks       int `json:"chunks"`
}

// Step is a task of the attention group within a layer: i >= 0 is the attention of micro-batch i, ^i its shared
// experts.
type Step int

// Order is the sequence of tasks of the attention group in each layer: one Step for the attention and one for the
// shared experts of each micro-batch. Shared experts listed before the attention of their micro-batch belong to the
// previous layer. Every sequence is a valid schedule, because the attention and the shared experts of a micro-batch
// alternate in any sequence.
type Order []Step

// ASAS returns the order in which the shared experts of each micro-batch follow its attention.
func ASAS(microBatches int) Order {
	o := make(Order, 0, 2*microBatches)
	for i := range microBatches {
		o = append(o, Step(i), ^Step(i))
	}
	return o
}

// AASS returns the order with the attention of all micro-batches first, which gives the links work early.
func AASS(microBatches int) Order {
	o := make(Order, 2*microBatches)
	for i := range microBatches {
		o[i], o[microBatches+i] = Step(i), ^Step(i)
	}
	return o
}

// String returns the order as letters: A0 S0 A1 S1; shared experts of the previous layer have a prime.
func (o Order) String() string {
	words := make([]string, len(o))
	seen := make([]bool, len(o))
	for n, step := range o {
		switch {
		case step >= 0:
			seen[step] = true
			words[n] = fmt.Sprintf("A%d", step)
		case seen[^step]:
			words[n] = fmt.Sprintf("S%d", ^step)
		default:
			words[n] = fmt.Sprintf("S%d'", ^step)
		}
	}
	return strings.Join(words, " ")
}

// Name returns ASAS or AASS for these orders, and climbed for an order found by local search.
func (o Order) Name() string {
	switch {
	case slices.Equal(o, ASAS(len(o)/2)):
		return "ASAS"
	case slices.Equal(o, AASS(len(o)/2)):
		return "AASS"
	}
	return "climbed"
}
