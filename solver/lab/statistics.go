// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/lab/statistics"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// StatisticsOptions are the inputs of Describe in addition to the trace.
type StatisticsOptions struct {
	// Ranks is the EP size. It applies to the routes between ranks, and to the partners of experts.
	Ranks int
	// Transfer is the attention mode of the transfer between domains; empty omits it.
	Transfer placement.Attention
	// TrainPercent is the percentage of requests to train on, split by whole documents.
	TrainPercent int
	// Seed makes split and placement reproducible.
	Seed uint64
	// Progress, if set, receives each step's name and progress. It is called from several goroutines.
	Progress func(step string, done, total int)
}

// Statistics are the statistics of a trace.
type Statistics struct {
	Ranks int `json:"ep_size"`
	// TrainTokens and TestTokens are the numbers of tokens in the two parts of the split. SeenTokens is the part of the
	// test tokens that occurs in the train part.
	TrainTokens int             `json:"train_tokens"`
	TestTokens  int             `json:"test_tokens"`
	SeenTokens  statistics.Seen `json:"seen_tokens"`
	// Layers has an entry for each MoE layer. Mean contains the means over the layers that have a value.
	Layers []LayerStatistics `json:"layers"`
	Mean   LayerStatistics   `json:"mean"`
	// Transfer is nil if it was omitted, or if the trace has no domains.
	Transfer *Transfer `json:"transfer,omitempty"`
}

// LayerStatistics are the statistics of a MoE layer. Routes use our placement for attention TP, solved on the train
// requests.
type LayerStatistics struct {
	// Layer is the model's layer index, or -1 in a mean.
	Layer         int                      `json:"layer"`
	StaticTopK    statistics.Prediction    `json:"static_top_k"`
	Concentration statistics.Concentration `json:"concentration"`
	Coactivation  statistics.Partners      `json:"coactivation"`
	// Transition is nil in the last layer.
	Transition *statistics.Partners `json:"transition,omitempty"`
	// TokenRoute predicts a token's rank from its ID, LookBack from its ranks in the previous 1, 2, … layers. LookBack
	// has one entry for each number of previous layers, at most 5.
	TokenRoute statistics.Guess   `json:"token_route"`
	LookBack   []statistics.Guess `json:"look_back"`
}

// Transfer contains the local activation rates of plans that are solved on one domain and serve another.
type Transfer struct {
	Attention placement.Attention `json:"attention"`
	Domains   []string            `json:"domains"`
	// LAR is [train domain][served domain]; nil if one part of the split has no request of the domain.
	LAR [][]*float64 `json:"lar"`
}

// maxLookBack is the maximum number of previous layers used for a prediction.
const maxLookBack = 5

// Describe computes the statistics of a trace. Errors about the trace are *trace.InvalidError.
func Describe(ctx context.Context, t *trace.Trace, o StatisticsOptions) (*Statistics, error) {
	if err := placement.CheckRanks(o.Ranks, t.Model.Experts); err != nil {
		return nil, err
	}
	train, test, err := trace.Split(t, o.TrainPercent, o.Seed)
	if err != nil {
		return nil, err
	}
	s := newStudy(t, solver.StepsOn(t, solver.Options{
		Ranks: o.Ranks, Attention: placement.TensorParallel, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: o.TrainPercent, Seed: o.Seed,
		Progress: o.Progress,
	}, train, test))
	if err := s.steps.Count(ctx); err != nil {
		return nil, err
	}
	result, err := s.steps.Place(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.steps.CountRelations(ctx); err != nil {
		return nil, err
	}
	out := &Statistics{
		Ranks: o.Ranks, TrainTokens: t.TokenCount(s.train), TestTokens: t.TokenCount(s.test),
		SeenTokens: statistics.SeenTokens(t, s.test, &s.steps.Tokens()[0]), Layers: make([]LayerStatistics, len(t.Model.Layers)),
	}
	hosts := make([]affinity.Hosts, len(t.Model.Layers))
	for l := range hosts {
		hosts[l] = result.Placement.Hosts(l)
	}
	routes := affinity.Routes(t, hosts, o.Ranks)
	if err := affinity.Parallel(ctx, len(out.Layers), func(l int) { out.Layers[l] = s.describeLayer(l, routes) }); err != nil {
		return nil, err
	}
	out.Mean = meanOf(out.Layers)
	if o.Transfer != "" && t.Domains != nil {
		out.Transfer, err = s.transfer(ctx, o.Transfer)
	}
	return out, err
}

func (s *study) describeLayer(l int, routes [][]uint16) LayerStatistics {
	experts, ranks := s.trace.Model.Experts, s.options.Ranks
	counts := &s.steps.Tokens()[l]
	pairs, transitions := s.steps.Relations()
	d := LayerStatistics{
		Layer:         s.trace.Model.Layers[l],
		StaticTopK:    statistics.StaticTopK(s.trace, s.test, l, counts),
		Concentration: statistics.Concentrations(counts),
		Coactivation:  statistics.Coactivation(pairs[l].Together, experts, experts/ranks),
		TokenRoute:    statistics.ByToken(s.trace, s.train, s.test, routes[l], ranks),
	}
	if l < len(transitions) {
		p := statistics.Transition(transitions[l], experts, experts/ranks)
		d.Transition = &p
	}
	for n := 1; n <= min(l, maxLookBack); n++ {
		d.LookBack = append(d.LookBack, statistics.LookBack(s.trace, s.train, s.test, routes, l, n, ranks))
	}
	return d
}

// meanOf returns the means over the layers that have a value.
func meanOf(layers []LayerStatistics) LayerStatistics {
	m := LayerStatistics{Layer: -1}
	n := float64(len(layers))
	var transition statistics.Partners
	for _, d := range layers {
		accumulate(d.StaticTopK.Figures(), m.StaticTopK.Figures(), n)
		accumulate(d.Concentration.Figures(), m.Concentration.Figures(), n)
		accumulate(d.Coactivation.Figures(), m.Coactivation.Figures(), n)
		accumulate(d.TokenRoute.Figures(), m.TokenRoute.Figures(), n)
		if d.Transition != nil {
			accumulate(d.Transition.Figures(), transition.Figures(), n-1)
			m.Transition = &transition
		}
		for i, guess := range d.LookBack {
			if i == len(m.LookBack) {
				m.LookBack = append(m.LookBack, statistics.Guess{})
			}
			// The first i+1 layers have fewer than i+1 previous layers.
			accumulate(guess.Figures(), m.LookBack[i].Figures(), n-float64(i+1))
		}
	}
	return m
}

func accumulate(from, sum []*float64, n float64) {
	for i, figure := range from {
		*sum[i] += *figure / n
	}
}

// transfer solves a plan on the train requests of each domain and scores it on the test requests of each.
func (s *study) transfer(ctx context.Context, attention placement.Attention) (*Transfer, error) {
	names := s.trace.Model.Domains
	if len(names) == 0 {
		for domain := range int(slices.Max(s.trace.Domains)) + 1 {
			names = append(names, fmt.Sprintf("domain %d", domain))
		}
	}
	out := &Transfer{Attention: attention, Domains: names, LAR: make([][]*float64, len(names))}
	train, test := s.byDomain(s.train, len(names)), s.byDomain(s.test, len(names))
	for a := range names {
		out.LAR[a] = make([]*float64, len(names))
		if s.options.Progress != nil {
			s.options.Progress("Transfer", a, len(names))
		}
		if len(train[a]) == 0 {
			continue
		}
		options := s.options
		options.Attention, options.Progress = attention, nil
		part := solver.StepsOn(s.trace, options, train[a], nil)
		if err := part.Count(ctx); err != nil {
			return nil, err
		}
		result, err := part.Place(ctx)
		if err != nil {
			return nil, err
		}
		plan, err := part.Plan(ctx, result.Placement)
		if err != nil {
			return nil, err
		}
		for b := range names {
			evaluation := part.Evaluation()
			if evaluation.Requests = test[b]; len(test[b]) == 0 {
				continue
			}
			report, err := solver.Evaluate(ctx, s.trace, plan, evaluation)
			if err != nil {
				return nil, err
			}
			out.LAR[a][b] = &report.LAR
		}
	}
	return out, nil
}

// byDomain groups requests by domain.
func (s *study) byDomain(requests []int, domains int) [][]int {
	parts := make([][]int, domains)
	for _, r := range requests {
		parts[s.trace.Domains[r]] = append(parts[s.trace.Domains[r]], r)
	}
	return parts
}
