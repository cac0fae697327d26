// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

// checkCurrent returns an error if the current placement has a different shape.
func (p *Problem) checkCurrent() error {
	c := p.Current
	if c == nil {
		return nil
	}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("the current placement: %w", err)
	}
	if c.Ranks != p.Ranks || c.Experts != p.experts() || len(c.Layers) != len(p.Layers) {
		return fmt.Errorf("the current placement has %d experts in %d MoE layers on %d ranks; the problem has %d in %d on %d",
			c.Experts, len(c.Layers), c.Ranks, p.experts(), len(p.Layers), p.Ranks)
	}
	return nil
}

// currentRanks returns the ranks of a layer's experts in the current placement. Only one of several copies counts, so
// that every rank has its share of experts.
func (p *Problem) currentRanks(l int) []int { return p.oneCopy(p.Current, l) }

func (p *Problem) oneCopy(of *Placement, l int) []int {
	weight := make([]float32, p.experts()*p.Ranks)
	for e, ranks := range of.Hosts(l) {
		for _, rank := range ranks {
			weight[e*p.Ranks+rank] = 1
		}
	}
	var exact exactRanks
	return exact.assign(weight, p.Ranks, p.groups())
}

func (p *Problem) allCurrentRanks() [][]int { return p.ranksOf(p.Current) }

// ranksOf returns the ranks of all layers' experts in a placement, with one copy of each.
func (p *Problem) ranksOf(of *Placement) [][]int {
	rankOf := make([][]int, len(p.Layers))
	for l := range rankOf {
		rankOf[l] = p.oneCopy(of, l)
	}
	return rankOf
}

// keepRankNumbers renumbers the ranks such that the number of moved experts is minimal: layer by layer with tensor
// parallelism, with the same permutation for all layers with data parallelism.
func (p *Problem) keepRankNumbers(to *Placement) {
	blocks := 1
	if p.Ranks%p.groups() == 0 {
		blocks = p.groups()
	}
	if p.Attention == DataParallel {
		all := make([]int, len(to.Layers))
		for l := range all {
			all[l] = l
		}
		renameRanks(p.Current, to, blocks, all)
		return
	}
	for l := range to.Layers {
		renameRanks(p.Current, to, blocks, []int{l})
	}
}

// renameRanks permutes ranks within blocks of consecutive ranks, and whole blocks, so that the ranks of a group stay
// together.
func renameRanks(current, to *Placement, blocks int, layers []int) {
	overlap := make([]float32, to.Ranks*to.Ranks)
	for _, l := range layers {
		hosts := current.Hosts(l)
		for slot, e := range to.Layers[l].Slots {
			for _, rank := range hosts[e] {
				overlap[slot/to.SlotsPerRank*to.Ranks+rank]++
			}
		}
	}
	var exact exactRanks
	name := exact.assign(overlap, to.Ranks, blocks)
	for _, l := range layers {
		slots := make([]int, len(to.Layers[l].Slots))
		for rank, named := range name {
			n := to.SlotsPerRank
			copy(slots[named*n:(named+1)*n], to.Layers[l].Slots[rank*n:(rank+1)*n])
		}
		to.Layers[l].Slots = slots
	}
}

// Moves returns the number of experts, over all layers, that ranks contain in one placement and not in the other.
func Moves(from, to *Placement) int {
	moves := 0
	for _, n := range layerMoves(from, to) {
		moves += n
	}
	return moves
}

// layerMoves returns the moves of each layer.
func layerMoves(from, to *Placement) []int {
	moves := make([]int, len(to.Layers))
	for l := range to.Layers {
		hosts := from.Hosts(l)
		for slot, e := range to.Layers[l].Slots {
			if !slices.Contains(hosts[e], slot/to.SlotsPerRank) {
				moves[l]++
			}
		}
	}
	return moves
}

// improve is solve with a given start: it takes the swaps with a gain by the Gram matrix, then alternates. A matrix of
// a sample of token IDs suffices near a good placement.
func (s *layerSearch) improve(rankOf []int, pairs *affinity.Pairs, seed, layer uint64) ([]int, float64) {
	some := s.sample
	if valuedTokens(s.ranks) < gramTokens {
		some = newSample(s.counts, gramTokens, s.shrinkage)
	}
	g := some.gram(s.counts.Experts)
	if pairs != nil {
		g = mixedGram(s.counts, pairs)
	}
	p := newPartition(g, slices.Clone(rankOf), s.ranks, s.groups)
	p.anneal(rand.New(rand.NewPCG(seed, layer)), s.stop, warm)
	if pairs != nil {
		_, value := s.value(p.rankOf, nil)
		return p.rankOf, value
	}
	// Only the better of the two is improved, because the remaining gain is small.
	best, prices, value := rankOf, assign.Prices(nil), -1.0
	for _, candidate := range [][]int{rankOf, p.rankOf} {
		if at, v := s.valueIn(s.steps()/2, candidate, nil); v > value {
			best, prices, value = candidate, at, v
		}
	}
	if s.stop.reached() {
		return best, value
	}
	next := s.bestExperts(best, prices)
	if _, v := s.valueIn(s.steps()/2, next, prices); v > value {
		return next, v
	}
	return best, value
}
