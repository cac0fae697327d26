package dispatch_test

import (
	"cmp"
	"flag"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/dispatch"
)

var shuffleCases = flag.Int("shuffle-cases", 100_000, "random batches that are shuffled and put back")

// TestResumeUndoesRebatch shuffles random batches and puts them back, and checks what the order promises.
func TestResumeUndoesRebatch(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var s dispatch.Shuffle
	var rankOf []uint16
	var batch, shuffled, back []int32
	for range *shuffleCases {
		n, ranks, width := random.IntN(40), 1+random.IntN(10), 1+random.IntN(3)
		rankOf, batch = rankOf[:0], batch[:0]
		for range n {
			rankOf = append(rankOf, uint16(random.IntN(ranks)))
		}
		for range n * width {
			batch = append(batch, int32(random.Uint32()))
		}
		shuffled, back = slices.Grow(shuffled[:0], n*width)[:n*width], slices.Grow(back[:0], n*width)[:n*width]
		s.Group(rankOf, ranks)
		dispatch.Rebatch(shuffled, batch, width, &s)
		dispatch.Resume(back, shuffled, width, &s)
		if !slices.Equal(back, batch) {
			t.Fatalf("ranks %v: %v comes back as %v", rankOf, batch, back)
		}
		if len(s.Bounds) != ranks+1 || s.Bounds[0] != 0 || int(s.Bounds[ranks]) != n {
			t.Fatalf("ranks %v: the bounds are %v", rankOf, s.Bounds)
		}
		for rank := range ranks {
			of := s.Order[s.Bounds[rank]:s.Bounds[rank+1]]
			for i, token := range of {
				if int(rankOf[token]) != rank || i > 0 && token <= of[i-1] {
					t.Fatalf("ranks %v: rank %d has the tokens %v", rankOf, rank, of)
				}
			}
		}
	}
}

// alignBySorting is the rule of Aligner, word by word.
func alignBySorting(scores [][]int, room []int) []uint16 {
	rankOf := make([]uint16, len(scores))
	open := make([]int, len(scores))
	for i := range open {
		open[i] = i
	}
	type ask struct{ token, regret int }
	for len(open) > 0 {
		asks := make([][]ask, len(room))
		for _, token := range open {
			best, second, rank := -1, -1, 0
			for r, score := range scores[token] {
				if room[r] > 0 && score > best {
					best, second, rank = score, best, r
				} else if room[r] > 0 && score > second {
					second = score
				}
			}
			asks[rank] = append(asks[rank], ask{token, best - second})
		}
		open = open[:0]
		for rank, of := range asks {
			slices.SortStableFunc(of, func(a, b ask) int { return cmp.Compare(b.regret, a.regret) })
			kept := min(len(of), room[rank])
			room[rank] -= kept
			for i, a := range of {
				if i < kept {
					rankOf[a.token] = uint16(rank)
				} else {
					open = append(open, a.token)
				}
			}
		}
		slices.Sort(open)
	}
	return rankOf
}

// randomPreferences are tables of a vocabulary, and the scores of all ranks that they stand for.
func randomPreferences(random *rand.Rand, vocabulary, ranks, best, levels int) (dispatch.Preferences, [][]int) {
	p := dispatch.Preferences{Best: best}
	scores := make([][]int, vocabulary)
	for id := range scores {
		left := math.MaxUint16
		order := random.Perm(ranks)
		kept := make([]int, best)
		for i := range kept {
			kept[i] = random.IntN(levels) * (left / levels / best)
		}
		slices.SortFunc(kept, func(a, b int) int { return b - a })
		sum := 0
		for i, score := range kept {
			p.Ranks, p.Scores = append(p.Ranks, uint16(order[i])), append(p.Scores, uint16(score))
			sum += score
		}
		scores[id] = make([]int, ranks)
		for r := range scores[id] {
			if best < ranks {
				scores[id][r] = (left - sum) / (ranks - best)
			}
		}
		for i, score := range kept {
			scores[id][order[i]] = score
		}
	}
	return p, scores
}

func TestAlignFollowsTheRule(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	for range 1000 {
		ranks := 1 + random.IntN(9)
		best, vocabulary, n := 1+random.IntN(ranks), 1+random.IntN(30), random.IntN(200)
		p, scores := randomPreferences(random, vocabulary, ranks, best, []int{2, 5, 6000}[random.IntN(3)])
		var capacity []float64
		if random.IntN(2) == 0 {
			for range ranks {
				capacity = append(capacity, float64(1+random.IntN(4)))
			}
		}
		a := dispatch.NewAligner(ranks, capacity)
		for range 2 { // what an earlier batch has left behind changes nothing
			tokens, rows := make([]int32, n), make([][]int, n)
			for i := range tokens {
				tokens[i] = int32(random.IntN(vocabulary))
				rows[i] = scores[tokens[i]]
			}
			got := a.Align(p, tokens)
			room := make([]int, ranks)
			for _, rank := range got {
				room[rank]++
			}
			shards := dispatch.NewWeightedShards(ranks, capacity).Assign(make([]float32, n*ranks))
			want := make([]int, ranks)
			for _, rank := range shards {
				want[rank]++
			}
			if !slices.Equal(room, want) {
				t.Fatalf("%d tokens, capacities %v: shards of %v; want %v", n, capacity, room, want)
			}
			if want := alignBySorting(rows, room); !slices.Equal(got, want) {
				t.Fatalf("scores %v, tokens %v: ranks are %v; want %v", scores, tokens, got, want)
			}
		}
	}
}

// usualBatch is a batch of a vocabulary's tokens as text has them: few ids make up most of it.
func usualBatch(n, ranks int) (dispatch.Preferences, [][]int, []int32) {
	random := rand.New(rand.NewPCG(3, 3))
	const vocabulary = 32768
	const best = 4
	p, scores := dispatch.Preferences{Best: best}, make([][]int, vocabulary)
	for id := range scores {
		shares, order, sum := make([]float64, ranks), random.Perm(ranks), 0.0
		for i := range shares {
			shares[i] = random.ExpFloat64()
			sum += shares[i]
		}
		slices.Sort(shares)
		slices.Reverse(shares)
		scores[id] = make([]int, ranks)
		left := math.MaxUint16
		for i, rank := range order[:best] {
			scores[id][rank] = int(shares[i] / sum * math.MaxUint16)
			p.Ranks, p.Scores = append(p.Ranks, uint16(rank)), append(p.Scores, uint16(scores[id][rank]))
			left -= scores[id][rank]
		}
		for _, rank := range order[best:] {
			scores[id][rank] = left / (ranks - best)
		}
	}
	ids := rand.NewZipf(random, 1.1, 8, vocabulary-1)
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(ids.Uint64())
	}
	return p, scores, tokens
}

// TestAlignIsNearTheBest compares with the highest sum of scores under the same shares.
func TestAlignIsNearTheBest(t *testing.T) {
	const n, ranks = 4096, 8
	p, scores, tokens := usualBatch(n, ranks)
	flat := make([]float32, 0, n*ranks)
	for _, token := range tokens {
		for _, score := range scores[token] {
			flat = append(flat, float32(score))
		}
	}
	value, best := 0.0, 0.0
	for i, rank := range dispatch.NewAligner(ranks, nil).Align(p, tokens) {
		value += float64(flat[i*ranks+int(rank)])
	}
	for i, rank := range dispatch.NewShards(ranks).Assign(flat) {
		best += float64(flat[i*ranks+rank])
	}
	if value > best*(1+1e-6) || value < .97*best {
		t.Errorf("the sum of scores is %v; the highest is %v", value, best)
	}
	t.Logf("%.4f of the highest sum", value/best)
}

func TestShuffleDoesNotAllocateWhenWarm(t *testing.T) {
	p, _, tokens := usualBatch(2048, 8)
	a, s := dispatch.NewAligner(8, nil), dispatch.Shuffle{}
	if n := testing.AllocsPerRun(5, func() { s.Group(a.Align(p, tokens), 8) }); n > 0 {
		t.Errorf("%v allocations per batch", n)
	}
}

// BenchmarkShuffle is all that a batch of 8,192 tokens needs in a layer: its tokens are looked up, dealt to 8 ranks and ordered.
func BenchmarkShuffle(b *testing.B) {
	p, _, tokens := usualBatch(8192, 8)
	a, s := dispatch.NewAligner(8, nil), dispatch.Shuffle{}
	b.ReportAllocs()
	for b.Loop() {
		s.Group(a.Align(p, tokens), 8)
	}
}
