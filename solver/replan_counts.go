// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// CountedProfile contains counts of tokens and experts, as routers keep them. It does not contain their requests.
type CountedProfile struct {
	// Layers are the counts of each MoE layer.
	Layers []affinity.Counts
	// Digest is the SHA-256 digest of the source file. Plans record it as the digest of their trace.
	Digest [sha256.Size]byte
	// Groups is the number of expert groups among which the gate chooses first; 0 or 1 means no groups. They are kept
	// together if ReplanOptions.PreserveGroups is set.
	Groups int
}

const (
	// minRecentTokens is the minimum number of counted tokens for a new plan.
	minRecentTokens = 2000
	// countedChunks is the number of chunks into which a rank's fair share is divided when counts are scored. A
	// frequent token ID then has several ranks, as in service.
	countedChunks = 8
	// countedTolerance is the relative excess over its share of tokens that a rank may have there.
	countedTolerance = 0.02
	// minErrorGain is the minimum relative reduction of the forecast error for choosing new tables with attention DP.
	minErrorGain = 0.01
)

// ReplanCounts is Replan from counts only. Tokens are assigned to the two parts of the split independently, because
// counts contain no documents. Repetition within a document is then visible in both parts, so scores are higher than in
// service, especially for new plans. After scoring, the held-out counts are added to the training data. With attention
// TP, tables and placement are scored by sending each token ID, in chunks, to balanced ranks.
//
// With attention DP a request has one rank, and counts do not contain the tokens of a request. Therefore only new
// tables are considered, without a score: they are chosen if they forecast the held-out counts better than the tables
// in service, and Layout has no plan. Layout also has no plan with message objectives, which require the experts of
// single tokens. Forecasts from more than the token ID need sequences, and are rejected.
func ReplanCounts(ctx context.Context, recent CountedProfile, prior []affinity.Counts, current *Plan, o ReplanOptions) (*Replanned, error) {
	if o.PriorPercent == 0 {
		prior = nil
	}
	r, err := newCountsReplan(ctx, recent, prior, current, o)
	if err != nil {
		return nil, err
	}
	if err := r.blend(ctx, prior, float64(o.PriorPercent)); err != nil {
		return nil, err
	}
	out := &Replanned{Trust: r.trust, Current: r.candidate(current)}
	if r.options.seeksNeighbours() {
		if err := r.findNearest(ctx); err != nil {
			return nil, err
		}
	}
	out.Tables = r.solved(current.Placement, reusedPlacementRanks)
	if current.Attention == placement.DataParallel {
		out.Decision = r.chooseTables(current, out.Tables.Plan)
		return out, r.trainOnAll(ctx, out, recent.Layers, prior)
	}
	layout := out.Current.Score
	if current.messages().None() {
		solved, err := r.place(ctx)
		if err != nil {
			return nil, err
		}
		out.Layout = r.solved(solved.Placement, bestRanks)
		out.Unmet, out.Truncated, layout = solved.Unmet, solved.Truncated, out.Layout.Score
	}
	out.Decision = o.Choose(out.Current.Score, out.Tables.Score, layout, localTime(r.layer, o.ReplanPolicy.BatchTokens))
	return out, r.trainOnAll(ctx, out, recent.Layers, prior)
}

// trainOnAll adds the held-out counts to the training data of the candidates' tables after scoring. Scores remain those
// of the tables without these counts.
func (r *countsReplan) trainOnAll(ctx context.Context, out *Replanned, recent, prior []affinity.Counts) (err error) {
	if r.learnt = recent; prior != nil {
		if r.learnt, err = affinity.BlendLayers(recent, prior, r.trust); err != nil {
			return err
		}
	}
	if out.Tables.Neighbours.used() || out.Layout.Neighbours.used() {
		if err := r.findNearest(ctx); err != nil {
			return err
		}
	}
	for candidate, best := range map[*Candidate]int{&out.Tables: reusedPlacementRanks, &out.Layout: bestRanks} {
		if candidate.Plan == nil {
			continue
		}
		var near *affinity.Neighbours
		if candidate.Neighbours.used() {
			if near = r.nearest; near == nil {
				candidate.Neighbours = &NeighbourTrial{Truncated: true}
			}
		}
		r.train(candidate.Plan, best, near)
		out.Truncated = out.Truncated || candidate.Neighbours.truncated()
	}
	return nil
}

// findNearest finds the neighbours of the tokens that the training counts lack.
func (r *countsReplan) findNearest(ctx context.Context) (err error) {
	begin := time.Now()
	r.nearest, err = r.options.nearest(ctx, r.learnt, nil)
	r.options.spend(begin)
	return err
}

// solved returns the plan of a placement with new tables. They have neighbours of unseen tokens if they are not worse
// with them: by score or, with attention DP, by their distance to the held-out counts.
func (r *countsReplan) solved(p *placement.Placement, best int) Candidate {
	plan := r.plan(p)
	r.train(plan, best, nil)
	without, counted := r.candidate(plan), plan.Attention == placement.DataParallel
	if !r.options.seeksNeighbours() {
		return without
	}
	if r.nearest == nil {
		without.Neighbours = &NeighbourTrial{Truncated: true}
		return without
	}
	distance := 0.0
	if counted {
		distance = r.tableError(plan)
	}
	r.train(plan, best, r.nearest)
	chosen := betterOf(r.candidate(plan), without, r.nearest)
	if counted && r.tableError(plan) > distance {
		chosen.Neighbours.Used = false
	}
	if !chosen.Neighbours.Used {
		r.train(plan, best, nil)
	}
	return chosen
}

// countsReplan is the state of one ReplanCounts.
type countsReplan struct {
	options ReplanOptions
	current *Plan
	digest  [sha256.Size]byte
	layer   cost.Layer
	groups  int
	trust   affinity.Trust
	// nearest are the neighbours of tokens that learnt lacks; nil without embeddings, or if the time budget ended their
	// search.
	nearest *affinity.Neighbours
	// learnt are the recent counts to train on, which blend merges with the prior. heldOut are the counts that score
	// the plans. placing are the counts from which the placement is solved.
	learnt, heldOut, placing []affinity.Counts
}

func newCountsReplan(ctx context.Context, recent CountedProfile, prior []affinity.Counts, current *Plan, o ReplanOptions) (*countsReplan, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	p := current.Placement
	switch {
	case o.TrainPercent < 1 || o.TrainPercent > 99:
		return nil, fmt.Errorf("train percent is %d; allowed is 1 to 99", o.TrainPercent)
	case o.Embeddings != nil && o.Embeddings.Tokens != current.Vocabulary:
		return nil, fmt.Errorf("embeddings are of %d tokens; the vocabulary of the plan in service is %d", o.Embeddings.Tokens, current.Vocabulary)
	case current.Forecast != Table || o.forecastAfter(current) != Table:
		return nil, fmt.Errorf("the plan in service has forecast %s, the new plan %s; counts do not contain the order of tokens; use a trace", current.Forecast, o.forecastAfter(current))
	}
	for name, layers := range map[string][]affinity.Counts{"recent": recent.Layers, "prior": prior} {
		if layers != nil && (len(layers) != len(p.Layers) || layers[0].Experts != p.Experts || layers[0].Vocabulary() != current.Vocabulary) {
			return nil, fmt.Errorf("the %s counts do not match the plan's model: %d experts in %d MoE layers, vocabulary %d", name, p.Experts, len(p.Layers), current.Vocabulary)
		}
	}
	if len(recent.Layers) == 0 || recent.Layers[0].Tokens() < minRecentTokens {
		return nil, fmt.Errorf("%w: at least %d counted tokens are needed", ErrTooFewRequests, minRecentTokens)
	}
	groups := 1
	if o.PreserveGroups {
		groups = max(recent.Groups, 1)
	}
	machines := o.machines(p.Ranks, cmp.Or(current.RanksPerNode, o.ranksPerNode()))
	model := trace.Model{TopK: recent.Layers[0].TopK, HiddenSize: current.Shape.HiddenSize}
	r := &countsReplan{
		options: o, current: current, digest: recent.Digest, groups: groups, layer: cost.LayerOf(&model, machines, p.Ranks, p.SlotsPerRank),
	}
	var err error
	r.learnt, r.heldOut, err = affinity.PartLayers(ctx, recent.Layers, o.TrainPercent, o.Seed)
	return r, err
}

// blend merges the training counts with the prior.
func (r *countsReplan) blend(ctx context.Context, prior []affinity.Counts, percent float64) error {
	r.placing = r.learnt
	if prior == nil {
		return nil
	}
	first, second, err := affinity.PartLayers(ctx, r.learnt, 50, r.options.Seed+1)
	if err != nil {
		return err
	}
	if r.trust, err = affinity.FitTrust(ctx, first, second, prior); err != nil {
		return err
	}
	weight := affinity.Fade(r.learnt[0].Tokens(), prior[0].Tokens(), percent)
	if r.placing, err = affinity.MergeLayers(r.learnt, prior, 1, weight); err != nil {
		return err
	}
	r.learnt, err = affinity.BlendLayers(r.learnt, prior, r.trust)
	return err
}

// plan returns the plan of a placement without tables. Rank transition tables are kept with the placement.
func (r *countsReplan) plan(p *placement.Placement) *Plan {
	c := r.current
	plan := &Plan{
		Attention: c.Attention, Forecast: Table, Placement: p, HiddenLayers: c.HiddenLayers, Vocabulary: c.Vocabulary, Shape: c.Shape, Algorithm: placement.Auto,
		TrainPercent: r.options.TrainPercent, Seed: r.options.Seed, TraceDigest: r.digest, ModelDigest: c.ModelDigest,
		Objective: c.Objective, RanksPerNode: c.RanksPerNode, RankCapacity: c.RankCapacity, Hardware: r.options.storedProfile(),
	}
	if p == c.Placement {
		plan.Algorithm, plan.Transitions = c.Algorithm, c.Transitions
	}
	return plan
}

// train builds the tables of a plan, in the memory of its former ones, with neighbours of unseen tokens unless near is
// nil.
func (r *countsReplan) train(plan *Plan, best int, near *affinity.Neighbours) {
	ranks, estimator := plan.Placement.Ranks, affinity.Estimator{Shrinkage: shrinkage, Neighbours: near}
	if plan.Attention == placement.DataParallel {
		plan.Ranks = affinity.NewRankTable(r.learnt, plan.hosts(), ranks, estimator)
		plan.Ranks.Spread(plan.messages())
		return
	}
	plan.Tokens = cmp.Or(plan.Tokens, new(affinity.TokenTable)).Rebuild(r.learnt, plan.hosts(), ranks, best, estimator)
}

// place solves a placement (attention TP), as Replan does.
func (r *countsReplan) place(ctx context.Context) (placement.Result, error) {
	p, o := r.current.Placement, r.options
	constraints := o.Constraints
	constraints.RankCapacity = r.current.RankCapacity
	constraints.MigrationCost = o.MoveGainPercent / 100 * r.placing[0].Tokens() * float64(r.placing[0].TopK) / float64(p.Experts)
	problem := placement.Problem{
		Attention: placement.TensorParallel, Ranks: p.Ranks, Tokens: r.placing, Constraints: constraints, Algorithm: placement.Auto,
		RedundantSlots: p.SlotsPerRank - p.Experts/p.Ranks, Shrinkage: placement.DefaultShrinkage, Current: p, Fresh: true, Groups: r.groups, Seed: o.Seed,
	}
	for _, layer := range p.Layers {
		problem.Layers = append(problem.Layers, layer.Layer)
	}
	if budget := o.TimeBudget; budget > 0 {
		if r.nearest != nil {
			budget -= budget / neighboursShare // for the neighbours of trainOnAll
		}
		problem.Deadline = time.Now().Add(budget)
	}
	if o.Progress != nil {
		problem.Progress = func(done, total int) { o.Progress("Placement", done, total) }
	}
	return placement.Solve(ctx, problem)
}

// candidate scores a plan on the held-out counts. With attention DP there is no score.
func (r *countsReplan) candidate(p *Plan) Candidate {
	c := Candidate{Plan: p, Moves: placement.Moves(r.current.Placement, p.Placement)}
	if p.Attention == placement.DataParallel {
		return c
	}
	var sum countedScore
	hosts := p.hosts()
	for l := range r.heldOut {
		sum.add(scoreCounts(&r.heldOut[l], p, l, hosts[l]), 1/float64(len(r.heldOut)))
	}
	for _, tokens := range r.options.ReplanPolicy.BatchTokens {
		t := r.layer.Time(tokens, sum.exchange, sum.load)
		c.Score.Exchange += t.Exchange / float64(len(r.options.ReplanPolicy.BatchTokens))
		c.Score.Compute += t.Compute / float64(len(r.options.ReplanPolicy.BatchTokens))
	}
	c.Score.LAR, c.Score.TokenImbalance, c.Score.ExpertImbalance = sum.lar, sum.tokens, sum.load
	return c
}

// countedScore is the score of a plan on a layer's counts: the local activation rate, and the exchange, computation and
// tokens of the busiest rank, in fair shares.
type countedScore struct{ lar, exchange, load, tokens float64 }

func (s *countedScore) add(t countedScore, weight float64) {
	s.lar = min(1, s.lar+weight*t.lar) // rounding can exceed 1
	s.exchange += weight * t.exchange
	s.load += weight * t.load
	s.tokens += weight * t.tokens
}

// scoreCounts assigns the counted tokens of a layer to ranks by a plan's table, balanced like a batch.
func scoreCounts(c *affinity.Counts, p *Plan, layer int, hosts affinity.Hosts) countedScore {
	ranks := p.Placement.Ranks
	total := c.Tokens()
	w, owner := countedItems(c, p, layer, total)
	prices, _ := w.PriceExact(countedSteps, nil)
	bins := w.Assign(prices, countedTolerance)
	tokens, sent, received, served := make([]float64, ranks), make([]float64, ranks), make([]float64, ranks), make([]float64, ranks)
	local := 0.0
	for item, rank := range bins {
		token := owner[item]
		part := float64(w.Sizes[item]) / float64(c.Occurrences[token])
		tokens[rank] += float64(w.Sizes[item])
		experts, counts := c.Row(token)
		for i, e := range experts {
			n := part * float64(counts[i])
			if slices.Contains(hosts[e], rank) {
				local += n
				served[rank] += n
				continue
			}
			sent[rank] += n
			for _, to := range hosts[e] { // copies are used round-robin
				received[to] += n / float64(len(hosts[e]))
				served[to] += n / float64(len(hosts[e]))
			}
		}
	}
	activations := max(total*float64(c.TopK), 1)
	share := activations / float64(ranks)
	return countedScore{
		lar: local / activations, exchange: max(slices.Max(sent), slices.Max(received)) / share, load: slices.Max(served) / share,
		tokens: slices.Max(tokens) * float64(ranks) / max(total, 1),
	}
}

// countedSteps is the number of price updates that balance the tokens of a layer.
const countedSteps = 60

// countedItems returns the token IDs in chunks, with their scores on each rank. owner is the token ID of each chunk.
func countedItems(c *affinity.Counts, p *Plan, layer int, total float64) (w assign.Weighted, owner []int) {
	ranks := p.Placement.Ranks
	w.Limits = slices.Repeat([]float64{total / float64(ranks)}, ranks)
	if p.RankCapacity != nil {
		whole := 0.0
		for _, share := range p.RankCapacity {
			whole += share
		}
		for rank, share := range p.RankCapacity {
			w.Limits[rank] = total * share / whole
		}
	}
	most := max(float32(slices.Min(w.Limits))/countedChunks, 1)
	score := make([]float32, ranks)
	for token, n := range c.Occurrences {
		if n == 0 {
			continue
		}
		p.Tokens.ScoreToken(score, layer, int32(token))
		if m := p.messages(); !m.None() {
			m.Expect(score, c.TopK)
		}
		parts := int((n + most - 1) / most)
		size := n / float32(parts)
		for range parts {
			w.Sizes, owner = append(w.Sizes, size), append(owner, token)
			for _, s := range score {
				w.Scores = append(w.Scores, s*size)
			}
		}
	}
	return w, owner
}

// chooseTables chooses between the tables in service and new ones by their distance to the held-out counts (attention
// DP).
func (r *countsReplan) chooseTables(current, tables *Plan) Decision {
	before, after := r.tableError(current), r.tableError(tables)
	if before > 0 && after < before*(1-minErrorGain) {
		d := Decision{}
		d.take(TablesTier, "new tables predict current activations %.1f%% more accurately; counts do not show the gain in time", 100*(1-after/before))
		return d
	}
	return Decision{Tier: NoTier, Verdict: NoGainExpected, Reason: "new tables do not predict current activations more accurately than the tables in service"}
}

// tableError returns the mean square, over the held-out tokens, of the distance between a table's shares and the
// counted ones.
func (r *countsReplan) tableError(p *Plan) float64 {
	ranks, hosts := p.Placement.Ranks, p.hosts()
	truth := affinity.NewRankTable(r.heldOut, hosts, ranks, affinity.Estimator{})
	truth.Spread(p.messages())
	scored, counted := make([]float32, ranks), make([]float32, ranks)
	sum, total := 0.0, 0.0
	for token, n := range r.heldOut[0].Occurrences {
		if n == 0 {
			continue
		}
		p.Ranks.ScoreTokens(scored, []int32{int32(token)})
		truth.ScoreTokens(counted, []int32{int32(token)})
		for rank, share := range scored {
			d := float64(share - counted[rank])
			sum += float64(n) * d * d
		}
		total += float64(n)
	}
	return sum / max(total, 1)
}
