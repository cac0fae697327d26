// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/dispatch"
)

// pod is a scheduler with the places of one pod. As in an evaluation, the recent load is outstanding.
type pod struct {
	*dispatch.Scheduler
	places []dispatch.Place
	caches *dispatch.Prefixes
}

func scheduler(t testing.TB, policy dispatch.Policy, ranks int, loadCap float64) *pod {
	t.Helper()
	return scheduled(t, dispatch.Options{
		Policy: policy, Ranks: ranks, Cap: loadCap, Weights: dispatch.DefaultWeights, Costs: dispatch.Costs{Exchange: 1, Compute: 1},
	})
}

func scheduled(t testing.TB, o dispatch.Options) *pod {
	t.Helper()
	s, err := dispatch.NewScheduler(o)
	if err != nil {
		t.Fatal(err)
	}
	p := &pod{Scheduler: s, places: make([]dispatch.Place, o.Ranks), caches: dispatch.NewPrefixes(0)}
	for range o.Ranks {
		p.caches.Add()
	}
	return p
}

// assign dispatches a request and returns its rank.
func (p *pod) assign(r dispatch.Request, prefixes ...uint64) int {
	p.caches.Match(prefixes)
	for rank := range p.places {
		p.places[rank] = dispatch.Place{Rank: rank, Outstanding: int64(p.Load(rank)), Cached: p.caches.Hit(rank)}
	}
	d := p.Decide(&r, p.places)
	p.Take(&r, &d)
	p.caches.Put(d.Rank, prefixes)
	return d.Rank
}

// serve dispatches requests of equal size.
func serve(s *pod, scores ...[]float32) []int {
	var ranks []int
	for _, row := range scores {
		ranks = append(ranks, s.assign(dispatch.Request{Scores: row, Tokens: 10}))
	}
	return ranks
}

func TestPoliciesOnFixedArrivals(t *testing.T) {
	low, high := []float32{.1, .2, .3}, []float32{.3, .2, .1}
	for name, test := range map[string]struct {
		policy dispatch.Policy
		scores [][]float32
		want   []int
	}{
		// The mask excludes the ranks that have received a request in the round.
		"masked":       {dispatch.Masked, [][]float32{low, low, low, high, high, low}, []int{2, 1, 0, 0, 1, 2}},
		"round-robin":  {dispatch.RoundRobin, [][]float32{low, low, low, low}, []int{0, 1, 2, 0}},
		"least-loaded": {dispatch.LeastLoaded, [][]float32{low, low, low, low}, []int{0, 1, 2, 0}},
		// With a cap of 1, no rank is below the cap while all are equally loaded, and a rank with a request stays above
		// it.
		"price at cap 1": {dispatch.Price, [][]float32{low, low, low, high}, []int{0, 1, 2, 0}},
		"price uncapped": {dispatch.Price, [][]float32{low, high, low, high}, []int{2, 0, 2, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			loadCap := 1.0
			if name == "price uncapped" {
				loadCap = 1e9
			}
			if diff := cmp.Diff(test.want, serve(scheduler(t, test.policy, 3, loadCap), test.scores...)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// window recomputes the load of the last 127 requests from the full history.
func window(ranks []int, tokens []int, n int) (load []int, total int) {
	load = make([]int, n)
	for i := max(0, len(ranks)-(dispatch.Arrivals-1)); i < len(ranks); i++ {
		load[ranks[i]] += tokens[i]
		total += tokens[i]
	}
	return load, total
}

func TestPriceHonoursTheSlidingCap(t *testing.T) {
	const n, loadCap = 8, 1.15
	random := rand.New(rand.NewPCG(1, 1))
	s := scheduler(t, dispatch.Price, n, loadCap)
	var ranks, tokens []int
	aboveCap := 0
	for range 3000 {
		// Nearly all requests prefer the same ranks.
		scores := make([]float32, n)
		for i := range scores {
			scores[i] = random.Float32() / float32(1+i*i)
		}
		size := 1 + random.IntN(500)
		load, total := window(ranks, tokens, n)
		rank := s.assign(dispatch.Request{Scores: scores, Tokens: size})
		// While fewer than 128 requests have arrived, the missing requests are assumed to be spread evenly.
		seen := min(len(ranks), dispatch.Arrivals-1)
		missing := float64(dispatch.Arrivals-1-seen) * float64(total+size) / float64(seen+1)
		limit := loadCap*(float64(total+size)+missing)/n - missing/n
		if float64(load[rank]+size) > limit+1e-6 {
			aboveCap++
			for other := range load {
				if float64(load[other]+size) <= limit-1e-6 {
					t.Fatalf("rank %d was chosen above the cap although rank %d was below it", rank, other)
				}
				if load[other] < load[rank] {
					t.Fatalf("all ranks were above the cap: rank %d has load %d, rank %d only %d", rank, load[rank], other, load[other])
				}
			}
		}
		ranks, tokens = append(ranks, rank), append(tokens, size)
	}
	if aboveCap > 30 {
		t.Errorf("all ranks were above the cap for %d of 3000 arrivals", aboveCap)
	}
}

func TestPricesFollowLoad(t *testing.T) {
	// Every request slightly prefers rank 0; without a cap, only prices balance the load.
	s := scheduler(t, dispatch.Price, 4, 1e9)
	load := make([]int, 4)
	for range 4000 {
		load[s.assign(dispatch.Request{Scores: []float32{.3, .25, .25, .25}, Tokens: 100})]++
	}
	for rank, n := range load {
		if n < 900 || n > 1100 {
			t.Errorf("rank %d served %d of 4000 requests", rank, n)
		}
	}
}

func TestRequestsWithoutTokensAreServed(t *testing.T) {
	for _, policy := range dispatch.Policies {
		if !policy.AtOnce() {
			continue
		}
		s := scheduler(t, policy, 3, 1.15)
		for range 300 {
			if rank := s.assign(dispatch.Request{Scores: make([]float32, 3)}); rank < 0 || rank > 2 {
				t.Fatalf("%s: rank %d", policy, rank)
			}
		}
	}
}

func TestPrefixStaysWithItsRank(t *testing.T) {
	conversation := make([]int32, 5*dispatch.PrefixBlock)
	for i := range conversation {
		conversation[i] = int32(i)
	}
	other := append([]int32{-7}, conversation...)
	send := func(s *pod, tokens []int32) int {
		return s.assign(dispatch.Request{Scores: make([]float32, 4), Tokens: len(tokens)}, dispatch.PrefixHashes(nil, tokens)...)
	}
	for _, policy := range []dispatch.Policy{dispatch.Prefix, dispatch.Price} {
		s := scheduler(t, policy, 4, 4)
		first := send(s, conversation[:dispatch.PrefixBlock])
		for range 3 {
			send(s, other)
		}
		if again := send(s, conversation); again != first {
			t.Errorf("%s: the longer request went to rank %d, its prefix to rank %d", policy, again, first)
		}
	}
	s := scheduler(t, dispatch.Prefix, 4, 4)
	first := send(s, conversation)
	if s.assign(dispatch.Request{Scores: make([]float32, 4), Tokens: 1000}) == first {
		t.Error("a request without a known prefix went to the busiest rank")
	}
}

func TestPrefixHashes(t *testing.T) {
	tokens := make([]int32, 3*dispatch.PrefixBlock+5)
	hashes := dispatch.PrefixHashes(nil, tokens)
	if len(hashes) != 3 {
		t.Fatalf("%d hashes for 3 whole blocks", len(hashes))
	}
	tokens[dispatch.PrefixBlock]++
	changed := dispatch.PrefixHashes(nil, tokens)
	if changed[0] != hashes[0] || changed[1] == hashes[1] || changed[2] == hashes[2] {
		t.Errorf("hashes %x and %x after a change in the second block", hashes, changed)
	}
}

// Decide, Take, Match and Put allocate nothing, for one pod and for many.
func TestDecidingDoesNotAllocate(t *testing.T) {
	for _, policy := range dispatch.Policies {
		if !policy.AtOnce() {
			continue
		}
		for _, pods := range []int{1, 20} {
			s := scheduler(t, policy, 8, 1.15)
			places := somePlaces(pods, 8)
			request := dispatch.Request{Scores: make([]float32, 8), Tokens: 100}
			if n := testing.AllocsPerRun(500, func() {
				d := s.Decide(&request, places)
				s.Take(&request, &d)
				s.caches.Match([]uint64{1, 2})
				s.caches.Put(d.Rank, []uint64{1, 2})
			}); n != 0 {
				t.Errorf("%s, %d pods: %v allocations per request", policy, pods, n)
			}
		}
	}
}

func somePlaces(pods, ranks int) []dispatch.Place {
	var places []dispatch.Place
	for pod := range pods {
		for rank := range ranks {
			places = append(places, dispatch.Place{Rank: rank, Outstanding: int64(37 * (pod + rank) % 100)})
		}
	}
	return places
}

func TestNewSchedulerRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		change func(o *dispatch.Options)
		want   string
	}{
		"window":     {func(o *dispatch.Options) { o.Policy = dispatch.Window }, "queues"},
		"late":       {func(o *dispatch.Options) { o.Policy = dispatch.Late }, "queues"},
		"unknown":    {func(o *dispatch.Options) { o.Policy = "fair" }, "allowed is price"},
		"no ranks":   {func(o *dispatch.Options) { o.Ranks = 0 }, "at least 1 is needed"},
		"low cap":    {func(o *dispatch.Options) { o.Cap = 0.9 }, "at least 1"},
		"no cap":     {func(o *dispatch.Options) { o.Cap = math.NaN() }, "cap is NaN"},
		"weight":     {func(o *dispatch.Options) { o.Weights.Prefix = -1 }, "weight prefix is -1"},
		"costs":      {func(o *dispatch.Options) { o.Costs.Compute = math.NaN() }, "costs are 0 and NaN"},
		"capacities": {func(o *dispatch.Options) { o.Policy, o.Capacity = dispatch.Masked, []float64{1, 2} }, "does not support rank capacities"},
	} {
		o := dispatch.Options{Policy: dispatch.Price, Ranks: 2, Cap: 1.15, Weights: dispatch.DefaultWeights}
		test.change(&o)
		if _, err := dispatch.NewScheduler(o); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
}

func TestParseWeights(t *testing.T) {
	for text, want := range map[string]dispatch.Weights{
		"": dispatch.DefaultWeights, "prefix=0": {Affinity: 1, Load: 1, Wait: 1}, "affinity=0.5,load=2,prefix=3,wait=0": {Affinity: .5, Prefix: 3, Load: 2},
	} {
		if got, err := dispatch.ParseWeights(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{
		"speed=1": `weight "speed" is unknown`, "prefix": `weight "prefix" is invalid: the format is name=number`, "load=-1": "weight load is -1",
		"load=NaN": "weight load is NaN", "load=Inf": "weight load is +Inf", ",": `weight "" is invalid`,
	} {
		if _, err := dispatch.ParseWeights(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v; want %q", text, err, want)
		}
	}
}

// The components of a decision are in microseconds and match values computed by hand.
func TestDecisionComponents(t *testing.T) {
	o := dispatch.Options{
		Policy: dispatch.Price, Ranks: 2, Cap: 2, Weights: dispatch.Weights{Affinity: 1, Prefix: .5, Load: 2}, Costs: dispatch.Costs{Exchange: 3, Compute: 5},
	}
	s := scheduled(t, o)
	r := dispatch.Request{Scores: []float32{.5, .25}, Tokens: 100}
	places := []dispatch.Place{
		{Rank: 0, Outstanding: 1000},
		{Rank: 1, Outstanding: 10, Cached: dispatch.Hit{Tokens: 64, Due: 32}},
	}
	got := s.Decide(&r, places)
	want := dispatch.Decision{Place: 1, Rank: 1, Tokens: 36, Affinity: .25 * 100 * 3, Prefix: .5 * 32 * 5}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the idle place with the prefix: %s", diff)
	}
	got = s.Decide(&r, places[:1])
	if want = (dispatch.Decision{Tokens: 100, Affinity: .5 * 100 * 3}); !cmp.Equal(want, got) {
		t.Errorf("the only place: %s", cmp.Diff(want, got))
	}
	// 1,000 tokens are 1000 - 2·10 - 4·100 tokens more than the other place allows.
	places[1].Cached = dispatch.Hit{}
	s = scheduled(t, func() dispatch.Options { o := o; o.Policy = dispatch.Masked; return o }())
	if got = s.Decide(&r, places); got.Place != 0 || got.Load != 2*5*580 {
		t.Errorf("masked: %+v; want the best score, and a load of 5800", got)
	}
}

// A decision ignores a component with weight 0.
func TestWeightZeroIgnoresComponent(t *testing.T) {
	for name, test := range map[string]struct {
		weights dispatch.Weights
		want    int
	}{
		"affinity": {dispatch.Weights{Affinity: 1}, 0}, "prefix": {dispatch.Weights{Prefix: 1}, 1}, "load": {dispatch.Weights{Load: 1}, 2}, "nothing": {dispatch.Weights{}, 2},
	} {
		s := scheduled(t, dispatch.Options{Policy: dispatch.Price, Ranks: 3, Cap: 3, Weights: test.weights, Costs: dispatch.Costs{Exchange: 1, Compute: 1}})
		got := s.Decide(&dispatch.Request{Scores: []float32{.9, .5, .5}, Tokens: 100}, []dispatch.Place{
			{Rank: 0, Outstanding: 9000}, {Rank: 1, Outstanding: 9000, Cached: dispatch.Hit{Tokens: 64, Due: 64}}, {Rank: 2},
		})
		if got.Place != test.want {
			t.Errorf("only %s: place %d, want %d", name, got.Place, test.want)
		}
	}
}

// The pods of a rank differ by cached prefixes and outstanding load; equal pods are chosen round-robin.
func TestPodsOfARank(t *testing.T) {
	s := scheduler(t, dispatch.Price, 2, 2)
	r := dispatch.Request{Scores: []float32{.1, .9}, Tokens: 100}
	places := somePlaces(0, 0)
	for range 3 {
		places = append(places, dispatch.Place{Rank: 0}, dispatch.Place{Rank: 1})
	}
	seen := map[int]int{}
	for range 300 {
		seen[s.Decide(&r, places).Place]++
	}
	if len(seen) != 3 || seen[1] != 100 || seen[3] != 100 || seen[5] != 100 {
		t.Errorf("equal pods were chosen %v times", seen)
	}
	places[1].Outstanding, places[5].Outstanding = 5, 5
	if d := s.Decide(&r, places); d.Place != 3 {
		t.Errorf("place %d was chosen, 3 is idle", d.Place)
	}
	places[5].Cached = dispatch.Hit{Tokens: 64, Due: 64}
	if d := s.Decide(&r, places); d.Place != 5 || d.Tokens != 36 {
		t.Errorf("%+v was chosen, place 5 has the prefix cached", d)
	}
}

// A rank that has stopped answering receives only the requests until its load is noticed, and is not the cheapest rank
// after it recovers.
func TestStalledRank(t *testing.T) {
	random := rand.New(rand.NewPCG(4, 4))
	s := scheduler(t, dispatch.Price, 4, 1.15)
	places := make([]dispatch.Place, 4)
	stalled := 0
	for i := range 2000 {
		scores := make([]float32, 4)
		for rank := range scores {
			scores[rank] = .2 + .1*random.Float32()
			places[rank] = dispatch.Place{Rank: rank}
		}
		places[1].Outstanding = int64(100 * stalled)
		r := dispatch.Request{Scores: scores, Tokens: 100}
		d := s.Decide(&r, places)
		s.Take(&r, &d)
		if d.Rank == 1 {
			stalled++
		}
		if i == 1999 && stalled > dispatch.Slack+2 {
			t.Errorf("a rank that does not answer got %d of 2000 requests", stalled)
		}
	}
	back := make([]int, 4)
	for range 400 {
		r := dispatch.Request{Scores: []float32{.25, .25, .25, .25}, Tokens: 100}
		d := s.Decide(&r, []dispatch.Place{{Rank: 0}, {Rank: 1}, {Rank: 2}, {Rank: 3}})
		s.Take(&r, &d)
		back[d.Rank]++
	}
	if back[1] > 200 {
		t.Errorf("the recovered rank got %v of 400 requests", back)
	}
}

// Prompts on one rank delay all ranks of a step: a place without prompts is worth twice the computation time of a
// prompt.
func TestPromptsAreSpreadOverRanks(t *testing.T) {
	for name, c := range map[string]struct {
		score float32 // of rank 0; the score of rank 1 is .1
		next  [2]int64
		rank  int
		wait  float64
	}{
		"no prompt waits":         {.4, [2]int64{}, 0, 0},
		"low affinity":            {1.2, [2]int64{500, 0}, 1, 0},
		"affinity above the wait": {2.4, [2]int64{500, 0}, 0, 200},
		"short prompt":            {.6, [2]int64{20, 0}, 0, 40},
		"same prompts on both":    {.4, [2]int64{500, 500}, 0, 200},
		"nearly the same on both": {.4, [2]int64{500, 480}, 0, 200},
		"more on the other rank":  {.4, [2]int64{300, 500}, 0, 0},
	} {
		s := scheduled(t, dispatch.Options{Policy: dispatch.Price, Ranks: 2, Cap: 2, Weights: dispatch.Weights{Affinity: 1, Wait: 1}, Costs: dispatch.Costs{Exchange: 1, Compute: 1}})
		r := dispatch.Request{Scores: []float32{c.score, .1}, Tokens: 150, Prompt: 100}
		d := s.Decide(&r, []dispatch.Place{{Rank: 0, Next: c.next[0]}, {Rank: 1, Next: c.next[1]}})
		if d.Rank != c.rank || d.Wait != c.wait {
			t.Errorf("%s: rank %d at a wait of %v µs; want %d and %v", name, d.Rank, d.Wait, c.rank, c.wait)
		}
	}
}

// Without a forecast, a request goes to a place where its prompt delays no other request, of such places to the one
// with the fewest outstanding tokens, and not to a rank that has stopped answering.
func TestPromptsWithoutForecast(t *testing.T) {
	for name, c := range map[string]struct {
		next, outstanding [3]int64
		rank              int
	}{
		"same next step":          {[3]int64{}, [3]int64{500, 300, 400}, 1},
		"prompts on least-loaded": {[3]int64{0, 200, 0}, [3]int64{500, 300, 400}, 2},
		"stalled rank":            {[3]int64{0, 200, 200}, [3]int64{9000, 300, 400}, 1},
	} {
		s := scheduled(t, dispatch.Options{Policy: dispatch.Price, Ranks: 3, Cap: 2, Weights: dispatch.DefaultWeights, Costs: dispatch.Costs{Exchange: 1, Compute: 1}})
		var places []dispatch.Place
		for rank := range c.next {
			places = append(places, dispatch.Place{Rank: rank, Next: c.next[rank], Outstanding: c.outstanding[rank]})
		}
		if d := s.Decide(&dispatch.Request{Tokens: 150, Prompt: 100}, places); d.Rank != c.rank {
			t.Errorf("%s: rank %d, want %d", name, d.Rank, c.rank)
		}
	}
}

// For any places, the decision is one of them.
func TestEveryPolicySelectsAPlace(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	for _, policy := range dispatch.Policies {
		if !policy.AtOnce() {
			continue
		}
		s := scheduler(t, policy, 5, 1.05)
		for range 3000 {
			places := make([]dispatch.Place, 1+random.IntN(7))
			for i := range places {
				places[i] = dispatch.Place{
					Rank: random.IntN(5), Outstanding: int64(random.IntN(1000)), Next: int64(random.IntN(500)),
					Cached: dispatch.Hit{Tokens: random.IntN(300) - 50, Due: float64(random.IntN(200))},
				}
			}
			r := dispatch.Request{Tokens: random.IntN(300)}
			if random.IntN(4) > 0 {
				r.Scores = []float32{random.Float32(), random.Float32(), 0, 1, random.Float32()}
			}
			d := s.Decide(&r, places)
			if d.Place < 0 || d.Place >= len(places) || d.Rank != places[d.Place].Rank || d.Tokens < 0 || d.Tokens > r.Tokens || math.IsNaN(d.Value()) {
				t.Fatalf("%s: %+v for %+v at %+v", policy, d, r, places)
			}
			if random.IntN(3) > 0 {
				s.Take(&r, &d)
			}
		}
	}
}

func TestQueueAssignsExactly(t *testing.T) {
	q := dispatch.NewQueue(2)
	if q.Size() != 8 {
		t.Errorf("size %d", q.Size())
	}
	requests := []dispatch.Request{
		{Scores: []float32{.9, .8}}, {Scores: []float32{.9, .1}}, {Scores: []float32{.9, .7}}, {Scores: []float32{.5, .4}},
	}
	// A greedy assignment gives rank 0 to the first two requests; the optimum reserves it for those that lose most
	// elsewhere.
	if diff := cmp.Diff([]int{1, 0, 0, 1}, q.Assign(requests)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]int{0}, q.Assign(requests[:1])); diff != "" {
		t.Errorf("a queue of one: %s", diff)
	}
}

func TestShardsAreEqual(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	shards := dispatch.NewShards(8)
	for _, tokens := range []int{1, 7, 8, 100, 4096, 4099} {
		scores := make([]float32, tokens*8)
		for i := range scores {
			scores[i] = random.Float32() / float32(1+i%8)
		}
		load := make([]int, 8)
		for _, rank := range shards.Assign(scores) {
			load[rank]++
		}
		for rank, n := range load {
			want := tokens / 8
			if rank < tokens%8 {
				want++
			}
			if n != want {
				t.Errorf("%d tokens: rank %d has %d; want %d", tokens, rank, n, want)
			}
		}
	}
}

func TestStreamEvensOutOverTime(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	stream := dispatch.NewStream(4)
	load := make([]int, 4)
	scores := make([]float32, 4)
	const tokens = 200_000
	for range tokens {
		for i := range scores {
			scores[i] = random.Float32() * float32(4-i) / 20
		}
		load[stream.Assign(scores)]++
	}
	for rank, n := range load {
		if n < tokens/5 || n > tokens*3/10 {
			t.Errorf("rank %d has %d of %d tokens", rank, n, tokens)
		}
	}
}

// BenchmarkDecide measures Decide and Take including prefixes of 16 blocks, half of which every place has cached.
func BenchmarkDecide(b *testing.B) {
	for _, pods := range []int{1, 500} {
		b.Run(fmt.Sprintf("%dx8", pods), func(b *testing.B) {
			s := scheduler(b, dispatch.Price, 8, 1.15)
			places := somePlaces(pods, 8)
			caches := dispatch.NewPrefixes(0)
			shared := make([]uint64, 16)
			for i := range shared {
				shared[i] = uint64(i+1) * 0x9e3779b97f4a7c15
			}
			for range places {
				caches.Put(caches.Add(), shared[:8])
			}
			request := dispatch.Request{Scores: []float32{.1, .2, .1, .15, .12, .11, .1, .12}, Tokens: 1400}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				for i := 8; i < 16; i++ { // the other half is new each time
					shared[i] = uint64(n*16+i) * 0xbf58476d1ce4e5b9
				}
				caches.Match(shared)
				for i := range places {
					places[i].Cached = caches.Hit(i)
				}
				d := s.Decide(&request, places)
				s.Take(&request, &d)
				caches.Put(d.Place, shared)
			}
		})
	}
}

// TestCapacities assigns random scores to ranks of unequal capacity. Shares hold to within one token in a batch, over
// time in a stream, and under the cap for requests.
func TestCapacities(t *testing.T) {
	random := rand.New(rand.NewPCG(9, 9))
	capacity := []float64{2, 1, 0.5, 0.5}
	shards, stream := dispatch.NewWeightedShards(4, capacity), dispatch.NewWeightedStream(4, capacity)
	scheduler := scheduled(t, dispatch.Options{Policy: dispatch.Price, Ranks: 4, Cap: 1.15, Capacity: capacity, Weights: dispatch.DefaultWeights, Costs: dispatch.Costs{Exchange: 1}})
	streamed, requests := make([]float64, 4), make([]float64, 4)
	scores := make([]float32, 4*1001)
	for round := range 60 {
		for i := range scores {
			scores[i] = 0.2 * random.Float32()
		}
		assigned := make([]float64, 4)
		for _, rank := range shards.Assign(scores) {
			assigned[rank]++
		}
		for i := range 1001 {
			// Prices settle during the first half.
			if rank := stream.Assign(scores[i*4 : (i+1)*4]); round >= 30 {
				streamed[rank]++
			}
		}
		for i := range 20 {
			requests[scheduler.assign(dispatch.Request{Scores: scores[i*4 : (i+1)*4], Tokens: 10})]++
		}
		for rank, c := range capacity {
			if want := 1001 * c / 4; math.Abs(assigned[rank]-want) > 1 {
				t.Fatalf("rank %d has %v tokens of 1001, want %v", rank, assigned[rank], want)
			}
		}
	}
	for rank, c := range capacity {
		if share := streamed[rank] / 30030; math.Abs(share-c/4) > 0.05*c/4 {
			t.Errorf("stream: rank %d has %v of the tokens, want %v", rank, share, c/4)
		}
		if share := requests[rank] / 1200; math.Abs(share-c/4) > 0.15*c/4 {
			t.Errorf("requests: rank %d has %v of them, want %v", rank, share, c/4)
		}
	}
}
