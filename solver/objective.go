package solver

import (
	"cmp"
	"fmt"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// objective is the one that is asked for, or the default.
func (o *Options) objective() placement.Objective { return cmp.Or(o.Objective, placement.Activation) }

// ranksPerNode is the one that is asked for, or the default.
func (o *Options) ranksPerNode() int { return cmp.Or(o.RanksPerNode, DefaultEvaluation().RanksPerNode) }

// nodeMessage is what a message to another node costs in messages to another rank.
func nodeMessage() float64 { return cost.NodeMessage(hardware.DefaultProfile()) }

// messages are the objective's weights.
func (o *Options) messages() affinity.Messages {
	return o.objective().Messages(o.ranksPerNode(), nodeMessage())
}

// messages are what the plan is to send few of.
func (p *Plan) messages() affinity.Messages {
	return p.Objective.Messages(p.RanksPerNode, nodeMessage())
}

// messageForecast scores ranks by the messages that a token would not need there.
type messageForecast struct {
	shares   cost.TokenForecast
	messages affinity.Messages
	topK     int
}

func (f messageForecast) Score(dst []float32, layer, position int) {
	f.shares.Score(dst, layer, position)
	f.messages.Expect(dst, f.topK)
}

// check refuses an objective and constraints that do not fit the model.
func (o *Options) check(m *trace.Model) error {
	if err := placement.CheckObjective(o.objective(), o.Ranks, o.ranksPerNode()); err != nil {
		return err
	}
	switch {
	case o.Unshuffled && o.Attention != placement.TensorParallel:
		return fmt.Errorf("tokens that are not shuffled: attention is %s; allowed is %s", o.Attention, placement.TensorParallel)
	case o.Unshuffled && o.messages().None():
		return fmt.Errorf("tokens that are not shuffled: objective %s is the same under every placement; use %s", o.objective(), placement.RankDedup)
	}
	return placement.CheckConstraints(o.Algorithm, o.Constraints, m.Layers, m.Experts, o.Ranks, o.RedundantSlots, o.Current != nil)
}
