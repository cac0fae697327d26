// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"slices"
)

// CopyRule is an engine's rule for choosing among the copies of an expert. A copy that the engine does not use is not
// local.
type CopyRule string

const (
	// NearestCopy uses the copy on the token's own rank, if any.
	NearestCopy CopyRule = ""
	// RankModuloCopy orders the n copies of an expert by rank, and uses copy r mod n on rank r: vllm-ascend without
	// tensor parallelism (generate_log2phy_map in vllm_ascend/eplb/core/eplb_utils.py, v0.20.2rc1 to v0.25.1rc1).
	RankModuloCopy CopyRule = "rank-modulo"
)

// CopyRules lists the names of the rules, as flag values.
var CopyRules = []string{"nearest", string(RankModuloCopy)}

// ParseCopyRule returns the rule with the given name.
func ParseCopyRule(name string) (CopyRule, error) {
	switch name {
	case "nearest":
		return NearestCopy, nil
	case string(RankModuloCopy):
		return RankModuloCopy, nil
	}
	return "", fmt.Errorf("copy rule %q is unknown; allowed is %s, %s", name, CopyRules[0], CopyRules[1])
}

// Copy returns the rank whose copy a rank uses, given the ascending list of ranks with a copy. With NearestCopy, a rank
// without a copy uses the first copy.
func (c CopyRule) Copy(hosts []int, rank int) int {
	switch {
	case c == RankModuloCopy:
		return hosts[rank%len(hosts)]
	case slices.Contains(hosts, rank):
		return rank
	}
	return hosts[0]
}

// local returns the ranks that use their own copy, among the ranks with a copy.
func (c CopyRule) local(hosts []int) []int {
	if c == NearestCopy {
		return hosts
	}
	var local []int
	for _, rank := range hosts {
		if c.Copy(hosts, rank) == rank {
			local = append(local, rank)
		}
	}
	return local
}

// Local returns, for each expert of the i'th MoE layer, the ranks that use their own copy of it, ascending. On these
// ranks the expert is local.
func (p *Placement) Local(i int) [][]int {
	hosts := p.Hosts(i)
	if p.CopyRule != NearestCopy {
		for e := range hosts {
			hosts[e] = p.CopyRule.local(hosts[e])
		}
	}
	return hosts
}

// ruleRounds is the maximum number of alternations between experts and requests in applyCopyRule.
const ruleRounds = 6

// applyCopyRule moves experts of a solved placement such that ranks use their own copies under the problem's rule
// (attention DP). The preceding search counts every copy as local. applyCopyRule alternates between improving each
// layer by single steps and reassigning requests, and keeps the best of all rounds. With constraints on experts it does
// nothing.
func (p *Problem) applyCopyRule(result *Result, stop limit) {
	if p.CopyRule == NearestCopy || result.Placement == nil {
		return
	}
	result.Placement.CopyRule = p.CopyRule
	if p.RedundantSlots == 0 || p.Attention != DataParallel || p.Constraints.Binding() || p.Constraints.Moves() {
		return
	}
	part := *p
	part.Requests = sampleRequests(p.Requests, p.Seed)
	s := newJointSearch(&part, stop)
	best := result.Placement
	ranks, most := s.localRequests(best)
	for range ruleRounds {
		next := *best
		next.Layers = slices.Clone(best.Layers)
		for l := range next.Layers {
			s.affinities(l, ranks)
			next.Layers[l].Slots = p.CopyRule.improve(next.Layers[l].Slots, next.SlotsPerRank, s.weight, s.ranks, stop)
		}
		var value float64
		if ranks, value = s.localRequests(&next); value <= most*(1+1e-6) {
			break
		}
		best, most = &next, value
		if stop.reached() {
			break
		}
	}
	result.Placement = best
	if p.Algorithm == Auto {
		result.TrainLAR = most
	}
}

// localRequests is bestRequests for a placement under its copy rule.
func (s *jointSearch) localRequests(p *Placement) ([]int, float64) {
	local := make([][][]int, len(p.Layers))
	for l := range local {
		local[l] = p.Local(l)
	}
	n := s.requests.Experts
	for r, activations := range s.requests.Rows {
		row := s.balance.Scores[r*s.ranks : (r+1)*s.ranks]
		clear(row)
		for l := range local {
			for e, count := range activations[l*n : (l+1)*n] {
				for _, rank := range local[l][e] {
					row[rank] += count
				}
			}
		}
	}
	ranks := s.assignBalanced()
	sum := 0.0
	for r, rank := range ranks {
		sum += float64(s.balance.Scores[r*s.ranks+rank])
	}
	return ranks, sum / s.activations
}

// slotSearch is a local search over the slots of one layer. Its value is the weight of each expert on the ranks that
// use their own copy.
type slotSearch struct {
	rule   CopyRule
	ranks  int
	weight []float32 // [experts × ranks]
	hosts  [][]int
	value  []float32
}

// improve takes every step with a gain: replacing the expert in a slot, or swapping the experts of two slots.
func (c CopyRule) improve(slots []int, perRank int, weight []float32, ranks int, stop limit) []int {
	experts := len(weight) / ranks
	s := &slotSearch{rule: c, ranks: ranks, weight: weight, hosts: make([][]int, experts), value: make([]float32, experts)}
	slots = slices.Clone(slots)
	for slot, e := range slots {
		s.hosts[e] = append(s.hosts[e], slot/perRank)
	}
	largest := float32(0)
	for e, hosts := range s.hosts {
		s.value[e] = s.worth(e, hosts)
		largest = max(largest, s.value[e])
	}
	for improved := true; improved && !stop.reached(); {
		improved = false
		for slot := range slots {
			// Gains below the rounding error of the sums do not count.
			if s.replace(slots, slot, perRank, largest*1e-5) || s.exchange(slots, slot, perRank, largest*1e-5) {
				improved = true
			}
		}
	}
	for rank := range ranks {
		slices.Sort(slots[rank*perRank : (rank+1)*perRank])
	}
	return slots
}

// worth returns the local weight of an expert with copies on the given ranks.
func (s *slotSearch) worth(e int, hosts []int) float32 {
	sum := float32(0)
	for _, rank := range hosts {
		if s.rule.Copy(hosts, rank) == rank {
			sum += s.weight[e*s.ranks+rank]
		}
	}
	return sum
}

// moved returns hosts without one rank and with another; -1 means none.
func moved(hosts []int, without, with int) []int {
	out := make([]int, 0, len(hosts)+1)
	for _, rank := range hosts {
		if rank != without {
			out = append(out, rank)
		}
	}
	if with >= 0 {
		at, _ := slices.BinarySearch(out, with)
		out = slices.Insert(out, at, with)
	}
	return out
}

func (s *slotSearch) set(e int, hosts []int) {
	s.hosts[e], s.value[e] = hosts, s.worth(e, hosts)
}

// replace puts the expert with the largest gain into a slot, if the slot's expert has another copy.
func (s *slotSearch) replace(slots []int, slot, perRank int, least float32) bool {
	e, rank := slots[slot], slot/perRank
	if len(s.hosts[e]) == 1 {
		return false
	}
	left := s.worth(e, moved(s.hosts[e], rank, -1)) - s.value[e]
	best, gain := -1, least
	for f := range s.hosts {
		if slices.Contains(s.hosts[f], rank) {
			continue
		}
		if g := left + s.worth(f, moved(s.hosts[f], -1, rank)) - s.value[f]; g > gain {
			best, gain = f, g
		}
	}
	if best < 0 {
		return false
	}
	s.set(e, moved(s.hosts[e], rank, -1))
	s.set(best, moved(s.hosts[best], -1, rank))
	slots[slot] = best
	return true
}

// exchange swaps the expert of a slot with the expert on another rank for which the gain is largest.
func (s *slotSearch) exchange(slots []int, slot, perRank int, least float32) bool {
	e, rank := slots[slot], slot/perRank
	best, gain := -1, least
	for other, f := range slots {
		to := other / perRank
		if f == e || to == rank || slices.Contains(s.hosts[e], to) || slices.Contains(s.hosts[f], rank) {
			continue
		}
		g := s.worth(e, moved(s.hosts[e], rank, to)) - s.value[e] + s.worth(f, moved(s.hosts[f], to, rank)) - s.value[f]
		if g > gain {
			best, gain = other, g
		}
	}
	if best < 0 {
		return false
	}
	f, to := slots[best], best/perRank
	s.set(e, moved(s.hosts[e], rank, to))
	s.set(f, moved(s.hosts[f], to, rank))
	slots[slot], slots[best] = f, e
	return true
}
