// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
)

// Placement assigns experts to slots. Slot p is on rank p / SlotsPerRank.
type Placement struct {
	Ranks        int `json:"ep_size"`
	Experts      int `json:"num_experts"`
	SlotsPerRank int `json:"slots_per_rank"`
	// CopyRule is the engine's rule for choosing among the copies of an expert; absent for NearestCopy.
	CopyRule CopyRule `json:"copy_rule,omitempty"`
	// Layers has one entry for each MoE layer, ascending.
	Layers []Layer `json:"layers"`
}

// Layer is the placement of one MoE layer.
type Layer struct {
	// Layer is the model's layer index, counting dense layers.
	Layer int `json:"layer"`
	// Slots are expert IDs in slot order.
	Slots []int `json:"slots"`
}

// Redundant reports whether there are more slots than experts.
func (p *Placement) Redundant() bool { return p.Ranks*p.SlotsPerRank > p.Experts }

// Hosts returns, for each expert of the i'th MoE layer, the ranks that contain a copy of it, ascending.
func (p *Placement) Hosts(i int) [][]int {
	hosts := make([][]int, p.Experts)
	for slot, expert := range p.Layers[i].Slots {
		hosts[expert] = append(hosts[expert], slot/p.SlotsPerRank)
	}
	return hosts
}

// Limits of a placement: several times those of the largest known deployments (512 experts, 384 ranks, 95 MoE layers).
// The memory of an evaluation grows with ranks² and with ranks × layers.
const (
	maxExperts    = 1 << 16
	maxRanks      = 1 << 10
	maxRankLayers = 1 << 17
)

// Validate checks that every layer fills all slots, places every expert at least once, and no expert twice on a rank.
func (p *Placement) Validate() error {
	switch {
	case p.Ranks < 1 || p.Ranks > maxRanks:
		return fmt.Errorf("ep_size is %d; allowed is 1 to %d", p.Ranks, maxRanks)
	case p.Experts < 1 || p.Experts > maxExperts:
		return fmt.Errorf("num_experts is %d; allowed is 1 to %d", p.Experts, maxExperts)
	case p.SlotsPerRank < 1 || p.SlotsPerRank > p.Experts:
		return fmt.Errorf("slots_per_rank is %d; allowed is 1 to num_experts, %d", p.SlotsPerRank, p.Experts)
	case p.Ranks*len(p.Layers) > maxRankLayers:
		return fmt.Errorf("ep_size is %d for %d layers; allowed is up to %d ranks in all layers", p.Ranks, len(p.Layers), maxRankLayers)
	case p.Ranks > p.Experts*p.Experts || p.Ranks*p.SlotsPerRank < p.Experts:
		return fmt.Errorf("%d ranks of %d slots cannot hold %d experts", p.Ranks, p.SlotsPerRank, p.Experts)
	case len(p.Layers) == 0:
		return errors.New("layers is empty")
	case p.CopyRule != NearestCopy && p.CopyRule != RankModuloCopy:
		return fmt.Errorf("copy_rule is %q; allowed is %s, or none", p.CopyRule, RankModuloCopy)
	}
	lastSeen := make([]int, p.Experts)
	stamp := 0
	for i, layer := range p.Layers {
		if layer.Layer < 0 || i > 0 && layer.Layer <= p.Layers[i-1].Layer {
			return fmt.Errorf("layer %d: layers must ascend from 0", layer.Layer)
		}
		if len(layer.Slots) != p.Ranks*p.SlotsPerRank {
			return fmt.Errorf("layer %d has %d slots; %d ranks of %d need %d", layer.Layer, len(layer.Slots), p.Ranks, p.SlotsPerRank, p.Ranks*p.SlotsPerRank)
		}
		before := stamp
		for slot, expert := range layer.Slots {
			if slot%p.SlotsPerRank == 0 {
				stamp++
			}
			if expert < 0 || expert >= p.Experts {
				return fmt.Errorf("layer %d, slot %d: expert %d; allowed is 0 to %d", layer.Layer, slot, expert, p.Experts-1)
			}
			if lastSeen[expert] == stamp {
				return fmt.Errorf("layer %d: expert %d is twice on rank %d", layer.Layer, expert, slot/p.SlotsPerRank)
			}
			lastSeen[expert] = stamp
		}
		for expert, last := range lastSeen {
			if last <= before {
				return fmt.Errorf("layer %d: expert %d has no slot", layer.Layer, expert)
			}
		}
	}
	return nil
}

// fromRanks returns a layer, given the rank of each expert. Experts ascend within a rank.
func fromRanks(layer int, rankOf []int, ranks int) Layer {
	slots := make([]int, 0, len(rankOf))
	for rank := range ranks {
		for expert, r := range rankOf {
			if r == rank {
				slots = append(slots, expert)
			}
		}
	}
	return Layer{Layer: layer, Slots: slots}
}

// build applies the same rule to every layer.
func build(layers []int, experts, ranks int, rankOf func(expert int) int) *Placement {
	p := &Placement{Ranks: ranks, Experts: experts, SlotsPerRank: experts / ranks}
	for _, layer := range layers {
		of := make([]int, experts)
		for expert := range of {
			of[expert] = rankOf(expert)
		}
		p.Layers = append(p.Layers, fromRanks(layer, of, ranks))
	}
	return p
}

// Contiguous returns the default placement of engines: rank i contains the i'th run of experts.
func Contiguous(layers []int, experts, ranks int) *Placement {
	return build(layers, experts, ranks, func(expert int) int { return expert * ranks / experts })
}

// RoundRobin returns the placement with expert e on rank e mod ranks.
func RoundRobin(layers []int, experts, ranks int) *Placement {
	return build(layers, experts, ranks, func(expert int) int { return expert % ranks })
}
