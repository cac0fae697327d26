package solver

import (
	"cmp"
	"context"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// objective is the one that is asked for, or the default.
func (o *Options) objective() placement.Objective { return cmp.Or(o.Objective, placement.Activation) }

// ranksPerNode is the one that is asked for, or the default.
func (o *Options) ranksPerNode() int { return cmp.Or(o.RanksPerNode, DefaultEvaluation().RanksPerNode) }

// nodeMessage is what a message to another node costs in messages to another rank.
func nodeMessage() float64 { return cost.NodeMessage(cost.NVLinkH200, cost.RDMA400) }

// messages are the objective's weights.
func (o *Options) messages() affinity.Messages {
	return o.objective().Messages(o.ranksPerNode(), nodeMessage())
}

// Messages are what the plan's scores are about.
func (p *Plan) Messages() affinity.Messages {
	return p.Objective.Messages(p.RanksPerNode, nodeMessage())
}

// check refuses an objective and constraints that do not fit the model.
func (o *Options) check(m *trace.Model) error {
	if err := placement.CheckObjective(o.objective(), o.Ranks, o.ranksPerNode()); err != nil {
		return err
	}
	return placement.CheckConstraints(o.Algorithm, o.Constraints, m.Layers, m.Experts, o.Ranks, o.RedundantSlots, o.Current != nil)
}

// scores are the counts that tables are made from, with the hosts of what is counted: activations of experts, or what ranks save.
func (s *search) scores(ctx context.Context, hosts []affinity.Hosts) ([]affinity.Counts, []affinity.Hosts, error) {
	if s.options.messages().Node == 0 {
		return s.tokens, hosts, nil
	}
	counts, err := affinity.CountShares(ctx, s.trace, s.train, hosts, s.options.Ranks, s.options.messages())
	each := make([]affinity.Hosts, len(hosts))
	for l := range each {
		each[l] = affinity.EachRank(s.options.Ranks)
	}
	return counts, each, err
}
