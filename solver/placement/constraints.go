// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"math"
	"slices"
)

// Constraints restrict the placements of Solve. Auto and Contiguous respect them. With Contiguous, the placement is the
// one nearest to the contiguous placement, or to Current if moves have a budget or a cost.
type Constraints struct {
	// MoveBudget is the maximum number of experts per layer that a rank contains in the placement and not in Current;
	// nil means unlimited.
	MoveBudget *int
	// MigrationCost is the minimum gain of moving an expert, in units of the objective over the profile: local
	// activations for the objective Activation, saved messages for the others.
	MigrationCost float64
	// Pins fix the ranks of experts.
	Pins []Pin
	// RankCapacity contains the ranks' shares of the tokens, in any unit [ranks]; nil means equal shares. The number of
	// slots stays equal, as engines require.
	RankCapacity []float64
	// ExpertLoadLimit is the maximum activation load of a rank's experts in a layer, TokenLoadLimit the maximum token
	// load of a rank, in percent of the mean (of the rank's share), on the profile; 0 means no limit. Result.Unmet
	// reports limits that cannot be met.
	ExpertLoadLimit, TokenLoadLimit float64
}

// Pin fixes an expert to a rank. Redundant copies of the expert may be on other ranks.
type Pin struct {
	// Layer is the model's layer index.
	Layer, Expert, Rank int
}

// Binding reports whether the ranks of experts are constrained.
func (c *Constraints) Binding() bool {
	return c.MoveBudget != nil || c.MigrationCost != 0 || len(c.Pins) > 0 || c.ExpertLoadLimit != 0
}

// Moves reports whether moves are limited or have a cost. The default is then the placement in service.
func (c *Constraints) Moves() bool { return c.MoveBudget != nil || c.MigrationCost > 0 }

// Any reports whether there is any constraint.
func (c *Constraints) Any() bool {
	return c.Binding() || c.TokenLoadLimit != 0 || c.RankCapacity != nil
}

// CheckConstraints returns an error if constraints are malformed or contradictory. layers are the model's indices of
// the MoE layers; current reports whether there is a current placement.
func CheckConstraints(a Algorithm, c Constraints, layers []int, experts, ranks, redundant int, current bool) error {
	switch {
	case !c.Any():
		return nil
	case a != Auto && a != ContiguousAlgorithm:
		return fmt.Errorf("algorithm %s does not support constraints; allowed is %s, %s", a, Auto, ContiguousAlgorithm)
	case c.MoveBudget != nil && *c.MoveBudget < 0:
		return fmt.Errorf("move budget is %d; it cannot be negative", *c.MoveBudget)
	case !(c.MigrationCost >= 0) || math.IsInf(c.MigrationCost, 0):
		return fmt.Errorf("migration cost is %v; it cannot be negative", c.MigrationCost)
	case c.Moves() && !current:
		return fmt.Errorf("a move budget or migration cost needs a current placement")
	case c.ExpertLoadLimit > 0 && redundant > 0:
		return fmt.Errorf("an expert load limit is not supported with redundant slots, because the engine chooses which copy computes an expert")
	}
	for name, limit := range map[string]float64{"expert": c.ExpertLoadLimit, "token": c.TokenLoadLimit} {
		if limit != 0 && !(limit >= 100) || math.IsInf(limit, 0) {
			return fmt.Errorf("%s load limit is %v percent of the mean; it must be at least 100", name, limit)
		}
	}
	if err := CheckCapacity(c.RankCapacity, ranks); err != nil {
		return err
	}
	return checkPins(c.Pins, layers, experts, ranks)
}

// minCapacityShare is the minimum share of the tokens of a rank, as a fraction of the largest share. With less, the
// rank would only compute experts for other ranks.
const minCapacityShare = 1e-3

// CheckCapacity validates the shares of tokens for the ranks; nil means equal shares.
func CheckCapacity(capacity []float64, ranks int) error {
	if capacity == nil {
		return nil
	}
	if len(capacity) != ranks {
		return fmt.Errorf("%d rank capacities for %d ranks", len(capacity), ranks)
	}
	most := slices.Max(capacity)
	for rank, share := range capacity {
		if !(share >= minCapacityShare*most && share > 0) || math.IsInf(most, 0) {
			return fmt.Errorf("the capacity of rank %d is %v; it must be above 0, and at least %v of the largest", rank, share, minCapacityShare)
		}
	}
	return nil
}

func checkPins(pins []Pin, layers []int, experts, ranks int) error {
	type place struct{ layer, of int }
	rankOf, load := map[place]int{}, map[place]int{}
	for _, pin := range pins {
		expert, rank := place{pin.Layer, pin.Expert}, place{pin.Layer, pin.Rank}
		switch before, twice := rankOf[expert]; {
		case !slices.Contains(layers, pin.Layer):
			return fmt.Errorf("pin %v: layer %d is not a MoE layer; allowed is %v", pin, pin.Layer, layers)
		case pin.Expert < 0 || pin.Expert >= experts:
			return fmt.Errorf("pin %v: expert %d; allowed is 0 to %d", pin, pin.Expert, experts-1)
		case pin.Rank < 0 || pin.Rank >= ranks:
			return fmt.Errorf("pin %v: rank %d; allowed is 0 to %d", pin, pin.Rank, ranks-1)
		case twice && before != pin.Rank:
			return fmt.Errorf("pin %v: the expert is also pinned to rank %d", pin, before)
		case twice:
			continue
		}
		rankOf[expert] = pin.Rank
		if load[rank]++; load[rank] > experts/ranks {
			return fmt.Errorf("pin %v: more than %d experts of the layer are pinned to rank %d", pin, experts/ranks, pin.Rank)
		}
	}
	return nil
}

// String returns the pin in flag syntax, layer:expert:rank.
func (p Pin) String() string { return fmt.Sprintf("%d:%d:%d", p.Layer, p.Expert, p.Rank) }

// tokenLimits returns the number of tokens of each rank, out of a total.
func (c *Constraints) tokenLimits(total float64, ranks int) []float64 {
	limits := slices.Repeat([]float64{total / float64(ranks)}, ranks)
	for rank, capacity := range c.RankCapacity {
		limits[rank] = total * capacity / sum(c.RankCapacity)
	}
	return limits
}

// tolerance returns the maximum relative excess of a rank over its share of the tokens during the search, at most
// usual.
func (c *Constraints) tolerance(usual float64) float64 {
	if c.TokenLoadLimit == 0 {
		return usual
	}
	return min(usual, c.TokenLoadLimit/100-1)
}
