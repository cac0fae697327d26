package eps

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// The paper's Table II, dense kernels without FP8, in milliseconds: what 5 and 20 groups save, and what follows.
func TestTradesOfThePaper(t *testing.T) {
	for tokens, c := range map[int]struct{ five, twenty, hidden, group, optimum float64 }{
		3072: {5.620 - 4.299, 5.620 - 4.855, 2.008, 0.0572, 5.9},
		256:  {0.070, -0.148, 0.190, 0.0164, 3.4},
	} {
		trade, err := TradeOf(5, c.five, 20, c.twenty)
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(trade.Hidden-c.hidden) > 1e-3 || math.Abs(trade.Group-c.group) > 1e-4 || math.Abs(trade.Optimum()-c.optimum) > 0.05 {
			t.Errorf("%d tokens: %+v, best at %v; wanted are C = %v, k = %v, N = %v", tokens, trade, trade.Optimum(), c.hidden, c.group, c.optimum)
		}
		if math.Abs(trade.Gain(5)-c.five) > 1e-9 || math.Abs(trade.Gain(20)-c.twenty) > 1e-9 {
			t.Errorf("%d tokens: the gains are %v and %v", tokens, trade.Gain(5), trade.Gain(20))
		}
		if trade.Gain(5) < trade.Gain(20) || trade.Gain(5) < 0 {
			t.Errorf("%d tokens: 5 groups gain %v, 20 %v; the paper's Table III has 5 ahead of 1 and 20", tokens, trade.Gain(5), trade.Gain(20))
		}
	}
	for want, gains := range map[string][2]float64{"nothing to weigh": {-1, -1}} {
		if _, err := TradeOf(5, gains[0], 20, gains[1]); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("gains of %v gave %v", gains, err)
		}
	}
	if _, err := TradeOf(5, 1, 5, 1); err == nil || !strings.Contains(err.Error(), "different numbers") {
		t.Errorf("the same number twice gave %v", err)
	}
}

func TestGroupsAreBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		trade := Trade{Hidden: math.Exp(3 * r.NormFloat64()), Group: math.Exp(3 * r.NormFloat64()), Fixed: r.Float64() / 10}
		most := 1 + r.IntN(32)
		want := 0.0
		for n := 2; n <= most; n++ {
			want = max(want, trade.Gain(n))
		}
		got, gain := trade.Groups(most), 0.0
		if got > 1 {
			gain = trade.Gain(got)
		}
		if got < 1 || got > most || math.Abs(gain-want) > 1e-12*max(1, trade.Hidden) {
			t.Fatalf("%+v: %d of %d groups gain %v; the best gain %v", trade, got, most, gain, want)
		}
	}
}

// randomStages have shares of any size.
func randomStages(r *rand.Rand) Stages {
	part := func() Part { return Part{10 * r.Float64(), 1000 * r.Float64()} }
	s := Stages{Dispatch: part(), Experts: part(), Combine: part(), OneLink: r.IntN(2) == 0}
	if r.IntN(2) == 0 {
		s.Shared = 300 * r.Float64()
	}
	return s
}

func TestTimeOfStages(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	for range 2000 {
		s, n := randomStages(r), 1+r.IntN(20)
		d, g, b := s.Dispatch.of(n), s.Experts.of(n), s.Combine.of(n)
		got, groups := s.Time(n), float64(n)
		if !s.OneLink && s.Shared == 0 {
			if want := d + g + b + (groups-1)*max(d, g, b); math.Abs(got/want-1) > 1e-12 {
				t.Fatalf("%+v: %d groups take %v; by the closed form %v", s, n, got, want)
			}
		}
		bound := max(groups*d+g+b, s.Shared+groups*g+b, d+g+groups*b)
		if s.OneLink {
			bound = max(bound, groups*(d+b))
		}
		if got < bound*(1-1e-12) || got > (s.Shared+groups*(d+g+b))*(1+1e-12) {
			t.Fatalf("%+v: %d groups take %v; the bounds are %v and %v", s, n, got, bound, s.Shared+groups*(d+g+b))
		}
		if one := s.Time(1); math.Abs(one-(max(s.Shared, s.Dispatch.of(1))+s.Experts.of(1)+s.Combine.of(1))) > 1e-9 {
			t.Fatalf("%+v: one group takes %v", s, one)
		}
		least := math.Inf(1)
		for n := range 16 {
			least = min(least, s.Time(n+1))
		}
		if groups, time := s.Best(16); time != least || s.Time(groups) != least {
			t.Fatalf("%+v: %d groups take %v; the least is %v", s, groups, time, least)
		}
	}
}

// Where experts need hardly anything, communication has all that it can use; where it needs hardly anything, it has the least.
func TestShare(t *testing.T) {
	exchange, products := Part{1, 1000}, Part{1, 10000}
	if n, _, _ := (Stages{Dispatch: exchange, Experts: Part{0, 1}, Combine: exchange}).Share(132, 24, 8); n != 24 {
		t.Errorf("communication alone has %d multiprocessors of 24", n)
	}
	if n, _, _ := (Stages{Dispatch: Part{1, 1}, Experts: products, Combine: Part{1, 1}}).Share(132, 24, 8); n != 2 {
		t.Errorf("next to experts alone communication has %d multiprocessors", n)
	}
	n, groups, time := (Stages{Dispatch: exchange, Experts: products, Combine: exchange}).Share(132, 24, 8)
	if n <= 2 || n >= 24 || groups < 2 {
		t.Errorf("between them communication has %d multiprocessors with %d groups", n, groups)
	}
	if most, _ := (Stages{Dispatch: exchange, Experts: Part{1, 10000 * 132. / 108}, Combine: exchange}).Best(8); most < 2 {
		t.Errorf("%d groups, %v µs", most, time)
	}
}

func TestActivatedExpertsAndDestinations(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for _, c := range []struct{ tokens, experts, topK, ranks int }{{1, 64, 6, 8}, {20, 64, 6, 8}, {5, 128, 8, 4}, {40, 256, 8, 32}, {3, 8, 8, 2}, {2, 16, 1, 16}} {
		const draws = 400
		activated, destinations := 0.0, 0.0
		for range draws {
			seen := make([]bool, c.experts)
			for token := range c.tokens {
				ranks := map[int]bool{}
				for _, expert := range r.Perm(c.experts)[:c.topK] {
					if !seen[expert] {
						seen[expert] = true
						activated++
					}
					ranks[expert*c.ranks/c.experts] = true
				}
				if token == 0 {
					destinations += float64(len(ranks))
				}
			}
		}
		if got, want := ActivatedExperts(c.tokens, c.experts, c.topK), activated/draws; math.Abs(got/want-1) > .06 {
			t.Errorf("%+v: %v experts are activated; drawn were %v", c, got, want)
		}
		got, want := Destinations(c.experts, c.topK, c.ranks), destinations/draws
		if math.Abs(got/want-1) > .06 || got < 1-1e-12 || got > float64(min(c.topK, c.ranks))+1e-9 {
			t.Errorf("%+v: %v destinations; drawn were %v", c, got, want)
		}
		// The paper's bounds of the volume, with one and with the most destinations.
		const bytes = 1e6
		low, high := ExpertParallelBytes(bytes, c.ranks, 1), ExpertParallelBytes(bytes, c.ranks, float64(min(c.topK, c.ranks)))
		if v := ExpertParallelBytes(bytes, c.ranks, got); v < low-1e-6 || v > high+1e-6 || high > TensorParallelBytes(bytes, c.ranks)+1e-6 {
			t.Errorf("%+v: %v bytes are moved; bounds are %v and %v, tensor parallelism moves %v", c, v, low, high, TensorParallelBytes(bytes, c.ranks))
		}
	}
}
