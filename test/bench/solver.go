// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// solverResult is the result of one solve on generated counts.
type solverResult struct {
	Shape string `json:"shape"`
	// Seconds is the time of the solve, CPU its processor time on all processors. Loading is the part of Seconds for
	// generating the counts.
	Seconds float64 `json:"seconds"`
	CPU     float64 `json:"cpu_seconds"`
	Loading float64 `json:"loading_seconds,omitempty"`
	Goal    float64 `json:"goal_seconds,omitempty"`
	// Warm is the time of a second solve that starts from the first placement, Moves the number of experts that it
	// moves.
	Warm    float64 `json:"warm_seconds,omitempty"`
	WarmCPU float64 `json:"warm_cpu_seconds,omitempty"`
	Moves   int     `json:"warm_moves,omitempty"`
	// Verdict is the part of Seconds for the verdict, of a solve from a trace to a plan with its verdict.
	Verdict float64 `json:"verdict_seconds,omitempty"`
	// Points is the number of placements on the Pareto front; 0 if the search is not by time.
	Points int `json:"front_points,omitempty"`
	// LAR is the local activation rate on the profile.
	LAR float64 `json:"profile_lar"`
	// SystemMiB is the total memory that the process has obtained from the operating system: an upper bound of the
	// peak.
	SystemMiB uint64 `json:"system_mib"`
}

// tokenShape is the size of a problem with attention TP.
type tokenShape struct {
	layers, experts, tokens, ranks int
	goal                           float64
}

var tokenShapes = []tokenShape{
	{58, 256, 129_000, 8, 20}, {58, 256, 129_000, 32, 20}, {58, 256, 129_000, 64, 20}, {48, 128, 151_000, 8, 8}, {94, 512, 129_000, 128, 0},
}

func benchSolver(ctx context.Context) ([]solverResult, error) {
	var results []solverResult
	for _, shape := range tokenShapes {
		r, err := shape.run(ctx)
		if err != nil {
			return nil, err
		}
		results = append(results, r)
	}
	r, err := benchRequests(ctx, 20_000, 12, 64, 8)
	if err != nil {
		return nil, err
	}
	results = append(results, r)
	whole, err := benchWhole(ctx)
	return append(results, whole...), err
}

// benchWhole solves by time from a generated trace, as semmoe solve does: counts, the search in every split, the tables,
// the scores and the verdict.
func benchWhole(ctx context.Context) ([]solverResult, error) {
	t := tracetest.Generate(tracetest.Shape{
		Experts: 256, TopK: 8, Layers: 58, Vocabulary: 129_000, Domains: 10, DocumentsPerDomain: 40, RequestsPerDocument: 2, TokensPerRequest: 250, Noise: 30,
	}, 1)
	t.Model.Config = `{"num_hidden_layers":59,"hidden_size":7168,"moe_intermediate_size":2048}`
	var results []solverResult
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		runtime.GC()
		o := solver.Options{Attention: attention, Ranks: 32, TrainPercent: 80, Algorithm: placement.Auto, Objective: placement.Time, Forecast: solver.Table, Seed: 1}
		begin, cpu := time.Now(), cpuSeconds()
		s, err := solver.Solve(ctx, t, o)
		if err != nil {
			return nil, err
		}
		solved := time.Now()
		if _, err := solver.WorthOf(ctx, t, s, o, 2); err != nil {
			return nil, err
		}
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		results = append(results, solverResult{
			Shape:   fmt.Sprintf("%s, by time, from a trace to the verdict: 58 layers, 256 experts, %d tokens, EP 32", attention, len(t.Tokens)),
			Seconds: time.Since(begin).Seconds(), CPU: cpuSeconds() - cpu, Verdict: time.Since(solved).Seconds(),
			Points: len(s.Plan.Front), LAR: s.Report.LAR, SystemMiB: memory.Sys >> 20,
		})
	}
	return results, nil
}

func (s tokenShape) run(ctx context.Context) (solverResult, error) {
	var loading atomic.Int64
	p := placement.Problem{
		Attention: placement.TensorParallel, Ranks: s.ranks, Layers: indices(s.layers), Experts: s.experts, Algorithm: placement.Auto, Seed: 1, Shrinkage: placement.DefaultShrinkage,
		LoadTokens: func(layer int) (*affinity.Counts, error) {
			begin := time.Now()
			defer func() { loading.Add(int64(time.Since(begin))) }()
			return generateCounts(s.tokens, s.experts, uint64(layer)), nil
		},
	}
	layer := cost.Layer{Machines: cost.NodeOf(hardware.DefaultProfile()), TopK: 8, HiddenSize: 7168, ExpertSize: 2048, Ranks: s.ranks, SlotsPerRank: s.experts / s.ranks}
	p.Clock = placement.NewClock(func(exchange, load float64) float64 { return layer.Time(65536, exchange, load).Total() })
	r := solverResult{Shape: fmt.Sprintf("tp, by time, with the front: %d layers, %d experts, %d tokens, EP %d", s.layers, s.experts, s.tokens, s.ranks), Goal: s.goal}
	return r, r.solve(ctx, p, &loading)
}

func (r *solverResult) solve(ctx context.Context, p placement.Problem, loading *atomic.Int64) error {
	runtime.GC()
	begin, cpu := time.Now(), cpuSeconds()
	first, err := placement.Solve(ctx, p)
	if err != nil {
		return err
	}
	r.Seconds, r.CPU, r.LAR = time.Since(begin).Seconds(), cpuSeconds()-cpu, first.TrainLAR
	r.Points = len(first.Front)
	r.Loading = time.Duration(loading.Load()).Seconds() / float64(runtime.GOMAXPROCS(0))
	p.Current = first.Placement
	begin, cpu = time.Now(), cpuSeconds()
	again, err := placement.Solve(ctx, p)
	if err != nil {
		return err
	}
	r.Warm, r.WarmCPU, r.Moves = time.Since(begin).Seconds(), cpuSeconds()-cpu, placement.Moves(first.Placement, again.Placement)
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	r.SystemMiB = memory.Sys >> 20
	return nil
}

// cpuSeconds returns the processor time of this process so far, or 0 if the system does not report it.
func cpuSeconds() float64 {
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
}

func indices(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}

// generateCounts returns the counts of a layer in which token IDs have Zipf frequencies and 8 to 40 experts each (mean
// 20), most of them from two clusters of experts. The time of generateCounts is part of the solve's time, so that it
// must be fast.
func generateCounts(tokens, experts int, seed uint64) *affinity.Counts {
	source := rand.NewPCG(seed, 1)
	const topK, cluster = 8, 32
	c := &affinity.Counts{Experts: experts, TopK: topK, Start: make([]int, tokens+1), Occurrences: make([]float32, tokens)}
	columns, counts := make([]uint16, 0, tokens*21), make([]float32, 0, tokens*21)
	order := rand.New(source).Perm(experts)
	random := draws{source: source}
	// drawn has a bit for each expert of the row.
	drawn := make([]uint64, (experts+63)/64)
	for token := range tokens {
		occurrences := math.Ceil(3e5 / float64(token+10))
		c.Occurrences[token] = float32(occurrences)
		width, found := 8+min(random.below(37), random.below(37), 32), 0
		add := func(e int) {
			found += 1 - int(drawn[e/64]>>(e%64)&1)
			drawn[e/64] |= 1 << (e % 64)
		}
		for _, until := range [...]int{width / 2, width * 3 / 4} {
			// An odd stride visits every expert of the cluster once.
			first, at, stride := random.below(experts/cluster)*cluster, random.below(cluster), 1+2*random.below(cluster/2)
			for ; found < until; at += stride {
				add(order[first+at%cluster])
			}
		}
		for found < width {
			add(order[random.below(experts)])
		}
		share := float32(occurrences*topK) / float32(width)
		for word, left := range drawn {
			for ; left != 0; left &= left - 1 {
				columns, counts = append(columns, uint16(word*64+bits.TrailingZeros64(left))), append(counts, share)
			}
			drawn[word] = 0
		}
		c.Start[token+1] = len(columns)
	}
	c.Expert, c.Count = columns, counts
	return c
}

// draws splits each random number of the source into four small random numbers.
type draws struct {
	source *rand.PCG
	bits   uint64
	left   int
}

// below returns a random number from 0 to n-1. n must be far below 1<<16.
func (d *draws) below(n int) int {
	if d.left == 0 {
		d.bits, d.left = d.source.Uint64(), 4
	}
	v := d.bits & 0xffff
	d.bits >>= 16
	d.left--
	return int(v * uint64(n) >> 16)
}

// benchRequests solves attention DP with requests of some topics.
func benchRequests(ctx context.Context, requests, layers, experts, ranks int) (solverResult, error) {
	random := rand.New(rand.NewPCG(1, 2))
	const topics, topK = 40, 6
	popular := make([][]float32, topics)
	for i := range popular {
		popular[i] = make([]float32, layers*experts)
		for x := range popular[i] {
			popular[i][x] = float32(random.ExpFloat64())
		}
	}
	c := &affinity.RequestCounts{Layers: layers, Experts: experts, TopK: topK, Tokens: make([]float32, requests), Rows: make([][]float32, requests)}
	var workers sync.WaitGroup
	for r := range requests {
		topic, tokens := popular[random.IntN(topics)], float32(50+random.IntN(900))
		c.Tokens[r], c.Rows[r] = tokens, make([]float32, layers*experts)
		seed := random.Uint64()
		workers.Go(func() {
			random := rand.New(rand.NewPCG(seed, 3))
			for l := range layers {
				row, total := c.Rows[r][l*experts:(l+1)*experts], float32(0)
				for e := range row {
					row[e] = topic[l*experts+e] + float32(random.ExpFloat64())
					total += row[e]
				}
				for e := range row {
					row[e] *= tokens * topK / total
				}
			}
		})
	}
	workers.Wait()
	r := solverResult{Shape: fmt.Sprintf("dp: %d requests, %d layers, %d experts, EP %d", requests, layers, experts, ranks), Goal: 20}
	return r, r.solve(ctx, placement.Problem{
		Attention: placement.DataParallel, Ranks: ranks, Layers: indices(layers), Requests: c, Algorithm: placement.Auto, Seed: 1,
	}, new(atomic.Int64))
}
