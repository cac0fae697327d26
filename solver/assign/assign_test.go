// SPDX-License-Identifier: Apache-2.0

package assign_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/semmoe/operator/solver/assign"
	"github.com/semmoe/operator/test/load"
)

// bestByEnumeration tries every assignment within the capacities.
func bestByEnumeration(scores []float32, capacity []int) float64 {
	bins := len(capacity)
	room := append([]int(nil), capacity...)
	var try func(item int) float64
	try = func(item int) float64 {
		if item*bins == len(scores) {
			return 0
		}
		best := math.Inf(-1)
		for bin := range room {
			if room[bin] == 0 {
				continue
			}
			room[bin]--
			best = max(best, float64(scores[item*bins+bin])+try(item+1))
			room[bin]++
		}
		return best
	}
	return try(0)
}

func total(scores []float32, bin []int, bins int) float64 {
	sum := 0.0
	for item, b := range bin {
		sum += float64(scores[item*bins+b])
	}
	return sum
}

// checkCapacity fails if a bin holds more than its capacity.
func checkCapacity(t *testing.T, bin []int, capacity []int) {
	t.Helper()
	load := make([]int, len(capacity))
	for _, b := range bin {
		load[b]++
	}
	for b, n := range load {
		if n > capacity[b] {
			t.Fatalf("bin %d holds %d items; its capacity is %d", b, n, capacity[b])
		}
	}
}

func TestAssignIsOptimal(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var solver assign.Solver
	for range 3000 {
		bins, items := 1+random.IntN(4), 1+random.IntN(8)
		capacity := make([]int, bins)
		for placed := 0; placed < items+random.IntN(3); placed++ {
			capacity[random.IntN(bins)]++
		}
		scores := make([]float32, items*bins)
		for i := range scores {
			// Few values make ties, negative ones and large ones test the rounding.
			scores[i] = float32(random.IntN(6)-2) * float32(math.Pow(10, float64(random.IntN(3))))
		}
		bin := solver.Assign(scores, capacity)
		checkCapacity(t, bin, capacity)
		if got, want := total(scores, bin, bins), bestByEnumeration(scores, capacity); math.Abs(got-want) > 1e-6 {
			t.Fatalf("scores %v, capacity %v: %v is worth %v; the optimum is %v", scores, capacity, bin, got, want)
		}
	}
}

// TestAssignLargeIsOptimal proves optimality by duality: no cycle of moves between bins gains anything.
func TestAssignLargeIsOptimal(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	var solver assign.Solver
	for range 20 {
		const bins, items = 8, 1024
		scores := make([]float32, items*bins)
		for i := range scores {
			scores[i] = random.Float32()
			if item := i / bins; item%3 == 1 {
				// Every third item is a copy: frequent tokens have many equal rows.
				scores[i] = scores[i%bins]
			}
		}
		capacity := make([]int, bins)
		for b := range capacity {
			capacity[b] = items / bins
		}
		bin := solver.Assign(scores, capacity)
		checkCapacity(t, bin, capacity)
		var loss [bins][bins]float64
		for a := range bins {
			for b := range bins {
				loss[a][b] = math.Inf(1)
			}
		}
		for item, a := range bin {
			for b := range bins {
				loss[a][b] = min(loss[a][b], float64(scores[item*bins+a])-float64(scores[item*bins+b]))
			}
		}
		for via := range bins {
			for a := range bins {
				for b := range bins {
					loss[a][b] = min(loss[a][b], loss[a][via]+loss[via][b])
				}
			}
		}
		for a := range bins {
			if loss[a][a] < -1e-6 {
				t.Fatalf("a cycle of moves through bin %d gains %v", a, -loss[a][a])
			}
		}
	}
}

func TestAssignDoesNotAllocateWhenWarm(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	scores := make([]float32, 512*8)
	for i := range scores {
		scores[i] = random.Float32()
	}
	capacity := []int{64, 64, 64, 64, 64, 64, 64, 64}
	var solver assign.Solver
	for range 3 {
		solver.Assign(scores, capacity)
	}
	if n := testing.AllocsPerRun(10, func() { solver.Assign(scores, capacity) }); n > 1 {
		t.Errorf("%v allocations per call", n)
	}
}

func randomWeighted(random *rand.Rand, items, bins int) assign.Weighted {
	w := assign.Weighted{Scores: make([]float32, items*bins), Sizes: make([]float32, items), Limits: make([]float64, bins)}
	sum := 0.0
	for i := range w.Sizes {
		w.Sizes[i] = float32(1 + random.IntN(5))
		sum += float64(w.Sizes[i])
		for b := range bins {
			w.Scores[i*bins+b] = w.Sizes[i] * random.Float32()
		}
	}
	for b := range w.Limits {
		w.Limits[b] = sum / float64(bins)
	}
	return w
}

// relaxedValue returns the value of the Lagrangian relaxation, from its definition.
func relaxedValue(w *assign.Weighted, prices assign.Prices) float64 {
	bins, value := len(w.Limits), 0.0
	for b, price := range prices {
		value += price * w.Limits[b]
	}
	for i, size := range w.Sizes {
		best := math.Inf(-1)
		for b, price := range prices {
			best = max(best, float64(w.Scores[i*bins+b])-float64(size)*price)
		}
		value += best
	}
	return value
}

func TestPriceBoundsEveryAssignment(t *testing.T) {
	random := rand.New(rand.NewPCG(4, 4))
	for range 300 {
		items, bins := 2+random.IntN(6), 2+random.IntN(2)
		w := randomWeighted(random, items, bins)
		for b := range w.Limits {
			w.Limits[b] *= 1.2
		}
		prices, value := w.Price(50, nil)
		if got := relaxedValue(&w, prices); math.Abs(got-value) > 1e-9 {
			t.Fatalf("Price reports %v; the definition yields %v", value, got)
		}
		bin := make([]int, items)
		for code := range int(math.Pow(float64(bins), float64(items))) {
			load, feasible := make([]float64, bins), true
			for i := range bin {
				bin[i] = code % bins
				code /= bins
				load[bin[i]] += float64(w.Sizes[i])
			}
			for b := range load {
				feasible = feasible && load[b] <= w.Limits[b]
			}
			if sum := total(w.Scores, bin, bins); feasible && sum > value+1e-6 {
				t.Fatalf("assignment %v is worth %v, above the bound %v", bin, sum, value)
			}
		}
	}
}

// Prices of bins that are filled exactly may have any sign. They bound assignments that fill all bins.
func TestPriceExactBoundsFullBins(t *testing.T) {
	random := rand.New(rand.NewPCG(6, 6))
	for range 100 {
		bins, each := 2+random.IntN(3), 1+random.IntN(4)
		w := randomWeighted(random, bins*each, bins)
		for i := range w.Sizes {
			w.Sizes[i] = 1
		}
		capacity := make([]int, bins)
		for b := range capacity {
			capacity[b], w.Limits[b] = each, float64(each)
		}
		var solver assign.Solver
		best := total(w.Scores, solver.Assign(w.Scores, capacity), bins)
		if _, value := w.PriceExact(50, nil); value < best-1e-5 {
			t.Fatalf("%d items in %d bins: the bound is %v, and an assignment is worth %v", bins*each, bins, value, best)
		}
	}
}

// TestPriceFollowsEveryItem compares the incremental value of Price with a value recomputed from every item.
func TestPriceFollowsEveryItem(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 7))
	for range 200 {
		w := randomWeighted(random, 1+random.IntN(400), 1+random.IntN(20))
		for i := range w.Sizes {
			switch random.IntN(8) {
			case 0:
				w.Sizes[i] = 0
			case 1:
				// Ties.
				for b := range w.Limits {
					w.Scores[i*len(w.Limits)+b] = float32(random.IntN(2))
				}
			}
		}
		price := w.Price
		if random.IntN(2) == 0 {
			price = w.PriceExact
		}
		prices, value := price(1+random.IntN(100), nil)
		if want := relaxedValue(&w, prices); math.Abs(value-want) > 1e-9*(1+want) {
			t.Fatalf("%d items in %d bins: %v from step to step, %v from all items", len(w.Sizes), len(w.Limits), value, want)
		}
	}
}

func TestPriceConverges(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	w := randomWeighted(random, 2000, 8)
	prices, bound := w.PriceExact(60, nil)
	bin := w.Assign(prices, 0.01)
	load := make([]float64, 8)
	for i, b := range bin {
		load[b] += float64(w.Sizes[i])
	}
	for b := range load {
		if load[b] > w.Limits[b]*1.01 {
			t.Errorf("bin %d holds %v; the limit is %v", b, load[b], w.Limits[b])
		}
	}
	if value := total(w.Scores, bin, 8); value < bound*0.995 {
		t.Errorf("assignment is worth %v; the bound is %v", value, bound)
	}
}

// assignByHand evaluates every item for every move.
func assignByHand(w *assign.Weighted, prices assign.Prices, tolerance float64) []int {
	bins, loads := w.Take(prices)
	n := len(w.Limits)
	for range len(bins) {
		from := -1
		for bin, load := range loads {
			over := load - w.Limits[bin]*(1+tolerance)
			if over > 0 && (from < 0 || over > loads[from]-w.Limits[from]*(1+tolerance)) {
				from = bin
			}
		}
		item, to, least := -1, -1, math.Inf(1)
		for i, bin := range bins {
			for b := range n {
				size := float64(w.Sizes[i])
				if bin != from || size == 0 || b == from || loads[b]+size > w.Limits[b]*(1+tolerance) {
					continue
				}
				if loss := (float64(w.Scores[i*n+from]) - float64(w.Scores[i*n+b])) / size; loss < least {
					item, to, least = i, b, loss
				}
			}
		}
		if item < 0 {
			break
		}
		loads[from] -= float64(w.Sizes[item])
		loads[to] += float64(w.Sizes[item])
		bins[item] = to
	}
	return bins
}

// TestAssignTakesTheCheapestMoves covers equal scores and sizes, limits of all kinds, and prices that leave several
// bins overfull.
func TestAssignTakesTheCheapestMoves(t *testing.T) {
	random := rand.New(rand.NewPCG(8, 8))
	for run := range 2000 {
		items, bins := 1+random.IntN(60), 1+random.IntN(7)
		w := randomWeighted(random, items, bins)
		if run%2 == 0 {
			for i := range w.Scores {
				w.Scores[i] = float32(random.IntN(3))
			}
		}
		if run%3 == 0 {
			w.Sizes[random.IntN(items)] = 0
		}
		prices := make(assign.Prices, bins)
		for b := range bins {
			w.Limits[b] *= 0.4 + random.Float64()
			prices[b] = random.Float64()
		}
		tolerance := 0.1 * float64(run%4)
		if got, want := w.Assign(prices, tolerance), assignByHand(&w, prices, tolerance); !slices.Equal(got, want) {
			t.Fatalf("run %d: %v; want %v", run, got, want)
		}
	}
}

// TestAssignManyEqualItems would take minutes if every move evaluated every item.
func TestAssignManyEqualItems(t *testing.T) {
	const items, bins = 100_000, 16
	w := assign.Weighted{Scores: make([]float32, items*bins), Sizes: slices.Repeat([]float32{1}, items), Limits: slices.Repeat([]float64{items / bins}, bins)}
	begin, loads := time.Now(), make([]int, bins)
	for _, bin := range w.Assign(make(assign.Prices, bins), 0) {
		loads[bin]++
	}
	if slices.Min(loads) != items/bins {
		t.Errorf("loads %v", loads)
	}
	if took := time.Since(begin); took > load.Scale(10*time.Second) {
		t.Errorf("it takes %v", took)
	}
}

func BenchmarkAssignBatch(b *testing.B) {
	random := rand.New(rand.NewPCG(6, 6))
	scores := make([]float32, 4096*8)
	for i := range scores {
		scores[i] = random.Float32()
		if item := i / 8; item%3 == 1 {
			scores[i] = scores[i%8+8*(item%10)]
		}
	}
	capacity := []int{512, 512, 512, 512, 512, 512, 512, 512}
	var solver assign.Solver
	for b.Loop() {
		solver.Assign(scores, capacity)
	}
}

// TestSparseScores checks that SparseScores change no result, with ties in scores and prices.
func TestSparseScores(t *testing.T) {
	random := rand.New(rand.NewPCG(11, 1))
	for _, bins := range []int{1, 5, 64, 65, 130} {
		w := assign.Weighted{Limits: make([]float64, bins)}
		const items = 400
		for item := range items {
			w.Sizes = append(w.Sizes, float32(item%4))
			row := make([]float32, bins)
			for range random.IntN(12) * (1 + item%20/19*bins) { // one item in 20 has a score in most bins
				row[random.IntN(bins)] += float32(1 + random.IntN(2))
			}
			w.Scores = append(w.Scores, row...)
		}
		equal, tied := make(assign.Prices, bins), make(assign.Prices, bins)
		for bin := range w.Limits {
			w.Limits[bin] = 3 * items * float64(bin+1) / float64(bins*(bins+1)) // they sum to the sizes
			tied[bin] = float64(random.IntN(4)-1) / 4
		}
		sparse := w
		sparse.Scores, sparse.Sparse = nil, assign.NewSparseScores(bins)
		for range 2 { // the second time, into memory that is used
			sparse.Sparse.Reset()
			for item := range items {
				sparse.Sparse.Append(w.Scores[item*bins : (item+1)*bins])
			}
		}
		for _, start := range []assign.Prices{nil, tied} {
			prices, value := w.PriceExact(30, start)
			others, sameValue := sparse.PriceExact(30, start)
			if value != sameValue || !slices.Equal(prices, others) {
				t.Fatalf("%d bins: value %v with prices %v, and with SparseScores %v with prices %v", bins, value, prices, sameValue, others)
			}
			for _, at := range []assign.Prices{equal, tied, prices} {
				want, _ := w.Take(at)
				if got, _ := sparse.Take(at); !slices.Equal(got, want) {
					t.Fatalf("%d bins at prices %v: Take returns %v, and with SparseScores %v", bins, at, want, got)
				}
				row, same := make([]float32, bins), make([]float32, bins)
				for item := range items {
					w.AddScores(row, item)
					sparse.AddScores(same, item)
				}
				if !slices.Equal(row, same) {
					t.Fatalf("%d bins: the sum of scores is %v, and with SparseScores %v", bins, row, same)
				}
				if want, got := w.Assign(at, 0.1), sparse.Assign(at, 0.1); !slices.Equal(got, want) {
					t.Fatalf("%d bins at prices %v: Assign returns %v, and with SparseScores %v", bins, at, want, got)
				}
			}
		}
	}
}
