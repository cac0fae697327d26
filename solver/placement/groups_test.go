// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
	"github.com/semmoe/operator/test/tier"
)

// groupInstances is the number of random instances with groups.
var groupInstances = tier.Choose(300, 300, 10_000)

// grouped is a trace whose gate chooses two groups, and in each experts that contiguous placements separate.
func grouped(groups int) tracetest.Shape {
	return tracetest.Shape{
		Experts: groups * 4, TopK: 2, Layers: 2, Vocabulary: 60, Domains: 3, DocumentsPerDomain: 4, RequestsPerDocument: 2, TokensPerRequest: 30,
		Noise: 10, Groups: groups,
	}
}

// checkWhole requires that every group of slots contains each expert of one group.
func checkWhole(t *testing.T, p *placement.Placement, groups int) {
	t.Helper()
	size := p.Experts / groups
	for _, layer := range p.Layers {
		seen := make([]bool, p.Experts)
		for slot, expert := range layer.Slots {
			if first := layer.Slots[slot-slot%size]; expert/size != first/size {
				t.Fatalf("layer %d, slot %d: expert %d is not of the group of expert %d: %v", layer.Layer, slot, expert, first, layer.Slots)
			}
			if seen[expert] {
				t.Fatalf("layer %d: expert %d is there twice: %v", layer.Layer, expert, layer.Slots)
			}
			seen[expert] = true
		}
		if len(layer.Slots) != p.Experts {
			t.Fatalf("layer %d: %d slots for %d experts", layer.Layer, len(layer.Slots), p.Experts)
		}
	}
}

// valueOf returns the value of a placement for a problem, by the search.
func valueOf(t *testing.T, p placement.Problem, of *placement.Placement) float64 {
	if p.Attention == placement.DataParallel {
		return placement.ValueJoint(t.Context(), p, of)
	}
	return placement.Value(t.Context(), p, of)
}

// TestGroupsStayWhole solves random instances of every relation of groups and ranks, from scratch and from a placement
// in service that may have split the groups.
func TestGroupsStayWhole(t *testing.T) {
	random := rand.New(rand.NewPCG(11, 11))
	for instance := range instances(groupInstances) {
		p := randomGrouped(random, instance)
		if instance%5 == 4 {
			p.Current = shuffled(p, random)
		}
		name := fmt.Sprintf("instance %d: %s, %d groups on %d ranks", instance, p.Attention, p.Groups, p.Ranks)
		result := solve(t, p)
		checkWhole(t, result.Placement, p.Groups)
		contiguous := placement.Contiguous(p.Layers, result.Placement.Experts, p.Ranks)
		// The rates are sums of float32 values in a different order.
		if least := valueOf(t, p, contiguous); result.TrainLAR < least-1e-6 {
			t.Errorf("%s: %v, contiguous is %v", name, result.TrainLAR, least)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

// randomGrouped draws a problem of up to 24 experts.
func randomGrouped(random *rand.Rand, instance int) placement.Problem {
	groups := 2 + random.IntN(3)
	span := 1 + random.IntN(2)
	experts, ranks := groups*span*(1+random.IntN(2)), groups*span
	if instance%3 == 0 {
		// Whole groups on each rank.
		for ranks = 1 + random.IntN(groups); groups%ranks != 0; ranks-- {
		}
	}
	p := placement.Problem{
		Attention: modes[instance%2], Ranks: ranks, Groups: groups, Algorithm: placement.Auto, Seed: random.Uint64(), Layers: []int{0, 2},
	}
	if p.Attention == placement.DataParallel {
		requests := &affinity.RequestCounts{Layers: 2, Experts: experts, TopK: 1}
		for range 2 + random.IntN(8) {
			tokens := float32(1 + random.IntN(30))
			row := make([]float32, 2*experts)
			for range int(tokens) {
				for l := range 2 {
					row[l*experts+random.IntN(experts)]++
				}
			}
			requests.Tokens, requests.Rows = append(requests.Tokens, tokens), append(requests.Rows, row)
		}
		p.Requests = requests
		return p
	}
	p.Tokens = []affinity.Counts{randomCounts(random, experts), randomCounts(random, experts)}
	return p
}

// randomCounts returns counts of up to eight token IDs, each with at most two experts.
func randomCounts(random *rand.Rand, experts int) affinity.Counts {
	c := affinity.Counts{Experts: experts, TopK: 1, Start: []int{0}}
	for range 2 + random.IntN(7) {
		pair := []int{random.IntN(experts), random.IntN(experts)}
		slices.Sort(pair)
		for _, e := range slices.Compact(pair) {
			c.Expert, c.Count = append(c.Expert, uint16(e)), append(c.Count, float32(1+random.IntN(20)))
		}
		n := float32(0)
		for _, count := range c.Count[c.Start[len(c.Start)-1]:] {
			n += count
		}
		c.Start, c.Occurrences = append(c.Start, len(c.Expert)), append(c.Occurrences, n)
	}
	return c
}

// shuffled returns a placement that ignores groups.
func shuffled(p placement.Problem, random *rand.Rand) *placement.Placement {
	experts := 0
	if p.Attention == placement.DataParallel {
		experts = p.Requests.Experts
	} else {
		experts = p.Tokens[0].Experts
	}
	to := placement.Contiguous(p.Layers, experts, p.Ranks)
	for l := range to.Layers {
		to.Layers[l].Slots = random.Perm(experts)
	}
	return to
}

// TestGroupsReachTheOptimum compares with the enumeration of all placements that keep groups together.
func TestGroupsReachTheOptimum(t *testing.T) {
	random := rand.New(rand.NewPCG(12, 12))
	for range 40 {
		p := placement.Problem{
			Attention: placement.TensorParallel, Ranks: 4, Groups: 2, Algorithm: placement.Auto, Seed: 1, Layers: []int{0},
			Tokens: []affinity.Counts{randomCounts(random, 12)},
		}
		got, best := solve(t, p).TrainLAR, placement.Enumerate(t.Context(), p)
		if got > best*(1+1e-3) || got < best*(1-1e-3) {
			t.Errorf("%v, the optimum is %v", got, best)
		}
	}
}

// TestLargerGroupsStayWhole solves layers with too many placements to enumerate, but few enough swaps to try all.
func TestLargerGroupsStayWhole(t *testing.T) {
	random := rand.New(rand.NewPCG(13, 13))
	for range 2 {
		p := placement.Problem{
			Attention: placement.TensorParallel, Ranks: 4, Groups: 2, Algorithm: placement.Auto, Seed: 1, Layers: []int{0},
			Tokens: []affinity.Counts{randomCounts(random, 28)},
		}
		checkWhole(t, solve(t, p).Placement, 2)
	}
}

// TestExpertsWithinGroupsArePlaced generates tokens that use every other expert of a group: contiguous runs separate
// all related experts, and only the order within groups can improve locality.
func TestExpertsWithinGroupsArePlaced(t *testing.T) {
	for _, attention := range modes {
		shape := grouped(4)
		shape.Experts = 32
		p := problem(t, tracetest.Generate(shape, 1), attention, 8)
		p.Groups = 4
		result := solve(t, p)
		checkWhole(t, result.Placement, 4)
		if plain := valueOf(t, p, placement.Contiguous(p.Layers, 32, 8)); result.TrainLAR < plain*1.1 {
			t.Errorf("%s: %v; contiguous is %v", attention, result.TrainLAR, plain)
		}
		p.Groups = 0
		if free := solve(t, p).TrainLAR; result.TrainLAR > free*(1+0.01) {
			t.Errorf("%s: %v with groups, %v without the constraint", attention, result.TrainLAR, free)
		}
	}
}

// TestOneGroupPerRank can only choose the numbering of ranks. With attention TP this has the value of the contiguous
// placement; with DP the numbering couples layers.
func TestOneGroupPerRank(t *testing.T) {
	for _, attention := range modes {
		p := problem(t, tracetest.Generate(grouped(4), 3), attention, 4)
		p.Groups = 4
		result := solve(t, p)
		checkWhole(t, result.Placement, 4)
		plain := valueOf(t, p, placement.Contiguous(p.Layers, 16, 4))
		if diff := result.TrainLAR - plain; diff < -1e-6 || attention == placement.TensorParallel && diff > 1e-6 {
			t.Errorf("%s: %v; contiguous is %v", attention, result.TrainLAR, plain)
		}
		if got := valueOf(t, p, result.Placement); got < result.TrainLAR-1e-3 {
			t.Errorf("%s: the search says %v, counted by experts it is %v", attention, result.TrainLAR, got)
		}
	}
}

// TestGroupsWithPairs places by co-activations of single occurrences.
func TestGroupsWithPairs(t *testing.T) {
	tr := tracetest.Generate(grouped(4), 2)
	pairs, err := affinity.CountPairs(t.Context(), tr, tr.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	for _, ranks := range []int{1, 2, 4, 8, 16} {
		p := problem(t, tr, placement.TensorParallel, ranks)
		p.Groups, p.Pairs = 4, pairs
		checkWhole(t, solve(t, p).Placement, 4)
	}
}

func TestSolvingAgainWithGroupsMovesNothing(t *testing.T) {
	for _, attention := range modes {
		for _, ranks := range []int{2, 4, 8} {
			p := problem(t, tracetest.Generate(grouped(4), 4), attention, ranks)
			p.Groups = 4
			p.Current = solve(t, p).Placement
			again := solve(t, p).Placement
			checkWhole(t, again, 4)
			if moves := placement.Moves(p.Current, again); moves > 4 {
				t.Errorf("%s on %d ranks: %d of 32 experts move although nothing changed", attention, ranks, moves)
			}
		}
	}
}

func TestGroupsAreDeterministicOnAnyNumberOfProcessors(t *testing.T) {
	tr := tracetest.Generate(grouped(4), 5)
	for _, attention := range modes {
		for _, ranks := range []int{2, 8} {
			p := problem(t, tr, attention, ranks)
			p.Groups = 4
			var first placement.Result
			for i, processors := range []int{1, 2, 5} {
				before := runtime.GOMAXPROCS(processors)
				result := solve(t, p)
				runtime.GOMAXPROCS(before)
				if i == 0 {
					first = result
				}
				if diff := cmp.Diff(first, result); diff != "" {
					t.Errorf("%s on %d ranks, %d processors: %s", attention, ranks, processors, diff)
				}
			}
		}
	}
}

// TestAssignExactlyIsOptimal compares with all assignments of 8 items in 2 groups to 4 ranks.
func TestAssignExactlyIsOptimal(t *testing.T) {
	random := rand.New(rand.NewPCG(6, 6))
	for range 200 {
		scores := make([]float32, 8*4)
		for i := range scores {
			scores[i] = float32(random.IntN(100))
		}
		sum := func(rankOf []int) (total float32) {
			for item, rank := range rankOf {
				total += scores[item*4+rank]
			}
			return total
		}
		best := float32(0)
		// One bit per item is the rank within the block of its group; one more bit assigns blocks to groups.
		for bits := range 1 << 9 {
			rankOf, load := make([]int, 8), make([]int, 4)
			for item := range rankOf {
				rankOf[item] = (item/4^bits>>8)*2 + bits>>item&1
				load[rankOf[item]]++
			}
			if slices.Max(load) == 2 {
				best = max(best, sum(rankOf))
			}
		}
		got := placement.AssignExactly(scores, 4, 2)
		load := make([]int, 4)
		for item, rank := range got {
			load[rank]++
			if rank/2 != got[item-item%4]/2 {
				t.Fatalf("item %d is not with its group: %v", item, got)
			}
		}
		if slices.Max(load) != 2 || sum(got) != best {
			t.Errorf("%v is worth %v; the best is worth %v", got, sum(got), best)
		}
	}
}

func TestGroupsAreRefused(t *testing.T) {
	tr := tracetest.Generate(grouped(6), 1)
	for name, test := range map[string]struct {
		change func(*placement.Problem)
		want   string
	}{
		"neither divides": {func(p *placement.Problem) { p.Ranks = 4 }, "EP size 4 and the gate's 6 groups"},
		"not the experts": {func(p *placement.Problem) { p.Groups = 7 }, "7 groups do not divide the 24 experts"},
		"negative":        {func(p *placement.Problem) { p.Groups = -1 }, "-1 groups do not divide"},
		"redundant slots": {func(p *placement.Problem) { p.RedundantSlots = 1 }, "1 redundant slots per rank"},
		"algorithm":       {func(p *placement.Problem) { p.Algorithm = placement.EPLB }, "algorithm eplb does not keep groups together; allowed is auto, contiguous"},
	} {
		p := problem(t, tr, placement.TensorParallel, 3)
		p.Groups = 6
		test.change(&p)
		if _, err := placement.Solve(t.Context(), p); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	p := problem(t, tr, placement.TensorParallel, 3)
	p.Groups, p.Algorithm = 6, placement.ContiguousAlgorithm
	checkWhole(t, solve(t, p).Placement, 6)
}
