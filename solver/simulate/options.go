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

// Collective says how ranks with attention tensor parallelism come by what the others have computed.
type Collective string

// The collectives.
const (
	// ReduceScatter leaves each rank with a part of the tokens after attention, which are exchanged with experts' ranks and gathered again.
	ReduceScatter Collective = "reduce-scatter"
	// AllReduce gives all tokens to all ranks after attention, and again after each has computed its experts: no tokens are dispatched, and
	// none is local or not.
	AllReduce Collective = "all-reduce"
)

// Options are the engine and its machines.
type Options struct {
	Attention placement.Attention
	// Collective is that of attention TP.
	Collective Collective
	// Shape is the model's. It has the experts of the trace; where its MoE layers are more or fewer than the trace's, each of those stands for
	// as many.
	Shape    pipeline.Shape
	Profile  *hardware.Profile
	Topology Topology
	// Messages and DispatchBytes are those of a Layer.
	Messages      Messages
	DispatchBytes float64
	// StepTokens bounds the tokens of a step, Running the requests that are served at once, CacheTokens what the KV cache holds: over all
	// ranks, of which each has its part with attention DP. A request is admitted when there is room for all of it.
	StepTokens, Running, CacheTokens int
	// Cap and Weights are those of the policy price.
	Cap     float64
	Weights dispatch.Weights
	// Hold is how long a request may wait for the rank of its experts with the policy price; 0 is not at all.
	Hold time.Duration
}

// ParseCollective returns the collective of that name.
func ParseCollective(name string) (Collective, error) {
	if c := Collective(name); c == ReduceScatter || c == AllReduce {
		return c, nil
	}
	return "", fmt.Errorf("collective %q is unknown; allowed is %s, %s", name, ReduceScatter, AllReduce)
}

// ParseMessages returns the messages of that name.
func ParseMessages(name string) (Messages, error) {
	if m := Messages(name); m == PerActivation || m == PerRank {
		return m, nil
	}
	return "", fmt.Errorf("messages %q are unknown; allowed is %s, %s", name, PerActivation, PerRank)
}

// Lanes is how many batches a step has: one of each rank with attention DP, one of all with attention TP.
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

// layer is the MoE layer of the model.
func (o *Options) layer() Layer {
	return Layer{
		Hidden: o.Shape.Hidden, ExpertSize: o.Shape.ExpertSize, Experts: o.Shape.Experts, Messages: o.Messages, DispatchBytes: o.DispatchBytes, Kernels: EngineKernels,
	}
}

// costs are what the scheduler weighs: the exchange is over the slowest links, which requests are to be kept away from.
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

// check names what cannot be.
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
		return fmt.Errorf("the model has %d experts, top-%d, the trace %d, top-%d: they must be the same", o.Shape.Experts, o.Shape.TopK, t.Model.Experts, t.Model.TopK)
	case m.Placement.Ranks != o.Topology.Ranks:
		return fmt.Errorf("the placement of %s is for %d ranks; there are %d", m.Name, m.Placement.Ranks, o.Topology.Ranks)
	case o.StepTokens < lanes || o.Running < lanes || o.CacheTokens < lanes:
		return fmt.Errorf("a step of %d tokens, %d running requests, a cache of %d tokens; each must be at least the %d lanes", o.StepTokens, o.Running, o.CacheTokens, lanes)
	case o.Hold < 0:
		return fmt.Errorf("requests may wait %v; it must be at least 0", o.Hold)
	case !(o.DispatchBytes > 0):
		return fmt.Errorf("values of %v bytes are dispatched; they must be above 0", o.DispatchBytes)
	}
	return cost.Matches(t, m.Placement)
}
