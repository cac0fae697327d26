// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

// CheckGroups returns an error if the number of groups does not fit the experts or the ranks, or if other options
// cannot keep groups together. 0 or 1 group is no constraint.
func CheckGroups(a Algorithm, ranks, experts, redundant, groups int) error {
	switch {
	case groups >= 0 && groups <= 1:
		return nil
	case groups < 0 || experts%groups != 0:
		return fmt.Errorf("%d groups do not divide the %d experts", groups, experts)
	case groups%ranks != 0 && ranks%groups != 0:
		return fmt.Errorf("EP size %d and the gate's %d groups: one must divide the other to keep groups together", ranks, groups)
	case redundant > 0:
		return fmt.Errorf("%d redundant slots per rank: copies of experts would split groups", redundant)
	case a != Auto && a != ContiguousAlgorithm:
		return fmt.Errorf("algorithm %s does not keep groups together; allowed is %s, %s", a, Auto, ContiguousAlgorithm)
	}
	return nil
}

// groups returns the number of groups within which experts may move; 1 means no constraint.
func (p *Problem) groups() int { return max(p.Groups, 1) }

// solveAuto implements Auto. If a rank contains whole groups, groups are placed in place of experts, since there is no
// other choice. If a group spans several ranks, the search keeps experts within the ranks of their group.
func solveAuto(ctx context.Context, p *Problem) (Result, error) {
	wholeGroups := p.groups() > 1 && p.Groups%p.Ranks == 0
	of := p
	if wholeGroups {
		of = p.ofGroups()
	}
	solve := solveLayers
	if p.Attention == DataParallel {
		solve = solveJoint
	}
	var result Result
	var err error
	switch {
	case of.timed():
		result, err = of.solveTimed(ctx, solve)
	case of.refines():
		result, err = of.solveRefined(ctx, solve)
	default:
		result, err = solve(ctx, of)
	}
	if err != nil {
		return Result{}, err
	}
	if wholeGroups {
		result.Placement = ungroup(result.Placement, p.experts())
		for i := range result.Front {
			result.Front[i].Placement = ungroup(result.Front[i].Placement, p.experts())
		}
	}
	// With unequal shares of the tokens, ranks are not interchangeable.
	if p.Current != nil && !of.timed() && !of.refines() && p.Constraints.RankCapacity == nil {
		p.keepRankNumbers(result.Placement)
	}
	return result, nil
}

// ofGroups returns the problem whose experts are the groups.
func (p *Problem) ofGroups() *Problem {
	size := p.experts() / p.Groups
	of := *p
	of.Groups, of.Experts = 0, p.Groups
	if p.Attention == DataParallel {
		of.Requests = p.Requests.Grouped(size)
	} else {
		of.Tokens = nil
		of.LoadTokens = func(layer int) (*affinity.Counts, error) {
			counts, err := p.layerCounts(layer)
			if err != nil {
				return nil, err
			}
			return counts.Grouped(size), nil
		}
	}
	of.Pairs = nil
	for i := range p.Pairs {
		of.Pairs = append(of.Pairs, p.Pairs[i].Grouped(size))
	}
	if p.Occurrences != nil {
		of.Occurrences = p.Occurrences.Grouped(size)
	}
	if p.Clock != nil {
		of.Clock = p.Clock.grouped(size)
	}
	of.Starts = nil
	for _, start := range p.Starts {
		of.Starts = append(of.Starts, groupsOf(start, p.Groups))
	}
	of.each = size
	of.Constraints.Pins = nil
	for _, pin := range p.Constraints.Pins {
		of.Constraints.Pins = append(of.Constraints.Pins, Pin{pin.Layer, pin.Expert / size, pin.Rank})
	}
	if p.Current != nil {
		of.Current = groupsOf(p.Current, p.Groups)
		of.base = layerMoves(p.Current, ungroup(of.Current, p.experts()))
	}
	return &of
}

// groupsOf returns the placement of whole groups with the minimum number of moved experts.
func groupsOf(current *Placement, groups int) *Placement {
	size := current.Experts / groups
	to := &Placement{Ranks: current.Ranks, Experts: groups, SlotsPerRank: groups / current.Ranks}
	var exact assign.Solver
	for l, layer := range current.Layers {
		weight := make([]float32, groups*current.Ranks)
		for e, ranks := range current.Hosts(l) {
			for _, rank := range ranks {
				weight[e/size*current.Ranks+rank]++
			}
		}
		rankOf := exact.Assign(weight, slices.Repeat([]int{to.SlotsPerRank}, to.Ranks))
		to.Layers = append(to.Layers, fromRanks(layer.Layer, rankOf, to.Ranks))
	}
	return to
}

// ungroup replaces each group by its experts, in order.
func ungroup(of *Placement, experts int) *Placement {
	size := experts / of.Experts
	to := &Placement{Ranks: of.Ranks, Experts: experts, SlotsPerRank: of.SlotsPerRank * size}
	for _, layer := range of.Layers {
		slots := make([]int, 0, experts)
		for _, group := range layer.Slots {
			for i := range size {
				slots = append(slots, group*size+i)
			}
		}
		to.Layers = append(to.Layers, Layer{Layer: layer.Layer, Slots: slots})
	}
	return to
}

// exactRanks assigns items in groups to ranks exactly. All groups have the same number of consecutive ranks, which they
// do not share.
type exactRanks struct {
	items, groups assign.Solver
}

// assign returns the rank of each item. scores are [items × ranks]. groups divides the numbers of items and ranks, and
// is 1 without groups. The result is exact: it solves each pair of group and block of ranks, and then assigns blocks to
// groups.
func (s *exactRanks) assign(scores []float32, ranks, groups int) []int {
	items := len(scores) / ranks
	size, span := items/groups, ranks/groups
	capacity := slices.Repeat([]int{size / span}, span)
	if groups == 1 {
		return slices.Clone(s.items.Assign(scores, capacity))
	}
	worth := make([]float32, groups*groups)
	within := make([][]int, groups*groups)
	part := make([]float32, 0, size*span)
	for i := range worth {
		group, block := i/groups, i%groups
		part = part[:0]
		for item := group * size; item < (group+1)*size; item++ {
			part = append(part, scores[item*ranks+block*span:item*ranks+(block+1)*span]...)
		}
		within[i] = slices.Clone(s.items.Assign(part, capacity))
		sum := 0.0
		for item, rank := range within[i] {
			sum += float64(part[item*span+rank])
		}
		worth[i] = float32(sum)
	}
	rankOf := make([]int, 0, items)
	for group, block := range s.groups.Assign(worth, slices.Repeat([]int{1}, groups)) {
		for _, rank := range within[group*groups+block] {
			rankOf = append(rankOf, block*span+rank)
		}
	}
	return rankOf
}
