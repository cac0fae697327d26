// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
	"github.com/semmoe/operator/test/tier"
)

// constraintInstances is the number of random instances with constraints.
var constraintInstances = tier.Choose(150, 150, 10_000)

// objectives are the objectives of random instances. Two ranks share a node.
var objectives = []placement.Objective{placement.Activation, placement.RankDedup, placement.NodeDedup, placement.Hierarchical}

// randomConstrained draws a problem of up to 12 experts in two layers, with random constraints of every kind.
func randomConstrained(t *testing.T, random *rand.Rand, instance int) placement.Problem {
	ranks := 2 * (1 + random.IntN(2))
	shape := tracetest.Shape{
		Experts: ranks * (1 + random.IntN(3)), TopK: 1 + random.IntN(2), Layers: 2, Vocabulary: 4 + random.IntN(20), Domains: 2,
		DocumentsPerDomain: 2, RequestsPerDocument: 2, TokensPerRequest: 8, Noise: random.IntN(100),
	}
	tr := tracetest.Generate(shape, random.Uint64())
	p := problem(t, tr, modes[instance%2], ranks)
	p.Seed = random.Uint64()
	sampled(&p, tr, objectives[instance/2%len(objectives)])
	c := &p.Constraints
	if random.IntN(2) == 0 {
		p.Current = shuffled(p, random)
		switch random.IntN(3) {
		case 0:
			budget := random.IntN(shape.Experts)
			c.MoveBudget = &budget
		case 1:
			c.MigrationCost = random.Float64() * 20
		}
	}
	if random.IntN(2) == 0 {
		rankOf := random.Perm(shape.Experts)
		for e := range 1 + random.IntN(shape.Experts) {
			c.Pins = append(c.Pins, placement.Pin{Layer: p.Layers[random.IntN(2)], Expert: e, Rank: rankOf[e] % ranks})
		}
	}
	if random.IntN(2) == 0 {
		c.ExpertLoadLimit = 100 + 60*random.Float64()
	} else if random.IntN(2) == 0 {
		p.RedundantSlots = 1 + random.IntN(shape.Experts-shape.Experts/ranks)
		if c.MoveBudget != nil {
			// With a budget close to the number of new slots, pins decide whether the problem is feasible.
			*c.MoveBudget = ranks*p.RedundantSlots - 1 + random.IntN(3)
		}
	}
	if random.IntN(3) == 0 {
		c.TokenLoadLimit = 100 + 40*random.Float64()
	}
	if random.IntN(3) == 0 {
		for range ranks {
			c.RankCapacity = append(c.RankCapacity, 0.5+random.Float64())
		}
	}
	return p
}

// sampled sets the objective, with two ranks per node.
func sampled(p *placement.Problem, tr *trace.Trace, of placement.Objective) {
	p.Messages = of.Messages(2, 5)
	if !p.Messages.None() {
		p.Occurrences = affinity.SampleOccurrences(tr, tr.AllRequests(), 500, p.Attention == placement.DataParallel, 1)
	}
}

// TestConstraintsHold solves random instances and checks every constraint by an independent count. Unmet limits are
// reported and cannot be met. The placement has at least the value of the default placement.
func TestConstraintsHold(t *testing.T) {
	random := rand.New(rand.NewPCG(31, 31))
	infeasible, unmet := 0, 0
	n := instances(constraintInstances)
	for instance := range n {
		p := randomConstrained(t, random, instance)
		name := fmt.Sprintf("instance %d: %s, EP %d, %+v, %+v", instance, p.Attention, p.Ranks, p.Messages, p.Constraints)
		result, err := placement.Solve(t.Context(), p)
		plain := p
		plain.Algorithm = placement.ContiguousAlgorithm
		simple, plainErr := placement.Solve(t.Context(), plain)
		if (err == nil) != (plainErr == nil) {
			t.Fatalf("%s: error %v; of the default placement %v", name, err, plainErr)
		}
		if err != nil {
			if !strings.Contains(err.Error(), "move budget") || leastMoves(p) <= *p.Constraints.MoveBudget {
				t.Fatalf("%s: %v", name, err)
			}
			infeasible++
			continue
		}
		if err := result.Placement.Validate(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		checkConstraints(t, name, p, &result)
		checkConstraints(t, name, plain, &simple)
		if len(result.Unmet) > 0 {
			unmet++
		}
		if p.RedundantSlots > 0 {
			continue
		}
		value, excess := placement.Worth(t.Context(), p, result.Placement)
		least, mostExcess := placement.Worth(t.Context(), p, simple.Placement)
		if excess > mostExcess+1e-6 || excess == mostExcess && value < least-1e-5*math.Abs(least)-1e-3 {
			t.Fatalf("%s: worth %v with excess %v; the default placement %v with %v", name, value, excess, least, mostExcess)
		}
	}
	t.Logf("%d instances: %d contradict themselves, %d have limits that cannot be met", n, infeasible, unmet)
}

// leastMoves returns the maximum over layers of the number of moves that pins and new slots require.
func leastMoves(p placement.Problem) int {
	most := 0
	for l, layer := range p.Layers {
		best, held, least := math.MaxInt, heldExperts(p.Current, l), map[[2]uint]int{}
		eachPlacement(p, l, func(rankOf []int) {
			given := make([]uint, p.Ranks)
			for e, rank := range rankOf {
				given[rank] |= 1 << e
			}
			moves := 0
			for rank, experts := range given {
				of := [2]uint{held[rank], experts}
				if _, known := least[of]; !known {
					least[of] = leastOnRank(held[rank], experts, p.Current.Experts, p.RedundantSlots)
				}
				moves += least[of]
			}
			best = min(best, moves)
		})
		if best == math.MaxInt {
			panic(fmt.Sprint("no placement for layer ", layer))
		}
		most = max(most, best)
	}
	return most
}

// heldExperts returns the sets of experts on each rank in a layer.
func heldExperts(of *placement.Placement, l int) []uint {
	held := make([]uint, of.Ranks)
	for slot, e := range of.Layers[l].Slots {
		held[slot/of.SlotsPerRank] |= 1 << e
	}
	return held
}

// leastOnRank enumerates the copies on a rank with given experts, and returns the minimum number of experts that the
// rank does not contain yet.
func leastOnRank(held, given uint, experts, copies int) int {
	least := math.MaxInt
	for set := range uint(1) << experts {
		if set&given == 0 && bits.OnesCount(set) == copies {
			least = min(least, bits.OnesCount((set|given)&^held))
		}
	}
	return least
}

// eachPlacement calls do for every placement of a layer that respects the pins.
func eachPlacement(p placement.Problem, l int, do func(rankOf []int)) {
	experts := 0
	if p.Attention == placement.DataParallel {
		experts = p.Requests.Experts
	} else {
		experts = p.Tokens[l].Experts
	}
	pinned := slices.Repeat([]int{-1}, experts)
	for _, pin := range p.Constraints.Pins {
		if pin.Layer == p.Layers[l] {
			pinned[pin.Expert] = pin.Rank
		}
	}
	rankOf, load := make([]int, experts), make([]int, p.Ranks)
	var place func(e int)
	place = func(e int) {
		if e == experts {
			do(rankOf)
			return
		}
		for rank := range p.Ranks {
			if load[rank] == experts/p.Ranks || pinned[e] >= 0 && pinned[e] != rank {
				continue
			}
			rankOf[e] = rank
			load[rank]++
			place(e + 1)
			load[rank]--
		}
	}
	place(0)
}

// expertLoads returns the activations of a layer's experts.
func expertLoads(p placement.Problem, l int) []float64 {
	if p.Attention == placement.TensorParallel {
		return p.Tokens[l].ExpertTotals()
	}
	n := p.Requests.Experts
	loads := make([]float64, n)
	for _, row := range p.Requests.Rows {
		for e, count := range row[l*n : (l+1)*n] {
			loads[e] += float64(count)
		}
	}
	return loads
}

// checkConstraints checks a placement against the constraints by an independent count.
func checkConstraints(t *testing.T, name string, p placement.Problem, result *placement.Result) {
	t.Helper()
	to, c := result.Placement, p.Constraints
	for _, pin := range c.Pins {
		if !slices.Contains(to.Hosts(slices.Index(p.Layers, pin.Layer))[pin.Expert], pin.Rank) {
			t.Fatalf("%s: %s: pin %v does not hold: %v", name, p.Algorithm, pin, to.Layers)
		}
	}
	for l, layer := range to.Layers {
		moves, load, total := 0, make([]float64, p.Ranks), 0.0
		for slot, e := range layer.Slots {
			rank := slot / to.SlotsPerRank
			if p.Current != nil && !slices.Contains(p.Current.Hosts(l)[e], rank) {
				moves++
			}
			load[rank] += expertLoads(p, l)[e]
			total += expertLoads(p, l)[e]
		}
		if c.MoveBudget != nil && moves > *c.MoveBudget {
			t.Fatalf("%s: %s: %d moves in layer %d", name, p.Algorithm, moves, layer.Layer)
		}
		if c.ExpertLoadLimit == 0 {
			continue
		}
		most := c.ExpertLoadLimit / 100 * total / float64(p.Ranks) * (1 + 1e-6)
		reported := slices.ContainsFunc(result.Unmet, func(s string) bool {
			return strings.HasPrefix(s, fmt.Sprintf("layer %d: the experts of rank", layer.Layer))
		})
		if above := slices.Max(load) > most; above != reported {
			t.Fatalf("%s: %s: layer %d has loads %v of at most %v; reported is %v", name, p.Algorithm, layer.Layer, load, most, result.Unmet)
		}
		if reported && feasible(p, l, most) {
			t.Fatalf("%s: %s: layer %d has loads %v of at most %v, and that can be met", name, p.Algorithm, layer.Layer, load, most)
		}
	}
}

// feasible enumerates all placements of a layer.
func feasible(p placement.Problem, l int, most float64) bool {
	loads, found := expertLoads(p, l), false
	hosts := make([][]int, len(loads))
	if p.Current != nil {
		hosts = p.Current.Hosts(l)
	}
	load := make([]float64, p.Ranks)
	eachPlacement(p, l, func(rankOf []int) {
		moves := 0
		clear(load)
		for e, rank := range rankOf {
			load[rank] += loads[e]
			if p.Current != nil && !slices.Contains(hosts[e], rank) {
				moves++
			}
		}
		found = found || slices.Max(load) <= most && (p.Constraints.MoveBudget == nil || moves <= *p.Constraints.MoveBudget)
	})
	return found
}

// TestGroupsUnderConstraints solves every relation of groups and ranks with loads limited and moves counted.
func TestGroupsUnderConstraints(t *testing.T) {
	random := rand.New(rand.NewPCG(32, 32))
	for instance := range instances(constraintInstances / 4) {
		p := randomGrouped(random, instance)
		p.Constraints.ExpertLoadLimit = 100 + 100*random.Float64()
		p.Current = solve(t, p).Placement
		budget := random.IntN(p.Current.Experts)
		p.Constraints.MoveBudget = &budget
		result := solve(t, p)
		checkWhole(t, result.Placement, p.Groups)
		for l := range p.Layers {
			moves := 0
			for slot, e := range result.Placement.Layers[l].Slots {
				if !slices.Contains(p.Current.Hosts(l)[e], slot/result.Placement.SlotsPerRank) {
					moves++
				}
			}
			if moves > budget {
				t.Fatalf("instance %d: %d groups on %d ranks: %d moves; the budget is %d", instance, p.Groups, p.Ranks, moves, budget)
			}
		}
	}
}

// TestNewSlotsTakeMovedExperts adds a slot to every rank and pins an expert to another rank: the two swapped experts fill
// new slots.
func TestNewSlotsTakeMovedExperts(t *testing.T) {
	shape := tracetest.Small
	shape.Experts = 8
	for _, attention := range modes {
		p := problem(t, tracetest.Generate(shape, 3), attention, 4)
		p.Current, p.RedundantSlots = placement.Contiguous(p.Layers, 8, 4), 1
		p.Constraints.Pins = []placement.Pin{{Layer: p.Layers[0], Expert: 0, Rank: 1}}
		enough, few := 4, 3
		p.Constraints.MoveBudget = &enough
		result := solve(t, p)
		checkConstraints(t, string(attention), p, &result)
		p.Constraints.MoveBudget = &few
		if _, err := placement.Solve(t.Context(), p); err == nil || !strings.Contains(err.Error(), "new slots require 4 moves; the move budget is 3") {
			t.Errorf("%s: error %v", attention, err)
		}
	}
}

// twoRequests has one request for each of two ranks, with pinned experts. One slot on each rank is for the most
// valuable copy.
func twoRequests() placement.Problem {
	return placement.Problem{
		Attention: placement.DataParallel, Ranks: 2, Layers: []int{0}, Algorithm: placement.Auto, Seed: 1, RedundantSlots: 1,
		Requests: &affinity.RequestCounts{
			Layers: 1, Experts: 4, TopK: 1, Tokens: []float32{100, 100}, Rows: [][]float32{{40, 40, 1, 19}, {19, 1, 40, 40}},
		},
		Constraints: placement.Constraints{Pins: []placement.Pin{{Expert: 0}, {Expert: 1}, {Expert: 2, Rank: 1}, {Expert: 3, Rank: 1}}},
	}
}

// TestMostValuableCopiesStay removes a slot from a rank under a move budget: the rank keeps the more valuable of
// two copies.
func TestMostValuableCopiesStay(t *testing.T) {
	none, p := 0, twoRequests()
	p.Current = &placement.Placement{Ranks: 2, Experts: 4, SlotsPerRank: 4, Layers: []placement.Layer{{Slots: []int{0, 1, 2, 3, 0, 1, 2, 3}}}}
	p.Constraints.MoveBudget = &none
	if diff := cmp.Diff([]int{0, 1, 3, 0, 2, 3}, solve(t, p).Placement.Layers[0].Slots); diff != "" {
		t.Error(diff)
	}
}

// TestMovesArePricedByTheProfile solves for a profile with ten times the requests of the search's sample: a move gains
// ten times as much, and pays at a cost ten times as high.
func TestMovesArePricedByTheProfile(t *testing.T) {
	shape := tracetest.Small
	shape.Noise = 10
	p := problem(t, tracetest.Generate(shape, 7), placement.DataParallel, 4)
	p.Current, p.Constraints.MigrationCost = placement.Contiguous(p.Layers, 16, 4), 40
	want := solve(t, p).Placement
	value, _ := placement.Worth(t.Context(), p, want)
	if moves := placement.Moves(p.Current, want); moves == 0 || moves == len(p.Layers)*16 {
		t.Fatalf("%d experts move: the price decides nothing", moves)
	}
	p.ProfileTokens, p.Constraints.MigrationCost = 10*p.Requests.TokenCount(), 400
	got := solve(t, p).Placement
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if scaled, _ := placement.Worth(t.Context(), p, got); math.Abs(scaled-10*value) > 1e-5*value {
		t.Errorf("worth %v; ten times %v is wanted", scaled, value)
	}
}

// TestCopiesArePricedByTheProfile has a copy that pays only for the whole profile.
func TestCopiesArePricedByTheProfile(t *testing.T) {
	p := twoRequests()
	p.Current = &placement.Placement{Ranks: 2, Experts: 4, SlotsPerRank: 3, Layers: []placement.Layer{{Slots: []int{0, 1, 2, 0, 2, 3}}}}
	p.Constraints.MigrationCost = 30
	if diff := cmp.Diff([]int{0, 1, 2, 0, 2, 3}, solve(t, p).Placement.Layers[0].Slots); diff != "" {
		t.Error("at a price for the sample: ", diff)
	}
	p.ProfileTokens = 10 * p.Requests.TokenCount()
	if diff := cmp.Diff([]int{0, 1, 3, 0, 2, 3}, solve(t, p).Placement.Layers[0].Slots); diff != "" {
		t.Error("for a larger profile: ", diff)
	}
}

// oneExpert returns requests of ten tokens that all activate the first expert of each layer.
func oneExpert(n int) *affinity.RequestCounts {
	c := &affinity.RequestCounts{Layers: 22, Experts: 256, TopK: 1}
	row := make([]float32, 22*256)
	for l := range 22 {
		row[l*256] = 10
	}
	c.Tokens, c.Rows = slices.Repeat([]float32{10}, n), slices.Repeat([][]float32{row}, n)
	return c
}

// TestRequestsOfFullWeightAreSampledFirst has a few requests of full weight among many of almost no weight.
func TestRequestsOfFullWeightAreSampledFirst(t *testing.T) {
	all, err := oneExpert(100).Merge(oneExpert(2000), 0.01)
	if err != nil {
		t.Fatal(err)
	}
	part := placement.SampleRequests(all)
	if n := len(part.Rows); n < 1400 || n > 1600 || slices.Index(part.Weight, 1) != 0 || slices.Min(part.Weight[:100]) != 1 {
		t.Errorf("of %d requests %d are kept; the first ones weigh %v", len(all.Rows), n, part.Weight[:min(n, 100)])
	}
	if got, want := part.TokenCount(), all.TokenCount(); math.Abs(got/want-1) > 1e-2 {
		t.Errorf("they stand for %v tokens of %v", got, want)
	}
}

// TestSampledRequestsRepresentAll has enough requests for the search to sample them. One of two ranks contains all
// activated experts.
func TestSampledRequestsRepresentAll(t *testing.T) {
	requests := oneExpert(1700)
	p := placement.Problem{Attention: placement.DataParallel, Ranks: 2, Requests: requests}
	for l := range 22 {
		p.Layers = append(p.Layers, l)
	}
	const want = 22 * 1700 * 10 / 2
	if got, _ := placement.Worth(t.Context(), p, placement.Contiguous(p.Layers, 256, 2)); math.Abs(got/want-1) > 0.03 {
		t.Errorf("worth %v local activations; %v are wanted", got, want)
	}
}

// TestMoreMovesGainMore raises the budget on one instance: no expert moves with budget 0, and the gain never decreases.
func TestMoreMovesGainMore(t *testing.T) {
	shape := tracetest.Small
	shape.Noise = 10
	for _, attention := range modes {
		p := problem(t, tracetest.Generate(shape, 7), attention, 4)
		p.Current = placement.Contiguous(p.Layers, 16, 4)
		before := math.Inf(-1)
		for _, budget := range []int{0, 2, 4, 8, 16} {
			p.Constraints.MoveBudget = &budget
			got := solve(t, p).Placement
			value, _ := placement.Worth(t.Context(), p, got)
			if moves := placement.Moves(p.Current, got); budget == 0 && moves > 0 {
				t.Errorf("%s: %d experts move under a budget of none", attention, moves)
			}
			if value < before*(1-0.02) {
				t.Errorf("%s: budget %d is worth %v, a smaller one %v", attention, budget, value, before)
			}
			before = max(before, value)
		}
		p.Constraints.MoveBudget = nil
		free, _ := placement.Worth(t.Context(), p, solve(t, p).Placement)
		p.Constraints.MigrationCost = 1e9
		if moves := placement.Moves(p.Current, solve(t, p).Placement); moves > 0 {
			t.Errorf("%s: %d experts move although nothing is worth it", attention, moves)
		}
		p.Constraints.MigrationCost = 1e-9
		if cheap, _ := placement.Worth(t.Context(), p, solve(t, p).Placement); cheap < free*(1-0.02) {
			t.Errorf("%s: worth %v at almost no cost, %v without", attention, cheap, free)
		}
	}
}

// TestTokenLoadLimit has many requests of one length, which fit any limit, and then one longer than all others
// together.
func TestTokenLoadLimit(t *testing.T) {
	requests := &affinity.RequestCounts{Layers: 1, Experts: 4, TopK: 1}
	for i := range 40 {
		row := make([]float32, 4)
		row[i%4] = 10
		requests.Tokens, requests.Rows = append(requests.Tokens, 10), append(requests.Rows, row)
	}
	p := placement.Problem{
		Attention: placement.DataParallel, Ranks: 4, Layers: []int{0}, Algorithm: placement.Auto, Requests: requests, Seed: 1,
		Constraints: placement.Constraints{TokenLoadLimit: 100},
	}
	if result := solve(t, p); len(result.Unmet) > 0 {
		t.Errorf("%v", result.Unmet)
	}
	requests.Tokens[0], requests.Rows[0][0] = 1000, 1000
	if result := solve(t, p); len(result.Unmet) != 1 || !strings.Contains(result.Unmet[0], "of its share of the tokens; the limit is 100%") {
		t.Errorf("%v", result.Unmet)
	}
}

func TestConstraintsAreDeterministicOnAnyNumberOfProcessors(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 5)
	for _, attention := range modes {
		for _, objective := range []placement.Objective{placement.Activation, placement.Hierarchical} {
			p := problem(t, tr, attention, 4)
			sampled(&p, tr, objective)
			p.Constraints = placement.Constraints{ExpertLoadLimit: 110, Pins: []placement.Pin{{Layer: 1, Expert: 3, Rank: 2}}}
			var first placement.Result
			for i, processors := range []int{1, 2, 5} {
				before := runtime.GOMAXPROCS(processors)
				result := solve(t, p)
				runtime.GOMAXPROCS(before)
				if i == 0 {
					first = result
				}
				if diff := cmp.Diff(first, result); diff != "" {
					t.Errorf("%s, %s, %d processors: %s", attention, objective, processors, diff)
				}
			}
		}
	}
}

func TestConstraintsAreRefused(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	minus, two := -1, 2
	pin := func(pins ...placement.Pin) func(*placement.Problem) {
		return func(p *placement.Problem) { p.Constraints.Pins = pins }
	}
	for name, test := range map[string]struct {
		change func(*placement.Problem)
		want   string
	}{
		"algorithm":         {func(p *placement.Problem) { p.Algorithm, p.Constraints.ExpertLoadLimit = placement.EPLB, 110 }, "algorithm eplb does not support constraints"},
		"negative budget":   {func(p *placement.Problem) { p.Constraints.MoveBudget = &minus }, "move budget is -1"},
		"budget of nothing": {func(p *placement.Problem) { p.Constraints.MoveBudget = &two }, "needs a current placement"},
		"negative cost":     {func(p *placement.Problem) { p.Constraints.MigrationCost = -1 }, "migration cost is -1"},
		"NaN":               {func(p *placement.Problem) { p.Constraints.MigrationCost = math.NaN() }, "migration cost is NaN"},
		"low limit":         {func(p *placement.Problem) { p.Constraints.ExpertLoadLimit = 99 }, "expert load limit is 99 percent"},
		"low token limit":   {func(p *placement.Problem) { p.Constraints.TokenLoadLimit = 1 }, "token load limit is 1 percent"},
		"copies": {func(p *placement.Problem) { p.RedundantSlots, p.Constraints.ExpertLoadLimit = 1, 110 },
			"the engine chooses which copy computes an expert"},
		"capacities":       {func(p *placement.Problem) { p.Constraints.RankCapacity = []float64{1} }, "1 rank capacities for 4 ranks"},
		"zero capacity":    {func(p *placement.Problem) { p.Constraints.RankCapacity = []float64{1, 1, 1, 0} }, "the capacity of rank 3 is 0"},
		"pinned layer":     {pin(placement.Pin{Layer: 0, Expert: 1, Rank: 1}), "pin 0:1:1: layer 0 is not a MoE layer; allowed is [1 2 3]"},
		"pinned expert":    {pin(placement.Pin{Layer: 1, Expert: 16, Rank: 1}), "expert 16; allowed is 0 to 15"},
		"pinned rank":      {pin(placement.Pin{Layer: 1, Expert: 1, Rank: 4}), "rank 4; allowed is 0 to 3"},
		"pinned twice":     {pin(placement.Pin{Layer: 1, Expert: 1, Rank: 1}, placement.Pin{Layer: 1, Expert: 1, Rank: 2}), "also pinned to rank 1"},
		"too many pins":    {pin(pins(5)...), "more than 4 experts of the layer are pinned to rank 0"},
		"groups and pins":  {func(p *placement.Problem) { p.Groups = 4; p.Constraints.Pins = pins(4); p.Constraints.Pins[0].Rank = 1 }, "experts of one group are pinned to ranks"},
		"no tokens to see": {func(p *placement.Problem) { p.Messages = placement.RankDedup.Messages(8, 1) }, "need a sample of the tokens"},
	} {
		p := problem(t, tr, placement.TensorParallel, 4)
		test.change(&p)
		if _, err := placement.Solve(t.Context(), p); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
}

// pins returns pins of the first n experts of layer 1 to rank 0.
func pins(n int) []placement.Pin {
	var all []placement.Pin
	for e := range n {
		all = append(all, placement.Pin{Layer: 1, Expert: e, Rank: 0})
	}
	return all
}

func TestObjectivesAreChecked(t *testing.T) {
	for _, test := range []struct {
		objective           placement.Objective
		ranks, ranksPerNode int
		want                string
	}{
		{placement.NodeDedup, 8, 8, "there is only one node"},
		{placement.Hierarchical, 12, 8, "all nodes must have the same number of ranks"},
		{placement.Hierarchical, 8, 8, ""},
		{placement.NodeDedup, 16, 8, ""},
		{placement.RankDedup, 12, 8, ""},
		{placement.RankDedup, 8, 0, "0 ranks per node"},
		{"dedup", 8, 8, "allowed is time activation rank-dedup node-dedup hierarchical"},
	} {
		err := placement.CheckObjective(test.objective, test.ranks, test.ranksPerNode)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: error %v", test, err)
		}
	}
}
