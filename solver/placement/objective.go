// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/affinity"
)

// Objective is the quantity that a placement minimizes.
type Objective string

// Supported objectives. All but Activation and Time suit an all-to-all that sends a token to a rank, or a node, once.
const (
	// Activation counts the activations whose expert is not on the token's rank.
	Activation Objective = "activation"
	// RankDedup counts the distinct other ranks that contain experts of a token.
	RankDedup Objective = "rank-dedup"
	// NodeDedup counts the distinct other nodes that contain experts of a token.
	NodeDedup Objective = "node-dedup"
	// Hierarchical counts both, weighted by the cost of a message of each kind.
	Hierarchical Objective = "hierarchical"
	// Time is the modelled time of a MoE layer: the exchange of the busiest rank and the computation of the slowest
	// rank.
	Time Objective = "time"
)

// Objectives lists all objectives, MessageObjectives those that count messages.
var (
	MessageObjectives = []Objective{Activation, RankDedup, NodeDedup, Hierarchical}
	Objectives        = slices.Concat([]Objective{Time}, MessageObjectives)
)

// ParseObjective returns the objective with the given name.
func ParseObjective(name string) (Objective, error) {
	for _, o := range Objectives {
		if string(o) == name {
			return o, nil
		}
	}
	return "", fmt.Errorf("objective %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Objectives), "[]"))
}

// tieCost is the weight of messages to other ranks for NodeDedup. It is small, so that it only decides between
// placements with equally many messages to other nodes.
const tieCost = 0.01

// Messages returns the message weights of the objective. nodeCost is the cost of a message to another node, relative to
// a message to another rank.
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

// CheckObjective returns an error if the ranks and nodes leave no choice for an objective.
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
		return fmt.Errorf("objective %s with EP size %d and %d ranks per node: there is only one node", o, ranks, ranksPerNode)
	case ranks > ranksPerNode && ranks%ranksPerNode != 0:
		return fmt.Errorf("objective %s with EP size %d and %d ranks per node: all nodes must have the same number of ranks", o, ranks, ranksPerNode)
	}
	return nil
}
