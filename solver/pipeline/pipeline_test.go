// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/test/tier"
)

var (
	// scheduleInstances is the number of random schedules whose makespans are compared with the simulator's.
	scheduleInstances = tier.Choose(4000, 4000, 200_000)
	// searchInstances is the number of random problems whose search is compared with brute force.
	searchInstances = tier.Choose(100, 100, 1000)
)

// instances returns n, or a tenth in short tests: the race detector makes arithmetic ten times slower.
func instances(n int) int {
	if testing.Short() {
		return max(1, n/10)
	}
	return n
}

// randomDurations returns durations with varying bottlenecks; some may be equal, and there may be no shared experts.
func randomDurations(r *rand.Rand) Durations {
	draw := func() float64 { return math.Exp(4 * r.Float64()) }
	d := Durations{Attention: draw(), Shared: draw(), Dispatch: draw(), Experts: draw(), Combine: draw()}
	switch r.IntN(5) {
	case 0:
		d.Combine = d.Dispatch
	case 1:
		d.Dispatch, d.Combine = d.Experts, d.Experts
	case 2:
		d.Shared = 0
	case 3:
		d = Durations{math.Ceil(d.Attention), math.Ceil(d.Shared), math.Ceil(d.Dispatch), math.Ceil(d.Experts), math.Ceil(d.Combine)}
	}
	return d
}

func randomSizes(r *rand.Rand) Sizes { return Sizes{1 + r.IntN(8), 1 + r.IntN(6), 1 + r.IntN(8)} }

// randomOrder returns a random order.
func randomOrder(r *rand.Rand, microBatches int) Order {
	o := AASS(microBatches)
	r.Shuffle(len(o), func(i, j int) { o[i], o[j] = o[j], o[i] })
	return o
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(math.Abs(a), math.Abs(b)) }

func TestMakespansMatchTheSimulator(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var e evaluator
	names := map[string]int{}
	for range instances(scheduleInstances) {
		d, s := randomDurations(r), randomSizes(r)
		for _, o := range []Order{ASAS(s.MicroBatches), AASS(s.MicroBatches), randomOrder(r, s.MicroBatches)} {
			schedule, err := simulate(d, s, o)
			if err != nil {
				t.Fatal(err)
			}
			names[o.Name()]++
			if got := e.makespan(d, s, o); !near(got, schedule.Makespan) {
				t.Fatalf("%+v %+v %v: recurrence %v, simulator %v", d, s, o, got, schedule.Makespan)
			}
			if o.Name() == "ASAS" && !near(closedForm(d, s), schedule.Makespan) {
				t.Fatalf("%+v %+v: closed form %v, simulator %v", d, s, closedForm(d, s), schedule.Makespan)
			}
			if bound := lateBound(d, s); o.Name() == "AASS" && bound > schedule.Makespan*(1+1e-9) {
				t.Fatalf("%+v %+v: the bound on AASS, %v, is above its makespan %v", d, s, bound, schedule.Makespan)
			}
			if bound := Bound(d, s); bound > schedule.Makespan*(1+1e-9) {
				t.Fatalf("%+v %+v %v: the bound %v is above the makespan %v", d, s, o, bound, schedule.Makespan)
			}
		}
	}
	if names["ASAS"] < instances(scheduleInstances) || names["AASS"] == 0 || names["climbed"] == 0 {
		t.Errorf("tested orders: %v", names)
	}
}

// With many layers, most are not computed individually.
func TestMakespanOfManyLayers(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range instances(100) {
		d, s := randomDurations(r), randomSizes(r)
		s.Layers = 61
		for _, o := range []Order{AASS(s.MicroBatches), randomOrder(r, s.MicroBatches)} {
			schedule, err := simulate(d, s, o)
			if err != nil {
				t.Fatal(err)
			}
			if got := makespanOf(d, s, o); !near(got, schedule.Makespan) {
				t.Fatalf("%+v %+v %v: recurrence %v, simulator %v", d, s, o, got, schedule.Makespan)
			}
		}
	}
}

// The rules of the simulator: one task at a time on a resource, and every task after its prerequisites.
func TestSimulatorKeepsTheRules(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range instances(200) {
		d, s := randomDurations(r), randomSizes(r)
		o := randomOrder(r, s.MicroBatches)
		schedule, err := simulate(d, s, o)
		if err != nil {
			t.Fatal(err)
		}
		if want := s.Layers * s.MicroBatches * (2 + 3*s.Chunks); len(schedule.Tasks) != want {
			t.Fatalf("%+v: %d tasks; want %d", s, len(schedule.Tasks), want)
		}
		free := [resources]float64{}
		ends := map[Task]float64{} // keyed by the task without times
		key := func(on Resource, shared bool, layer, batch, chunk int) Task {
			return Task{On: on, Shared: shared, Layer: layer, MicroBatch: batch, Chunk: chunk}
		}
		for _, task := range schedule.Tasks {
			ends[key(task.On, task.Shared, task.Layer, task.MicroBatch, task.Chunk)] = task.End
		}
		if len(ends) != len(schedule.Tasks) {
			t.Fatalf("%+v: a task was done twice", s)
		}
		for _, task := range schedule.Tasks {
			if task.Start < free[task.On]-1e-9 {
				t.Fatalf("%+v %v: %+v starts while its resource is busy until %v", s, o, task, free[task.On])
			}
			free[task.On] = task.End
			var after []Task
			switch {
			case task.Shared:
				after = append(after, key(AttentionGroup, false, task.Layer, task.MicroBatch, 0))
			case task.On == DispatchLink:
				after = append(after, key(AttentionGroup, false, task.Layer, task.MicroBatch, 0))
			case task.On != AttentionGroup:
				after = append(after, key(task.On-1, false, task.Layer, task.MicroBatch, task.Chunk))
			case task.Layer > 0:
				after = append(after, key(AttentionGroup, true, task.Layer-1, task.MicroBatch, 0), key(CombineLink, false, task.Layer-1, task.MicroBatch, s.Chunks-1))
			}
			for _, before := range after {
				if end, done := ends[before]; !done || task.Start < end-1e-9 {
					t.Fatalf("%+v %v: %+v starts before %+v ends at %v", s, o, task, before, end)
				}
			}
		}
	}
}

func TestSimulateRefuses(t *testing.T) {
	for want, c := range map[string]struct {
		sizes Sizes
		order Order
	}{
		"0 layers":           {Sizes{0, 1, 1}, ASAS(1)},
		"tasks; allowed are": {Sizes{1000, 1000, 1000}, ASAS(1000)},
		"is not one of":      {Sizes{1, 2, 1}, Order{0, 0, ^0, ^1}},
		"has 2 tasks":        {Sizes{1, 2, 1}, Order{^1, ^0}},
		"has 3 tasks":        {Sizes{1, 1, 1}, Order{1, 0, ^0}},
	} {
		if _, err := simulate(Durations{1, 1, 1, 1, 1}, c.sizes, c.order); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v; want %q", err, want)
		}
	}
}

func TestOrdersHaveNames(t *testing.T) {
	for want, o := range map[string]Order{"A0 S0 A1 S1": ASAS(2), "A0 A1 S0 S1": AASS(2), "A0 S1' A1 S0": {0, ^1, 1, ^0}} {
		if got := o.String(); got != want {
			t.Errorf("order %v has the text %q; want %q", []Step(o), got, want)
		}
	}
	if names := []string{ASAS(2).Name(), AASS(2).Name(), (Order{0, ^1, 1, ^0}).Name()}; !slices.Equal(names, []string{"ASAS", "AASS", "climbed"}) {
		t.Errorf("order names %v", names)
	}
}

// randomProblem returns a problem with start-up costs and minimum durations, and up to three ways to send chunks.
func randomProblem(r *rand.Rand) *Problem {
	draw := func() float64 { return math.Exp(3 * r.Float64()) }
	time := func(unit float64) func(float64) float64 {
		floor, start, per := 30*draw(), 10*draw(), unit*draw()
		return func(x float64) float64 { return max(floor, start+per*x) }
	}
	ways := func() Ways {
		var ways Ways
		for range 1 + r.IntN(3) {
			ways = append(ways, time(5))
		}
		return ways
	}
	p := &Problem{Layers: 1 + r.IntN(8), Experts: 8 << r.IntN(3), Sequence: 1 + r.IntN(12)}
	p.TopK = 1 + r.IntN(4)
	for range 1 + r.IntN(3) {
		split := Split{
			AttentionRanks: 1 + r.IntN(3), ExpertRanks: 1 + r.IntN(3), Samples: 1 + r.IntN(12),
			Attention: time(20), Dispatch: ways(), Experts: time(5), Combine: ways(),
		}
		if r.IntN(3) > 0 {
			split.Shared = time(10)
		}
		p.Splits = append(p.Splits, split)
	}
	return p
}

// bruteForce returns the maximum throughput over all sizes with ASAS and AASS.
func bruteForce(p *Problem) float64 {
	best := 0.0
	for i := range p.Splits {
		split := &p.Splits[i]
		for samples := 1; samples <= split.Samples; samples++ {
			for batches := 1; batches*samples <= split.Samples; batches++ {
				for chunks := 1; chunks <= p.maxChunks(split, samples); chunks++ {
					for _, o := range []Order{ASAS(batches), AASS(batches)} {
						time := makespanOf(p.durations(split, samples, chunks), Sizes{p.Layers, batches, chunks}, o)
						best = max(best, 1e6*float64(batches*samples*split.AttentionRanks*p.Sequence)/time)
					}
				}
			}
		}
	}
	return best
}

func TestSearchMatchesBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	climbed := 0
	for range searchInstances {
		p := randomProblem(r)
		s := &searcher{problem: p}
		want := bruteForce(p)
		if got := s.best(s.promising(s.candidates(), 0)).TokensPerSecond; !near(got, want) && math.Abs(got/want-1) > 2*worthwhile {
			t.Fatalf("%+v: the search found %v tokens/s, brute force %v", p, got, want)
		}
		result, err := Search(p)
		if err != nil {
			t.Fatal(err)
		}
		checkResult(t, p, result)
		if result.Plan.OrderName == "climbed" {
			climbed++
		}
		if result.Plan.TokensPerSecond < want*(1-1e-9) {
			t.Fatalf("%+v: %v tokens/s after the local search, %v before", p, result.Plan.TokensPerSecond, want)
		}
	}
	t.Logf("%d of %d best orders are neither ASAS nor AASS", climbed, searchInstances)
	if climbed == 0 {
		t.Error("the local search found no other order")
	}
}

// The local search nearly always finds the best order among those with attention in the order of micro-batches.
func TestClimbIsNearTheBestOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	better, reached := 0, 0
	for range 120 {
		d, s := randomDurations(r), Sizes{2 + r.IntN(7), 2 + r.IntN(2), 1 + r.IntN(4)}
		d.Shared = max(d.Shared, 1)
		p := Plan{Durations: d, Sizes: s, Order: ASAS(s.MicroBatches), Makespan: closedForm(d, s), TokensPerSecond: 1}
		asas, aass := p.Makespan, makespanOf(d, s, AASS(s.MicroBatches))
		(&searcher{}).climb(&p)
		if got := makespanOf(d, s, p.Order); got != p.Makespan && !near(got, p.Makespan) || !near(p.TokensPerSecond, asas/p.Makespan) {
			t.Fatalf("%+v %+v: local search %v and %v, recurrence %v", d, s, p.Makespan, p.TokensPerSecond, got)
		}
		shortest := min(asas, aass)
		if p.Makespan > shortest*(1+2*worthwhile) {
			t.Fatalf("%+v %+v: the local search increases the makespan from %v to %v", d, s, shortest, p.Makespan)
		}
		forEachOrder(s.MicroBatches, func(o Order) { shortest = min(shortest, makespanOf(d, s, o)) })
		if shortest < min(asas, aass)*(1-worthwhile) {
			better++
			if p.Makespan < min(asas, aass)*(1-worthwhile) {
				reached++
			}
		}
		if p.Makespan > shortest*1.03 {
			t.Errorf("%+v %+v: the local search ends at %v, the best order has %v", d, s, p.Makespan, shortest)
		}
	}
	t.Logf("of 120 instances %d have an order better than ASAS and AASS; one was found for %d", better, reached)
	if better == 0 || reached*2 < better {
		t.Errorf("%d better orders, of which %d were found", better, reached)
	}
}

// forEachOrder calls f for all orders with attention in the order of micro-batches.
func forEachOrder(microBatches int, f func(Order)) {
	var extend func(o Order, attention int, left []Step)
	extend = func(o Order, attention int, left []Step) {
		if len(o) == 2*microBatches {
			f(o)
			return
		}
		if attention < microBatches {
			extend(append(o, Step(attention)), attention+1, left)
		}
		for n, step := range left {
			extend(append(o, step), attention, slices.Delete(slices.Clone(left), n, n+1))
		}
	}
	var shared []Step
	for i := range microBatches {
		shared = append(shared, ^Step(i))
	}
	extend(make(Order, 0, 2*microBatches), 0, shared)
}

// checkResult compares plans with the simulator, with their baselines, and with the bound.
func checkResult(t *testing.T, p *Problem, r *Result) {
	t.Helper()
	for name, plan := range map[string]Plan{"plan": r.Plan, "naive": r.Naive, "pppipe": r.PPPipe} {
		schedule, err := simulate(plan.Durations, plan.Sizes, plan.Order)
		if err != nil {
			t.Fatal(err)
		}
		tokens := float64(plan.Sizes.MicroBatches * plan.Samples * plan.AttentionRanks * p.Sequence)
		if !near(plan.Makespan, schedule.Makespan) || math.Abs(plan.TokensPerSecond/(1e6*tokens/schedule.Makespan)-1) > 1e-9 {
			t.Fatalf("%s %+v: simulator %v", name, plan, schedule.Makespan)
		}
		if !near(plan.TokensPerExpert*float64(plan.Sizes.Chunks*p.Experts), float64(plan.AttentionRanks*plan.Samples*p.Sequence*p.TopK)) {
			t.Fatalf("%s %+v: tokens are lost", name, plan)
		}
	}
	got := r.Plan.TokensPerSecond
	if got < r.PPPipe.TokensPerSecond*(1-1e-9) || got < r.Naive.TokensPerSecond*(1-1e-9) || got > r.BoundTokensPerSecond*(1+1e-9) {
		t.Fatalf("%+v: %v tokens/s, naive %v, PPPipe %v, bound %v", p, got, r.Naive.TokensPerSecond, r.PPPipe.TokensPerSecond, r.BoundTokensPerSecond)
	}
	if r.Gap < 0 || r.Gap > 1 || math.Abs(1-got/r.BoundTokensPerSecond-r.Gap) > 1e-9 {
		t.Fatalf("the gap is %v", r.Gap)
	}
}

// The maximum number of micro-batches holds, also if a different number of samples would need more.
func TestSearchBoundsMicroBatches(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for range 50 {
		p := randomProblem(r)
		p.MicroBatches = 1 + r.IntN(3)
		result, err := Search(p)
		if err != nil {
			t.Fatal(err)
		}
		if result.Plan.Sizes.MicroBatches > p.MicroBatches || result.PPPipe.Sizes.MicroBatches > p.MicroBatches {
			t.Fatalf("%d and %d micro-batches; the maximum is %d", result.Plan.Sizes.MicroBatches, result.PPPipe.Sizes.MicroBatches, p.MicroBatches)
		}
		checkResult(t, p, result)
	}
}

func TestSearchRefuses(t *testing.T) {
	for want, change := range map[string]func(p *Problem){
		"layers: 0; allowed is 1 to":        func(p *Problem) { p.Layers = 0 },
		"experts of a token: 9; allowed":    func(p *Problem) { p.TopK, p.Experts = 9, 8 },
		"sequence length: -1":               func(p *Problem) { p.Sequence = -1 },
		"number of splits: 0":               func(p *Problem) { p.Splits = nil },
		"micro-batches: at most -1":         func(p *Problem) { p.MicroBatches = -1 },
		"room for 0 samples":                func(p *Problem) { p.Splits[0].Samples = 0 },
		"lacks a time function":             func(p *Problem) { p.Splits[0].Combine = nil },
		"split 0: the times of one sample":  func(p *Problem) { p.Splits[0].Attention = func(float64) float64 { return math.NaN() } },
		"attention and a stage of the chun": func(p *Problem) { p.Splits[0].Dispatch = Ways{func(float64) float64 { return math.Inf(1) }} },
	} {
		p := randomProblem(rand.New(rand.NewPCG(11, 12)))
		change(p)
		if _, err := Search(p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v; want %q", err, want)
		}
	}
}

// large returns a problem of the size of DeepSeek-V3: 61 layers, 256 experts, all splits of 16 ranks. Durations have a
// random start-up time and a random part proportional to the load. Chunks are sent in one way, or also in a second way
// that starts later and is faster.
func large(r *rand.Rand, ways int) *Problem {
	draw := func() float64 { return math.Exp(2*r.Float64() - 1) }
	p := &Problem{Layers: 61, Experts: 256, TopK: 8, Sequence: 512 << r.IntN(5)}
	attention, shared, dispatch, experts := 1e-1*draw(), 4e-2*draw(), 2e-2*draw(), 3e-2*draw()
	for ranks := 1; ranks < 16; ranks++ {
		each := 256 / float64(16-ranks)
		send := func(rate float64) Ways {
			return Ways{
				func(x float64) float64 { return 60 + rate*x*each },
				func(x float64) float64 { return 160 + rate*x*each/2 },
			}[:ways]
		}
		p.Splits = append(p.Splits, Split{
			AttentionRanks: ranks, ExpertRanks: 16 - ranks, Samples: max(1, (1<<17)/p.Sequence),
			Attention: func(x float64) float64 { return 80 + attention*x*float64(p.Sequence) },
			Shared:    func(x float64) float64 { return 30 + shared*x*float64(p.Sequence) },
			Dispatch:  send(dispatch),
			Experts:   func(x float64) float64 { return 40 + max(20*each, experts*x*each) },
			Combine:   send(2 * dispatch),
		})
	}
	return p
}

// BenchmarkSearch solves problems of 61 layers, and reports the 99th percentile of the time.
func BenchmarkSearch(b *testing.B) {
	for _, ways := range []int{1, 2} {
		b.Run(fmt.Sprintf("ways=%d", ways), func(b *testing.B) {
			r := rand.New(rand.NewPCG(15, 16))
			times := make([]time.Duration, 0, b.N)
			for b.Loop() {
				b.StopTimer()
				p := large(r, ways)
				b.StartTimer()
				begin := time.Now()
				if _, err := Search(p); err != nil {
					b.Fatal(err)
				}
				times = append(times, time.Since(begin))
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)*99/100].Microseconds())/1e3, "p99-ms")
		})
	}
}

// makespanOf returns the makespan of an order by the recurrence.
func makespanOf(d Durations, s Sizes, o Order) float64 {
	return new(evaluator).makespan(d, s, o)
}
