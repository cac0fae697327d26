package solver

import (
	"context"
	"slices"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// CompareOptions are the inputs of Compare besides the trace.
type CompareOptions struct {
	// Attentions, Ranks (EP sizes) and Seeds of the split span the comparison.
	Attentions []placement.Attention
	Ranks      []int
	Seeds      []uint64
	// Algorithms are those that are compared.
	Algorithms []placement.Algorithm
	// Forecasts are those of Auto with attention TP; Baselines those that all other algorithms' placements are given.
	Forecasts, Baselines []Forecast
	// TrainPercent is that of the splits.
	TrainPercent int
	// Progress, where set, is told before each method what is about to be done.
	Progress func(step string, done, total int)
}

// Comparison is one method on one EP size: its scores on the held-out requests of every seed.
type Comparison struct {
	Attention placement.Attention `json:"attention"`
	Ranks     int                 `json:"ep_size"`
	Algorithm placement.Algorithm `json:"algorithm"`
	// Forecast is what the scores come from, Dispatch how tokens or requests are assigned by them.
	Forecast string `json:"forecast"`
	Dispatch string `json:"dispatch"`
	// LAR is the local activation rate; the other figures are means over the seeds.
	LAR                   Spread  `json:"lar"`
	OracleLAR             float64 `json:"oracle_lar,omitempty"`
	TokenImbalance        float64 `json:"token_imbalance"`
	WindowImbalance       float64 `json:"window_imbalance,omitempty"`
	BatchImbalance        float64 `json:"batch_imbalance,omitempty"`
	ExpertImbalance       float64 `json:"expert_imbalance"`
	ExpertWindowImbalance float64 `json:"expert_window_imbalance"`
	RemoteRanksPerToken   float64 `json:"remote_ranks_per_token"`
	// PlacementSeconds is what the placement took to solve, mean over seeds; the counts are not included.
	PlacementSeconds float64 `json:"placement_seconds"`
}

// Spread is a figure over several seeds.
type Spread struct {
	Mean  float64   `json:"mean"`
	Least float64   `json:"min"`
	Most  float64   `json:"max"`
	Seeds []float64 `json:"seeds"`
}

func (s *Spread) add(v float64) {
	s.Seeds = append(s.Seeds, v)
	s.Least, s.Most = slices.Min(s.Seeds), slices.Max(s.Seeds)
	sum := 0.0
	for _, x := range s.Seeds {
		sum += x
	}
	s.Mean = sum / float64(len(s.Seeds))
}

// Compare solves and scores every method on every EP size and seed. Every method sees the same train requests and is scored
// on the same test requests.
func Compare(ctx context.Context, t *trace.Trace, o CompareOptions) ([]Comparison, error) {
	c := &comparer{trace: t, options: o}
	for _, ranks := range o.Ranks {
		if err := placement.CheckRanks(ranks, t.Model.Experts); err != nil {
			return nil, err
		}
	}
	total := len(o.Seeds) * len(o.Attentions) * len(o.Ranks) * len(o.Algorithms)
	done := 0
	for _, seed := range o.Seeds {
		for _, attention := range o.Attentions {
			s, err := c.search(ctx, attention, seed)
			if err != nil {
				return nil, err
			}
			for _, s.options.Ranks = range o.Ranks {
				for _, s.options.Algorithm = range o.Algorithms {
					if o.Progress != nil {
						o.Progress(string(s.options.Algorithm), done, total)
					}
					if err := c.method(ctx, s); err != nil {
						return nil, err
					}
					done++
				}
			}
		}
	}
	return c.results, nil
}

type comparer struct {
	trace   *trace.Trace
	options CompareOptions
	results []Comparison
}

// search splits and counts for one seed: what all methods share.
func (c *comparer) search(ctx context.Context, attention placement.Attention, seed uint64) (*search, error) {
	s := &search{trace: c.trace, options: Options{Attention: attention, Seed: seed, TrainPercent: c.options.TrainPercent, Forecast: Table}}
	var err error
	if s.train, s.test, err = trace.Split(c.trace, c.options.TrainPercent, seed); err != nil {
		return nil, err
	}
	if err = s.count(ctx); err != nil {
		return nil, err
	}
	if s.pairs, err = affinity.CountPairs(ctx, c.trace, s.train); err != nil {
		return nil, err
	}
	s.transitions, err = affinity.CountTransitions(ctx, c.trace, s.train)
	return s, err
}

// method scores one algorithm in every way that its attention mode has.
func (c *comparer) method(ctx context.Context, s *search) error {
	if s.options.Attention == placement.DataParallel {
		return c.requests(ctx, s)
	}
	forecasts := c.options.Baselines
	if s.options.Algorithm == placement.Auto {
		forecasts = c.options.Forecasts
	}
	for _, forecast := range forecasts {
		part := *s
		part.options.Forecast = forecast
		if forecast == Table && s.options.Algorithm == placement.Auto {
			part.pairs = nil
		}
		begin := time.Now()
		result, err := part.place(ctx, s.options.Algorithm, time.Time{})
		if err != nil {
			return err
		}
		seconds := time.Since(begin).Seconds()
		plan, err := part.plan(ctx, result.Placement, s.options.Algorithm)
		if err != nil {
			return err
		}
		for _, shards := range []cost.ShardRule{cost.FreeShards, cost.EqualShards} {
			evaluation := part.evaluation()
			evaluation.Shards = shards
			report, err := Evaluate(ctx, c.trace, plan, evaluation)
			if err != nil {
				return err
			}
			c.add(s, string(forecast), string(shards), report, seconds)
		}
		if s.options.Algorithm == placement.ContiguousAlgorithm && forecast == Table {
			evaluation := part.evaluation()
			report, err := cost.TensorParallel(ctx, c.trace, plan.Placement, noForecast{}, evaluation)
			if err != nil {
				return err
			}
			c.add(s, "none", string(cost.EqualShards), report, seconds)
		}
	}
	return nil
}

// evaluation scores on the test requests, without bounds.
func (s *search) evaluation() cost.Options {
	o := DefaultEvaluation()
	o.Requests, o.Seed, o.WithoutBounds = s.test, s.options.Seed, true
	return o
}

// requests scores one algorithm's placement under the policies of attention DP.
func (c *comparer) requests(ctx context.Context, s *search) error {
	begin := time.Now()
	result, err := s.place(ctx, s.options.Algorithm, time.Time{})
	if err != nil {
		return err
	}
	seconds := time.Since(begin).Seconds()
	plan, err := s.plan(ctx, result.Placement, s.options.Algorithm)
	if err != nil {
		return err
	}
	score := func(name string, forecast cost.RequestForecast, policy dispatch.Policy) error {
		evaluation := s.evaluation()
		evaluation.Policy = policy
		report, err := cost.DataParallel(ctx, c.trace, plan.Placement, forecast, evaluation)
		if err == nil {
			c.add(s, name, string(policy), report, seconds)
		}
		return err
	}
	table := plan.Ranks.Forecast(c.trace)
	policies := []dispatch.Policy{dispatch.Price, dispatch.Masked, dispatch.RoundRobin}
	if s.options.Algorithm == placement.Auto {
		policies = []dispatch.Policy{dispatch.Price, dispatch.Masked, dispatch.Window, dispatch.LeastLoaded, dispatch.Prefix, dispatch.RoundRobin}
	}
	for _, policy := range policies {
		if err := score(string(Table), table, policy); err != nil {
			return err
		}
	}
	if s.options.Algorithm != placement.Auto {
		return nil
	}
	if c.trace.Domains != nil {
		if err := score("domain label", newDomainForecast(c.trace, s.train, plan), dispatch.Price); err != nil {
			return err
		}
	}
	return score("hash of the first tokens", hashForecast{c.trace}, dispatch.Price)
}

// add adds a seed's report to the method's comparison.
func (c *comparer) add(s *search, forecast, dispatched string, r cost.Report, seconds float64) {
	of := Comparison{Attention: s.options.Attention, Ranks: s.options.Ranks, Algorithm: s.options.Algorithm, Forecast: forecast, Dispatch: dispatched}
	at := slices.IndexFunc(c.results, func(x Comparison) bool {
		return x.Attention == of.Attention && x.Ranks == of.Ranks && x.Algorithm == of.Algorithm && x.Forecast == forecast && x.Dispatch == dispatched
	})
	if at < 0 {
		at = len(c.results)
		c.results = append(c.results, of)
	}
	x := &c.results[at]
	x.LAR.add(r.LAR)
	share := 1 / float64(len(c.options.Seeds))
	x.TokenImbalance += share * r.TokenImbalance
	x.ExpertImbalance += share * r.ExpertImbalance
	x.ExpertWindowImbalance += share * r.ExpertWindowImbalance
	x.RemoteRanksPerToken += share * r.RemoteRanksPerToken
	x.PlacementSeconds += share * seconds
	if r.WindowImbalance != nil {
		x.WindowImbalance += share * *r.WindowImbalance
	}
	if r.BatchImbalance != nil {
		x.BatchImbalance += share * *r.BatchImbalance
	}
}

// noForecast scores all ranks alike: tokens are dealt out.
type noForecast struct{}

func (noForecast) Score(dst []float32, _, _ int) { clear(dst) }

// domainForecast knows the kind of text of a request, and nothing else: the mean shares of the train requests of that kind.
type domainForecast struct {
	trace  *trace.Trace
	shares map[uint8][]float32
}

func newDomainForecast(t *trace.Trace, train []int, p *Plan) domainForecast {
	f := domainForecast{t, map[uint8][]float32{}}
	ranks := p.Placement.Ranks
	for l, hosts := range p.hosts() {
		for _, r := range train {
			shares := f.shares[t.Domains[r]]
			if shares == nil {
				shares = make([]float32, ranks)
				f.shares[t.Domains[r]] = shares
			}
			for position := int(t.Offsets[r]); position < int(t.Offsets[r+1]); position++ {
				for _, expert := range t.Row(position, l) {
					for _, rank := range hosts[expert] {
						shares[rank]++
					}
				}
			}
		}
	}
	for _, shares := range f.shares {
		total := float32(0)
		for _, n := range shares {
			total += n
		}
		for rank := range shares {
			shares[rank] /= total
		}
	}
	return f
}

func (f domainForecast) Score(dst []float32, request int) {
	clear(dst)
	copy(dst, f.shares[f.trace.Domains[request]])
}

// hashForecast sends requests that begin alike to the same rank.
type hashForecast struct{ trace *trace.Trace }

func (f hashForecast) Score(dst []float32, request int) {
	clear(dst)
	tokens := f.trace.Request(request)
	hashes := dispatch.PrefixHashes(nil, slices.Concat(tokens[:min(len(tokens), dispatch.PrefixBlock)], make([]int32, dispatch.PrefixBlock)))
	dst[hashes[0]%uint64(len(dst))] = 1
}
