package pipeline

import (
	"fmt"
	"slices"
	"strings"
)

// Durations are the times of the tasks of one micro-batch in one layer, in microseconds.
type Durations struct {
	// Attention (t_a) and Shared (t_s, the shared experts; 0 without any) are tasks of the attention group.
	Attention float64 `json:"attention_us"`
	Shared    float64 `json:"shared_us"`
	// Dispatch, Experts and Combine are the times of one chunk: on the link to the expert group, there, and on the link back. The paper
	// takes the first and the last to be equal (t_c); they differ where tokens travel in FP8 and come back in bf16.
	Dispatch float64 `json:"dispatch_us"`
	Experts  float64 `json:"experts_us"`
	Combine  float64 `json:"combine_us"`
}

// own is what a micro-batch needs of the attention group in a layer (P).
func (d Durations) own() float64 { return d.Attention + d.Shared }

// slowest is the time of the chunks' slowest stage (q).
func (d Durations) slowest() float64 { return max(d.Dispatch, d.Experts, d.Combine) }

// through is the time from the begin of a micro-batch's attention until its last chunk is back, when nothing else is in the way (Y).
func (d Durations) through(chunks int) float64 {
	return d.Attention + d.Dispatch + d.Experts + d.Combine + float64(chunks-1)*d.slowest()
}

// Sizes are the counts of a schedule: layers (T), micro-batches of a rank of the attention group (r1), and chunks of a micro-batch (r2).
type Sizes struct {
	Layers       int `json:"layers"`
	MicroBatches int `json:"micro_batches"`
	Chunks       int `json:"chunks"`
}

// Step is a task of the attention group within a layer: i >= 0 is the attention of micro-batch i, ^i its shared experts.
type Step int

// Order is what the attention group does in each layer, one Step for the attention and one for the shared experts of each micro-batch.
// Where the shared experts of a micro-batch stand before its attention, they are those of the layer before: every sequence is a
// valid schedule, because attention and shared experts of a micro-batch take turns in any.
type Order []Step

// ASAS lets the shared experts of each micro-batch follow its attention.
func ASAS(microBatches int) Order {
	o := make(Order, 0, 2*microBatches)
	for i := range microBatches {
		o = append(o, Step(i), ^Step(i))
	}
	return o
}

// AASS does the attention of all micro-batches first, so that the links get work early.
func AASS(microBatches int) Order {
	o := make(Order, 2*microBatches)
	for i := range microBatches {
		o[i], o[microBatches+i] = Step(i), ^Step(i)
	}
	return o
}

// String is the order as letters: A0 S0 A1 S1; a shared expert of the layer before has a prime.
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

// Name is ASAS or AASS where the order is one of these, else climbed.
func (o Order) Name() string {
	switch {
	case slices.Equal(o, ASAS(len(o)/2)):
		return "ASAS"
	case slices.Equal(o, AASS(len(o)/2)):
		return "AASS"
	}
	return "climbed"
}
