package placement

import (
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/affinity"
)

// Objective is what a placement is to keep small.
type Objective string

// The objectives. All but Activation and Time suit an all-to-all that sends a token to a rank, or a node, once.
const (
	// Activation counts the activations whose expert is on another rank than the token.
	Activation Objective = "activation"
	// RankDedup counts the distinct other ranks that hold experts of a token.
	RankDedup Objective = "rank-dedup"
	// NodeDedup counts the distinct other nodes.
	NodeDedup Objective = "node-dedup"
	// Hierarchical counts both, each by what a message of its kind costs.
	Hierarchical Objective = "hierarchical"
	// Time is the modelled time of an MoE layer: what the busiest rank exchanges, and what the slowest one computes.
	Time Objective = "time"
)

// Objectives lists all objectives, MessageObjectives those that count messages.
var (
	MessageObjectives = []Objective{Activation, RankDedup, NodeDedup, Hierarchical}
	Objectives        = slices.Concat([]Objective{Time}, MessageObjectives)
)

// ParseObjective returns the objective of that name.
func ParseObjective(name string) (Objective, error) {
	for _, o := range Objectives {
		if string(o) == name {
			return o, nil
		}
	}
	return "", fmt.Errorf("objective %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Objectives), "[]"))
}

// tieCost decides between placements that send as many messages to other nodes: by those to other ranks, at so little that
// it outweighs nothing.
const tieCost = 0.01

// Messages are the weights of the objective. nodeCost is the cost of a message to another node, that to another rank being
// 1.
func (o Objective) Messages(ranksPerNode int, nodeCost float64) affinity.Messages {
	switch o {
	case RankDedup:
		return affinity.Messages{Rank: 1, RanksPerNode: ranksPerNode}
	case NodeDedup:
		return affinity.Messages{Rank: tieCost, Node: 1, RanksPerNode: ranksPerNode}
	case Hierarchical:
		return affinity.Messages{Rank: 1, Node: float32(nodeCost), RanksPerNode: ranksPerNode}
	default:
		return affinity.Messages{}
	}
}

// CheckObjective refuses an objective that the ranks and nodes leave nothing to choose for.
func CheckObjective(o Objective, ranks, ranksPerNode int) error {
	if _, err := ParseObjective(string(o)); err != nil {
		return err
	}
	switch {
	case ranksPerNode < 1:
		return fmt.Errorf("%d ranks per node; it must be at least 1", ranksPerNode)
	case o != NodeDedup && o != Hierarchical:
		return nil
	case o == NodeDedup && ranks <= ranksPerNode:
		return fmt.Errorf("objective %s with EP size %d and %d ranks per node: there is one node, and no other to send to", o, ranks, ranksPerNode)
	case ranks > ranksPerNode && ranks%ranksPerNode != 0:
		return fmt.Errorf("objective %s with EP size %d and %d ranks per node: nodes must have equally many ranks", o, ranks, ranksPerNode)
	}
	return nil
}
