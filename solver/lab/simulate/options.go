// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"time"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Collective is the way in which ranks exchange results with attention tensor parallelism.
type Collective string

// The collectives.
const (
	// ReduceScatter leaves each rank with a part of the tokens after attention. They are exchanged with the ranks of
	// their experts and gathered again.
	ReduceScatter Collective = "reduce-scatter"
	// AllReduce gives all tokens to all ranks after attention, and again after each rank has computed its experts. No
	// tokens are dispatched, so locality is undefined.
	AllReduce Collective = "all-reduce"
)

// Options are the parameters of the engine and its hardware.
type Options struct {
	Attention placement.Attention
	// Collective applies to attention TP.
	Collective Collective
	// Shape is the shape of the model. It has the same experts as the trace. If the numbers of MoE layers differ, each
	// layer of the trace represents several layers, or a fraction of one.
	Shape    pipeline.Shape
	Profile  *hardware.Profile
	Topology Topology
	// Messages and DispatchBytes are as in Layer.
	Messages      Messages
	DispatchBytes float64
	// StepTokens is the maximum number of tokens of a step, Running the maximum number of concurrent requests,
	// CacheTokens the capacity of the KV cache: over all ranks, each of which has an equal part with attention DP. A
	// request is admitted when the cache has room for all of its tokens.
	StepTokens, Running, CacheTokens int
	// Cap and Weights are parameters of the policy price.
	Cap     float64
	Weights dispatch.Weights
	// Hold is the maximum time that a request may wait for the rank of its experts with the policy price; 0 disables
	// waiting.
	Hold time.Duration
}

// ParseCollective returns the collective with the given name.
func ParseCollective(name string) (Collective, error) {
	if c := Collective(name); c == ReduceScatter || c == AllReduce {
		return c, nil
	}
	return "", fmt.Errorf("collective %q is unknown; allowed is %s, %s", name, ReduceScatter, AllReduce)
}

// ParseMessages returns the messages with the given name.
func ParseMessages(name string) (Messages, error) {
	if m := Messages(name); m == PerActivation || m == PerRank {
		return m, nil
	}
	return "", fmt.Errorf("messages %q are unknown; allowed is %s, %s", name, PerActivation, PerRank)
}

// Lanes returns the number of batches of a step: one per rank with attention DP, one for all ranks with attention TP.
func (o *Options) Lanes() int {
	if o.Attention == placement.DataParallel {
		return o.Topology.Ranks
	}
	return 1
}

// allReduced reports whether all ranks have all tokens around the experts.
func (o *Options) allReduced() bool {
	return o.Attention == placement.TensorParallel && o.Collective == AllReduce
}

// layer returns the MoE layer of the model.
func (o *Options) layer() Layer {
	return Layer{
		Hidden: o.Shape.Hidden, ExpertSize: o.Shape.ExpertSize, Experts: o.Shape.Experts, Messages: o.Messages, DispatchBytes: o.DispatchBytes, Kernels: engineKernels,
	}
}

// costs returns the costs for the scheduler. The exchange uses the slowest links, which dispatch is meant to avoid.
func (o *Options) costs() dispatch.Costs {
	const matrices = 3
	s := &o.Shape
	active := matrices * s.Hidden * (s.MoELayers*(s.TopK*s.ExpertSize+s.SharedSize) + (s.HiddenLayers-s.MoELayers)*s.DenseSize)
	for _, projection := range s.Projections() {
		active += s.HiddenLayers * int(projection)
	}
	machines := cost.NodeOf(o.Profile)
	machines.Link = *o.Topology.slowest()
	return cost.Shape{MoELayers: s.MoELayers, TopK: s.TopK, HiddenSize: s.Hidden, ActiveParameters: int64(active)}.Costs(machines)
}

// check returns an error for invalid or inconsistent options.
func (o *Options) check(t *trace.Trace, m *Method) error {
	if err := o.Shape.Check(); err != nil {
		return err
	}
	if err := o.Topology.Check(); err != nil {
		return err
	}
	lanes := o.Lanes()
	switch {
	case o.Attention != placement.DataParallel && o.Attention != placement.TensorParallel:
		return fmt.Errorf("attention is %q; allowed is dp, tp", o.Attention)
	case o.Shape.Experts != t.Model.Experts || o.Shape.TopK != t.Model.TopK:
		return fmt.Errorf("the model has %d experts, top-%d, the trace %d, top-%d; they must be equal", o.Shape.Experts, o.Shape.TopK, t.Model.Experts, t.Model.TopK)
	case m.Placement.Ranks != o.Topology.Ranks:
		return fmt.Errorf("the placement of %s is for %d ranks; there are %d", m.Name, m.Placement.Ranks, o.Topology.Ranks)
	case o.StepTokens < lanes || o.Running < lanes || o.CacheTokens < lanes:
		return fmt.Errorf("a step of %d tokens, %d running requests, a cache of %d tokens; each must be at least the %d lanes", o.StepTokens, o.Running, o.CacheTokens, lanes)
	case o.Hold < 0:
		return fmt.Errorf("the maximum wait is %v; it must be at least 0", o.Hold)
	case !(o.DispatchBytes > 0):
		return fmt.Errorf("dispatched values have %v bytes; the size must be above 0", o.DispatchBytes)
	}
	return cost.Matches(t, m.Placement)
}
