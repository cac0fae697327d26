// SPDX-License-Identifier: Apache-2.0

package eps

import (
	"math"
	"math/rand/v2"
	"testing"
)

// randomStages returns stages with random proportions.
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
				t.Fatalf("%+v: %d groups take %v; closed form %v", s, n, got, want)
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
			t.Fatalf("%+v: %d groups take %v; the minimum is %v", s, groups, time, least)
		}
	}
}

// Communication gets all multiprocessors that it can use if experts need almost no time, and the minimum if
// communication needs almost no time.
func TestShare(t *testing.T) {
	exchange, products := Part{1, 1000}, Part{1, 10000}
	if n, _, _ := (Stages{Dispatch: exchange, Experts: Part{0, 1}, Combine: exchange}).Share(132, 24, 8); n != 24 {
		t.Errorf("communication without experts has %d multiprocessors of 24", n)
	}
	if n, _, _ := (Stages{Dispatch: Part{1, 1}, Experts: products, Combine: Part{1, 1}}).Share(132, 24, 8); n != 2 {
		t.Errorf("with experts only, communication has %d multiprocessors", n)
	}
	n, groups, time := (Stages{Dispatch: exchange, Experts: products, Combine: exchange}).Share(132, 24, 8)
	if n <= 2 || n >= 24 || groups < 2 {
		t.Errorf("communication has %d multiprocessors with %d groups", n, groups)
	}
	if most, _ := (Stages{Dispatch: exchange, Experts: Part{1, 10000 * 132. / 108}, Combine: exchange}).Best(8); most < 2 {
		t.Errorf("%d groups, %v µs", most, time)
	}
}
