// SPDX-License-Identifier: Apache-2.0

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

// objective returns the requested objective, or the default.
func (o *Options) objective() placement.Objective { return cmp.Or(o.Objective, placement.Activation) }

// ranksPerNode returns the requested value, or the default.
func (o *Options) ranksPerNode() int { return cmp.Or(o.RanksPerNode, DefaultEvaluation().RanksPerNode) }

// profile returns the profile of the target machines.
func (o *Options) profile() *hardware.Profile { return cmp.Or(o.Hardware, hardware.DefaultProfile()) }

// storedProfile returns the hardware profile to store in a plan. The default profile is not stored, because every
// version contains it.
func (o *Options) storedProfile() *hardware.Profile {
	if o.Hardware.IsDefault() {
		return nil
	}
	return o.Hardware
}

// messages returns the message weights of the objective.
func (o *Options) messages() affinity.Messages {
	return o.objective().Messages(o.ranksPerNode(), cost.NodeMessage(o.profile()))
}

// messages returns the weights of the messages that the plan minimizes.
func (p *Plan) messages() affinity.Messages {
	return p.Objective.Messages(p.RanksPerNode, cost.NodeMessage(p.Machines()))
}

// messageForecast scores a rank by the messages that a token saves there.
type messageForecast struct {
	shares   cost.TokenForecast
	messages affinity.Messages
	topK     int
}

func (f messageForecast) Score(dst []float32, layer, position int) {
	f.shares.Score(dst, layer, position)
	f.messages.Expect(dst, f.topK)
}

// check validates objective and constraints against the model.
func (o *Options) check(m *trace.Model) error {
	if err := placement.CheckObjective(o.objective(), o.Ranks, o.ranksPerNode()); err != nil {
		return err
	}
	switch {
	case o.Unshuffled && o.Attention != placement.TensorParallel:
		return fmt.Errorf("unshuffled tokens: attention is %s; allowed is %s", o.Attention, placement.TensorParallel)
	case o.Unshuffled && o.messages().None():
		return fmt.Errorf("unshuffled tokens: objective %s has the same value under every placement; use %s", o.objective(), placement.RankDedup)
	}
	if err := o.checkCopies(m); err != nil {
		return err
	}
	return placement.CheckConstraints(o.Algorithm, o.Constraints, m.Layers, m.Experts, o.Ranks, o.minSlots(), o.Current != nil)
}
