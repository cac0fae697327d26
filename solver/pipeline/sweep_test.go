// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// backbones returns the two models of FinDEP's measurements.
func backbones(t *testing.T) map[string]*Shape {
	return map[string]*Shape{"DeepSeek-V2": latent(t), "Qwen3-235B-A22B": groupedQueries(t)}
}

// sized returns the best simulated plan of ASAS and AASS with the given samples and micro-batches.
func sized(t *testing.T, p *Problem, split *Split, samples, batches int) *Plan {
	t.Helper()
	s := &searcher{problem: p}
	c := candidate{split: split, oneWay: split, samples: samples, microBatches: batches}
	var best Plan
	for _, order := range []Order{ASAS(batches), AASS(batches)} {
		time := func(d Durations, sizes Sizes) float64 { return s.makespan(d, sizes, order) }
		chunks, least := s.fastestChunks(&c, time)
		plan := s.plan(&c, chunks, order, time)
		schedule, err := simulate(plan.Durations, plan.Sizes, plan.Order)
		if err != nil {
			t.Fatal(err)
		}
		if !near(least, schedule.Makespan) {
			t.Fatalf("%+v: simulator %v", plan, schedule.Makespan)
		}
		if plan.TokensPerSecond > best.TokensPerSecond {
			best = plan
		}
	}
	return &best
}

// Throughput does not decrease with more samples per micro-batch, or with more micro-batches. The search omits other
// sizes for this reason (FinDEP's Tables 3 and 4).
func TestThroughputGrowsWithSamplesAndMicroBatches(t *testing.T) {
	lengths := []int{1024, 2048, 4096}
	if testing.Short() {
		lengths = lengths[1:2]
	}
	for name, shape := range backbones(t) {
		for _, sequence := range lengths {
			v := serving()
			v.Sequence, v.Samples = sequence, 64
			p, err := shape.Problem(profile(t), v)
			if err != nil {
				t.Fatal(err)
			}
			if testing.Short() {
				p.Layers = 4
			}
			split := &p.Splits[3] // 4 + 4
			var lines []string
			above := make([]float64, 5)
			for _, samples := range []int{1, 2, 3, 4, 6, 8} {
				line, before := fmt.Sprintf("| %s | %d | %d", name, sequence, samples), 0.0
				for i, batches := range []int{1, 2, 3, 4, 8} {
					got := sized(t, p, split, samples, batches).TokensPerSecond
					if got < before*(1-1e-9) || got < above[i]*(1-1e-9) {
						t.Errorf("%s, %d tokens: %d micro-batches of %d samples reach %v tokens/s; fewer micro-batches %v, fewer samples %v", name, sequence, batches, samples, got, before, above[i])
					}
					before, above[i] = got, got
					line += fmt.Sprintf(" | %.0f", got)
				}
				lines = append(lines, line+" |")
			}
			t.Logf("tokens/s with 1, 2, 3, 4 and 8 micro-batches, by their samples:\n%s", strings.Join(lines, "\n"))
		}
	}
}

// The same holds for random durations and all sizes up to a few.
func TestThroughputGrowsForRandomTimes(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 18))
	for range instances(200) {
		p := randomProblem(r)
		split := &p.Splits[0]
		s := &searcher{problem: p}
		reached := func(samples, batches int) float64 {
			c := candidate{split: split, oneWay: split, samples: samples, microBatches: batches}
			least := math.Inf(1)
			for _, order := range []Order{ASAS(batches), AASS(batches)} {
				_, time := s.fastestChunks(&c, func(d Durations, sizes Sizes) float64 { return s.makespan(d, sizes, order) })
				least = min(least, time)
			}
			return s.tokens(&c) / least
		}
		for samples := 1; samples <= 4; samples++ {
			for batches := 1; batches <= 4; batches++ {
				got := reached(samples, batches)
				if more := reached(samples, batches+1); more < got*(1-1e-9) {
					t.Fatalf("%+v: %d micro-batches of %d samples reach %v, one more micro-batch %v", p, batches, samples, got, more)
				}
				if more := reached(2*samples, batches); more < got*(1-1e-9) {
					t.Fatalf("%+v: %d micro-batches of %d samples reach %v, twice as many samples %v", p, batches, samples, got, more)
				}
			}
		}
	}
}

// By hand: attention ends at 30, dispatch at 42, experts at 56, combine at 68. Exposed are 30 to 42 and 56 to 68,
// except while shared experts run.
func TestExposedByHand(t *testing.T) {
	for _, c := range []struct {
		durations Durations
		sizes     Sizes
		want      float64
	}{
		{Durations{30, 0, 12, 14, 12}, Sizes{1, 1, 1}, 24},
		{Durations{30, 0, 12, 14, 12}, Sizes{5, 1, 1}, 120},
		{Durations{30, 5, 12, 14, 12}, Sizes{1, 1, 1}, 19},
		{Durations{30, 40, 12, 14, 12}, Sizes{1, 1, 1}, 0},
		{Durations{30, 0, 12, 14, 12}, Sizes{1, 2, 1}, 24}, // 60 to 72, during the first combine, and the last combine
		{Durations{10, 0, 4, 8, 4}, Sizes{1, 1, 2}, 8},     // the first dispatch and the last combine
	} {
		s, err := simulate(c.durations, c.sizes, ASAS(c.sizes.MicroBatches))
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Exposed(); !near(got, c.want) {
			t.Errorf("%+v %+v: %v µs are exposed; want %v", c.durations, c.sizes, got, c.want)
		}
	}
}

// The exposed time is at most the time without work of either group, and at most the busy time of the links.
func TestExposedOfRandomSchedules(t *testing.T) {
	r := rand.New(rand.NewPCG(19, 20))
	for range instances(300) {
		d, sizes := randomDurations(r), randomSizes(r)
		s, err := simulate(d, sizes, randomOrder(r, sizes.MicroBatches))
		if err != nil {
			t.Fatal(err)
		}
		links := float64(sizes.Layers*sizes.MicroBatches*sizes.Chunks) * (d.Dispatch + d.Combine)
		computed := float64(sizes.Layers*sizes.MicroBatches) * max(d.own(), float64(sizes.Chunks)*d.Experts)
		got := s.Exposed()
		if got < -1e-9 || got > links*(1+1e-9) || got > s.Makespan*(1+1e-9)-computed {
			t.Fatalf("%+v %+v: %v µs are exposed, links are busy for %v, one of the groups for at least %v of %v", d, sizes, got, links, computed, s.Makespan)
		}
		// Some task runs at any time, so the groups compute in the rest of the makespan.
		if covered := s.covered(func(Resource) bool { return true }); !near(covered, s.Makespan) {
			t.Fatalf("%+v %+v: tasks run during %v of %v µs", d, sizes, covered, s.Makespan)
		}
	}
}

// FinDEP's Table 7: the schedule exposes no more of its exchanges than no schedule.
func TestSchedulesHideExchanges(t *testing.T) {
	for name, shape := range backbones(t) {
		for _, sequence := range []int{1024, 4096, 8192} {
			v := serving()
			v.Sequence = sequence
			p, err := shape.Problem(profile(t), v)
			if err != nil {
				t.Fatal(err)
			}
			r, err := Search(p)
			if err != nil {
				t.Fatal(err)
			}
			var shares []float64
			for _, plan := range []*Plan{&r.Plan, &r.PPPipe, &r.Naive} {
				share, err := plan.ExposedShare()
				if err != nil {
					t.Fatal(err)
				}
				shares = append(shares, share)
			}
			t.Logf("%s, %d tokens: %.2f%% exposed, PPPipe %.2f%%, naive %.2f%%", name, sequence, 100*shares[0], 100*shares[1], 100*shares[2])
			if shares[0] > shares[2] || shares[1] > shares[2] || shares[2] <= 0 {
				t.Errorf("%s, %d tokens: exposed: %v with the schedule, %v with PPPipe, %v without a schedule", name, sequence, shares[0], shares[1], shares[2])
			}
		}
	}
}

// A schedule kept at its own length is unchanged; at another length it matches the simulator.
func TestKeptSchedule(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 22))
	for range instances(100) {
		p := randomProblem(r)
		p.Splits = p.Splits[:1] // other splits may have groups of the same sizes
		found, err := Search(p)
		if err != nil {
			t.Fatal(err)
		}
		kept, err := p.Keep(&found.Plan)
		if err != nil {
			t.Fatal(err)
		}
		if !near(kept.TokensPerSecond, found.Plan.TokensPerSecond) || kept.Sizes != found.Plan.Sizes {
			t.Fatalf("%+v becomes %+v", found.Plan, kept)
		}
		other := *p
		other.Sequence = 1 + r.IntN(40)
		if kept, err = other.Keep(&found.Plan); err != nil {
			t.Fatal(err)
		}
		schedule, err := simulate(kept.Durations, kept.Sizes, kept.Order)
		if err != nil {
			t.Fatal(err)
		}
		if !near(kept.Makespan, schedule.Makespan) || kept.AttentionRanks != found.Plan.AttentionRanks || kept.Sizes.Chunks > found.Plan.Sizes.Chunks {
			t.Fatalf("%+v becomes %+v; simulator %v", found.Plan, kept, schedule.Makespan)
		}
	}
}

func TestKeepRejectsOtherGroups(t *testing.T) {
	p := randomProblem(rand.New(rand.NewPCG(23, 24)))
	if _, err := p.Keep(&Plan{AttentionRanks: 99, ExpertRanks: 1}); err == nil || !strings.Contains(err.Error(), "no split of 99 attention and 1 expert ranks") {
		t.Errorf("other groups: %v", err)
	}
}
