// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// CompareOptions are the inputs of Compare in addition to the trace.
type CompareOptions struct {
	// The comparison covers all combinations of Attentions, Ranks (EP sizes) and Seeds of the split.
	Attentions []placement.Attention
	Ranks      []int
	Seeds      []uint64
	// RedundantSlots are the numbers of extra slots per rank to compare. Algorithms without support for redundant slots
	// run without them. Empty means 0.
	RedundantSlots []int
	// Algorithms are the algorithms to compare.
	Algorithms []placement.Algorithm
	// Forecasts are used with Auto and attention TP, Baselines with the placements of all other algorithms.
	Forecasts, Baselines []solver.Forecast
	// TrainPercent is the percentage of requests in the train part of each split.
	TrainPercent int
	// Embeddings are the token vectors from which prompts are clustered (attention DP); nil means a random projection
	// of the prompt's bag of tokens.
	Embeddings *embedding.Table
	// Cells is the maximum number of cells (seed, attention mode, EP size, extra slots, algorithm) to solve
	// concurrently, each on all processors that it can use; 0 means half of the processors. More cells need more memory
	// and improve processor utilization. Results do not depend on Cells, except PlacementSeconds.
	Cells int
	// Progress, if set, receives the number of finished cells after each cell. It is called from several goroutines.
	Progress func(step string, done, total int)
}

// Comparison contains the scores of one method at one EP size, on the held-out requests of every seed.
type Comparison struct {
	Attention placement.Attention `json:"attention"`
	Ranks     int                 `json:"ep_size"`
	Algorithm placement.Algorithm `json:"algorithm"`
	// RedundantSlots is the number of extra slots of a rank. SlotsPerRank is the number of all slots: the experts in
	// its memory.
	RedundantSlots int `json:"redundant_slots"`
	SlotsPerRank   int `json:"slots_per_rank"`
	// Forecast names the source of the scores, Dispatch the policy that assigns tokens or requests by them.
	Forecast string `json:"forecast"`
	Dispatch string `json:"dispatch"`
	// Part defines, for our placement and the default one, which parts of co-scheduling are used.
	Part Part `json:"part,omitempty"`
	// LAR is the local activation rate. The fields below are means over the seeds.
	LAR                   Spread  `json:"lar"`
	TokenImbalance        float64 `json:"token_imbalance"`
	WindowImbalance       float64 `json:"window_imbalance,omitempty"`
	BatchImbalance        float64 `json:"batch_imbalance,omitempty"`
	ExpertImbalance       float64 `json:"expert_imbalance"`
	ExpertWindowImbalance float64 `json:"expert_window_imbalance"`
	RemoteRanksPerToken   float64 `json:"remote_ranks_per_token"`
	// PlacementSeconds is the mean time over seeds to solve the placement, without the time to count. Concurrent cells
	// share the processors.
	PlacementSeconds float64 `json:"placement_seconds"`
}

// Part is a part of co-scheduling: expert placement, or routing of tokens or requests.
type Part string

// Parts of co-scheduling.
const (
	NeitherPart   Part = "neither"
	PlacementPart Part = "placement alone"
	RoutingPart   Part = "routing alone"
	BothParts     Part = "both"
)

// Spread is the distribution of a figure over several seeds.
type Spread struct {
	Mean  float64   `json:"mean"`
	Min   float64   `json:"min"`
	Max   float64   `json:"max"`
	Seeds []float64 `json:"seeds"`
}

func (s *Spread) add(v float64) {
	s.Seeds = append(s.Seeds, v)
	s.Min, s.Max = slices.Min(s.Seeds), slices.Max(s.Seeds)
	sum := 0.0
	for _, x := range s.Seeds {
		sum += x
	}
	s.Mean = sum / float64(len(s.Seeds))
}

// Compare solves and scores every method at every EP size and seed. All methods use the same train requests and are
// scored on the same test requests.
func Compare(ctx context.Context, t *trace.Trace, o CompareOptions) ([]Comparison, error) {
	cells, err := o.cells(&t.Model)
	if err != nil {
		return nil, err
	}
	profiles := newProfiles(t, &o, cells)
	scored := make([][]Comparison, len(cells))
	var lock sync.Mutex
	done := 0
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(o.atOnce())
	for _, i := range longestFirst(cells) {
		group.Go(func() error {
			s, err := profiles.of(ctx, cells[i])
			if err != nil {
				return err
			}
			defer profiles.release(cells[i])
			if scored[i], err = s.methods(ctx, &o); err != nil || o.Progress == nil {
				return err
			}
			lock.Lock()
			defer lock.Unlock()
			done++
			o.Progress("Comparison", done, len(cells))
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return mergeSeeds(scored, len(o.Seeds)), nil
}

func (o *CompareOptions) atOnce() int {
	if o.Cells > 0 {
		return o.Cells
	}
	return max(runtime.GOMAXPROCS(0)/2, 1)
}

// cell is one unit of work: one algorithm, one EP size, one split.
type cell struct {
	seed      uint64
	attention placement.Attention
	ranks     int
	redundant int
	algorithm placement.Algorithm
}

// cells lists all cells in the order of the results. It returns an error for cells that the model does not support.
func (o *CompareOptions) cells(m *trace.Model) ([]cell, error) {
	slots := o.RedundantSlots
	if len(slots) == 0 {
		slots = []int{0}
	}
	var cells []cell
	for _, ranks := range o.Ranks {
		if err := placement.CheckRanks(ranks, m.Experts); err != nil {
			return nil, err
		}
		for _, redundant := range slots {
			if err := placement.CheckSlots(placement.Auto, ranks, m.Experts, redundant); err != nil {
				return nil, err
			}
		}
	}
	for _, seed := range o.Seeds {
		for _, attention := range o.Attentions {
			for _, ranks := range o.Ranks {
				for _, redundant := range slots {
					for _, algorithm := range o.Algorithms {
						if redundant == 0 || placement.CheckSlots(algorithm, ranks, m.Experts, redundant) == nil {
							cells = append(cells, cell{seed, attention, ranks, redundant, algorithm})
						}
					}
				}
			}
		}
	}
	return cells, nil
}

// longestFirst returns an order of cells in which long cells start first, so that none remains at the end, and in which
// few seeds need their counts at the same time.
func longestFirst(cells []cell) []int {
	order := make([]int, len(cells))
	for i := range order {
		order[i] = i
	}
	long := func(i int) int {
		if a := cells[i].algorithm; a == placement.CrossEntropy || a == placement.CrossEntropyPrinted {
			return 0
		}
		return 1
	}
	for begin := 0; begin < len(order); {
		end := begin
		for end < len(order) && cells[end].seed == cells[begin].seed {
			end++
		}
		slices.SortStableFunc(order[begin:end], func(a, b int) int { return long(a) - long(b) })
		begin = end
	}
	return order
}

// mergeSeeds combines the comparisons of all seeds into one per method. cells are ordered by seed.
func mergeSeeds(scored [][]Comparison, seeds int) []Comparison {
	var results []Comparison
	share := 1 / float64(seeds)
	for _, one := range slices.Concat(scored...) {
		at := slices.IndexFunc(results, one.sameMethod)
		if at < 0 {
			at = len(results)
			results = append(results, Comparison{
				Attention: one.Attention, Ranks: one.Ranks, Algorithm: one.Algorithm, RedundantSlots: one.RedundantSlots, SlotsPerRank: one.SlotsPerRank,
				Forecast: one.Forecast, Dispatch: one.Dispatch, Part: one.Part,
			})
		}
		x := &results[at]
		x.LAR.add(one.LAR.Mean)
		x.TokenImbalance += share * one.TokenImbalance
		x.WindowImbalance += share * one.WindowImbalance
		x.BatchImbalance += share * one.BatchImbalance
		x.ExpertImbalance += share * one.ExpertImbalance
		x.ExpertWindowImbalance += share * one.ExpertWindowImbalance
		x.RemoteRanksPerToken += share * one.RemoteRanksPerToken
		x.PlacementSeconds += share * one.PlacementSeconds
	}
	return results
}

// sameMethod reports whether two comparisons differ only in the seed.
func (c *Comparison) sameMethod(x Comparison) bool {
	return x.Attention == c.Attention && x.Ranks == c.Ranks && x.Algorithm == c.Algorithm && x.RedundantSlots == c.RedundantSlots &&
		x.Forecast == c.Forecast && x.Dispatch == c.Dispatch
}

// profiles are the counts shared by the cells of a seed and an attention mode. They are computed when the first such
// cell starts, and dropped after the last one.
type profiles struct {
	trace   *trace.Trace
	options *CompareOptions
	shared  map[profileKey]*profile
}

type profileKey struct {
	seed      uint64
	attention placement.Attention
}

type profile struct {
	lock  sync.Mutex
	cells int
	study *study
}

func newProfiles(t *trace.Trace, o *CompareOptions, cells []cell) *profiles {
	p := &profiles{t, o, map[profileKey]*profile{}}
	for _, c := range cells {
		key := profileKey{c.seed, c.attention}
		if p.shared[key] == nil {
			p.shared[key] = &profile{}
		}
		p.shared[key].cells++
	}
	return p
}

// of returns the study of a cell, with the shared counts.
func (p *profiles) of(ctx context.Context, c cell) (*study, error) {
	shared := p.shared[profileKey{c.seed, c.attention}]
	shared.lock.Lock()
	defer shared.lock.Unlock()
	if shared.study == nil {
		s, err := p.count(ctx, c)
		if err != nil {
			return nil, err
		}
		shared.study = s
	}
	options := shared.study.options
	options.Ranks, options.RedundantSlots, options.Algorithm = c.ranks, c.redundant, c.algorithm
	return shared.study.with(options), nil
}

func (p *profiles) release(c cell) {
	shared := p.shared[profileKey{c.seed, c.attention}]
	shared.lock.Lock()
	defer shared.lock.Unlock()
	if shared.cells--; shared.cells == 0 {
		shared.study = nil
	}
}

// count splits the trace and computes the counts that the compared algorithms need.
func (p *profiles) count(ctx context.Context, c cell) (*study, error) {
	train, test, err := trace.Split(p.trace, p.options.TrainPercent, c.seed)
	if err != nil {
		return nil, err
	}
	s := newStudy(p.trace, solver.StepsOn(p.trace, solver.Options{
		Attention: c.attention, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: p.options.TrainPercent, Seed: c.seed,
	}, train, test))
	if err := s.steps.Count(ctx); err != nil {
		return nil, err
	}
	return s, s.steps.CountRelations(ctx)
}
