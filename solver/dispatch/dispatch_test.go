package dispatch_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/dispatch"
)

func scheduler(t *testing.T, policy dispatch.Policy, ranks int, loadCap float64) *dispatch.Scheduler {
	t.Helper()
	s, err := dispatch.NewScheduler(policy, ranks, loadCap)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve runs requests of one size through a scheduler.
func serve(s *dispatch.Scheduler, scores ...[]float32) []int {
	var ranks []int
	for _, row := range scores {
		ranks = append(ranks, s.Assign(dispatch.Request{Scores: row, Tokens: 10}))
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
		// The mask excludes ranks that have been used in the round, not the free ones.
		"masked":       {dispatch.Masked, [][]float32{low, low, low, high, high, low}, []int{2, 1, 0, 0, 1, 2}},
		"round-robin":  {dispatch.RoundRobin, [][]float32{low, low, low, low}, []int{0, 1, 2, 0}},
		"least-loaded": {dispatch.LeastLoaded, [][]float32{low, low, low, low}, []int{0, 1, 2, 0}},
		// With a cap of 1 no rank is open while all are equally loaded, and the one that had a request stays closed.
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

// window recomputes, from the whole history, the load of the last 127 requests.
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
	refusals := 0
	for range 3000 {
		// Nearly all requests want the same ranks.
		scores := make([]float32, n)
		for i := range scores {
			scores[i] = random.Float32() / float32(1+i*i)
		}
		size := 1 + random.IntN(500)
		load, total := window(ranks, tokens, n)
		rank := s.Assign(dispatch.Request{Scores: scores, Tokens: size})
		// While fewer than 128 requests have arrived, half of the others count as spread evenly.
		seen := min(len(ranks), dispatch.Arrivals-1)
		missing := 0.5 * float64(dispatch.Arrivals-1-seen) * float64(total+size) / float64(seen+1)
		limit := loadCap*(float64(total+size)+missing)/n - missing/n
		if float64(load[rank]+size) > limit+1e-6 {
			refusals++
			for other := range load {
				if float64(load[other]+size) <= limit-1e-6 {
					t.Fatalf("rank %d was chosen above the cap although rank %d was below it", rank, other)
				}
				if load[other] < load[rank] {
					t.Fatalf("all ranks were refused: rank %d has load %d, rank %d only %d", rank, load[rank], other, load[other])
				}
			}
		}
		ranks, tokens = append(ranks, rank), append(tokens, size)
	}
	if refusals > 30 {
		t.Errorf("%d of 3000 arrivals were refused by all ranks", refusals)
	}
}

func TestPricesFollowLoad(t *testing.T) {
	// Every request prefers rank 0 a little; without a cap, prices alone must share the load out.
	s := scheduler(t, dispatch.Price, 4, 1e9)
	load := make([]int, 4)
	for range 4000 {
		load[s.Assign(dispatch.Request{Scores: []float32{.3, .25, .25, .25}, Tokens: 100})]++
	}
	for rank, n := range load {
		if n < 900 || n > 1100 {
			t.Errorf("rank %d served %d of 4000 requests", rank, n)
		}
	}
}

func TestRequestsWithoutTokensAreServed(t *testing.T) {
	for _, policy := range dispatch.Policies {
		if policy == dispatch.Window {
			continue
		}
		s := scheduler(t, policy, 3, 1.15)
		for range 300 {
			if rank := s.Assign(dispatch.Request{Scores: make([]float32, 3)}); rank < 0 || rank > 2 {
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
	request := func(tokens []int32) dispatch.Request {
		return dispatch.Request{Scores: make([]float32, 4), Tokens: 1, Prefixes: dispatch.PrefixHashes(nil, tokens)}
	}
	s := scheduler(t, dispatch.Prefix, 4, 4)
	first := s.Assign(request(conversation[:dispatch.PrefixBlock]))
	for range 3 {
		s.Assign(request(other))
	}
	if again := s.Assign(request(conversation)); again != first {
		t.Errorf("the longer request went to rank %d, its prefix to rank %d", again, first)
	}
	if s.Assign(dispatch.Request{Scores: make([]float32, 4), Tokens: 1000}) == first {
		t.Error("a request without a known prefix went to the busiest rank")
	}
	// At cap 1 an overloaded rank does not keep its prefix.
	s = scheduler(t, dispatch.Prefix, 4, 1)
	a, b := s.Assign(request(conversation)), s.Assign(request(conversation))
	if a == b {
		t.Errorf("both requests went to rank %d, above the cap", a)
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

func TestAssignDoesNotAllocate(t *testing.T) {
	for _, policy := range dispatch.Policies {
		if policy == dispatch.Window {
			continue
		}
		s := scheduler(t, policy, 8, 1.15)
		request := dispatch.Request{Scores: make([]float32, 8), Tokens: 100, Prefixes: []uint64{1, 2}}
		if n := testing.AllocsPerRun(500, func() { s.Assign(request) }); n != 0 {
			t.Errorf("%s: %v allocations per request", policy, n)
		}
	}
}

func TestNewSchedulerRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		policy  dispatch.Policy
		ranks   int
		loadCap float64
		want    string
	}{
		"window":   {dispatch.Window, 2, 1.15, "queues"},
		"unknown":  {"fair", 2, 1.15, "allowed is price"},
		"no ranks": {dispatch.Price, 0, 1.15, "at least 1 is needed"},
		"low cap":  {dispatch.Price, 2, 0.9, "at least 1"},
	} {
		if _, err := dispatch.NewScheduler(test.policy, test.ranks, test.loadCap); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
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
	// Greedy would give rank 0 to the first two; the optimum keeps it for those who lose most.
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

func BenchmarkPrice(b *testing.B) {
	s, err := dispatch.NewScheduler(dispatch.Price, 8, 1.15)
	if err != nil {
		b.Fatal(err)
	}
	request := dispatch.Request{Scores: []float32{.1, .2, .1, .15, .12, .11, .1, .12}, Tokens: 400}
	for b.Loop() {
		s.Assign(request)
	}
}

// TestCapacities deals random scores out to ranks of unequal capacity: shares hold to within one token in a batch, over time
// in a stream, and under the cap for requests.
func TestCapacities(t *testing.T) {
	random := rand.New(rand.NewPCG(9, 9))
	capacity := []float64{2, 1, 0.5, 0.5}
	shards, stream := dispatch.NewWeightedShards(4, capacity), dispatch.NewWeightedStream(4, capacity)
	scheduler, err := dispatch.NewWeightedScheduler(dispatch.Price, 4, 1.15, capacity)
	if err != nil {
		t.Fatal(err)
	}
	streamed, requests := make([]float64, 4), make([]float64, 4)
	scores := make([]float32, 4*1001)
	for round := range 60 {
		for i := range scores {
			scores[i] = 0.2 * random.Float32()
		}
		dealt := make([]float64, 4)
		for _, rank := range shards.Assign(scores) {
			dealt[rank]++
		}
		for i := range 1001 {
			// The first half is what prices need to settle.
			if rank := stream.Assign(scores[i*4 : (i+1)*4]); round >= 30 {
				streamed[rank]++
			}
		}
		for i := range 20 {
			requests[scheduler.Assign(dispatch.Request{Scores: scores[i*4 : (i+1)*4], Tokens: 10})]++
		}
		for rank, c := range capacity {
			if want := 1001 * c / 4; math.Abs(dealt[rank]-want) > 1 {
				t.Fatalf("rank %d has %v tokens of 1001, want %v", rank, dealt[rank], want)
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
	if _, err := dispatch.NewWeightedScheduler(dispatch.Masked, 4, 1.15, capacity); err == nil || !strings.Contains(err.Error(), "knows no rank capacities") {
		t.Errorf("masked: error %v", err)
	}
}
