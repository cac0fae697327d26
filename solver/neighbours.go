// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
)

// NeighbourTrial compares, on held-out requests, the tables of one placement with and without neighbours: tables that
// score a token that the profile lacks like its nearest neighbours by embedding, and tables that score it like the mean
// of all tokens.
type NeighbourTrial struct {
	// Used is whether the tables of the plan have neighbours.
	Used bool `json:"used"`
	// Truncated is set if the time budget ended the search for neighbours. The tables then have none.
	Truncated bool `json:"truncated,omitempty"`
	// Tokens is the number of token IDs that the profile lacks and that have neighbours.
	Tokens int `json:"tokens"`
	// LAR and LayerUS are the local activation rate and the modelled time of a layer in microseconds with neighbours,
	// LARWithout and LayerUSWithout those without. Times are 0 if the profile lacks the sizes of the model.
	LAR            float64 `json:"lar"`
	LARWithout     float64 `json:"lar_without"`
	LayerUS        float64 `json:"layer_us"`
	LayerUSWithout float64 `json:"layer_us_without"`
}

// used reports whether the tables have neighbours.
func (n *NeighbourTrial) used() bool { return n != nil && n.Used }

// truncated reports whether the time budget ended the search for neighbours.
func (n *NeighbourTrial) truncated() bool { return n != nil && n.Truncated }

// Text returns one clause with the result.
func (n *NeighbourTrial) Text() string {
	switch {
	case n.Truncated:
		return "no nearest neighbours for token IDs that the profile lacks: the time budget ended their search"
	case n.Tokens == 0:
		return "the profile has every token ID that has neighbours"
	case n.LARWithout == 0 && n.Used: // counts have no rates
		return fmt.Sprintf("nearest neighbours for the %d token IDs that the profile lacks", n.Tokens)
	case n.LARWithout == 0:
		return fmt.Sprintf("no nearest neighbours for the %d token IDs that the profile lacks: the tables predict held-out counts less accurately with them", n.Tokens)
	}
	rates := fmt.Sprintf("local activation rate %.2f%% with nearest neighbours for the %d token IDs that the profile lacks, %.2f%% without", 100*n.LAR, n.Tokens, 100*n.LARWithout)
	if n.Used {
		return rates
	}
	return rates + fmt.Sprintf(" (modelled layer time %.2f and %.2f µs): they are not used", n.LayerUS, n.LayerUSWithout)
}

// judge decides whether the tables have neighbours. Neither the local activation rate nor the modelled time may become
// worse.
func (n *NeighbourTrial) judge() {
	n.Used = n.LAR >= n.LARWithout && !(n.LayerUS > n.LayerUSWithout)
}

// seeksNeighbours reports whether the scores of unseen tokens matter: without token shuffle no table is read.
func (o *Options) seeksNeighbours() bool { return o.Embeddings != nil && !o.Unshuffled }

// neighboursShare is the number of equal parts of a time budget of which a search for neighbours may take one. A re-plan
// from counts searches twice.
const neighboursShare = 3

// nearest returns the nearest neighbours of the tokens that the counts lack, or nil if the search takes more than its
// share of the time budget. It compares all pairs of tokens, which takes minutes for long vectors and large
// vocabularies.
func (o *Options) nearest(ctx context.Context, counted []affinity.Counts, progress func(done, total int)) (*affinity.Neighbours, error) {
	within := ctx
	if o.TimeBudget > 0 {
		var cancel context.CancelFunc
		within, cancel = context.WithTimeout(ctx, o.TimeBudget/neighboursShare)
		defer cancel()
	}
	found, err := affinity.NearestSeen(within, o.Embeddings, counted[0].Occurrences, progress)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return nil, nil
	}
	return found, err
}

// spend subtracts the time since begin from the time budget, which stays positive: 0 means no limit.
func (o *Options) spend(begin time.Time) {
	if o.TimeBudget > 0 {
		o.TimeBudget = max(o.TimeBudget-time.Since(begin), 1)
	}
}

// tryNeighbours decides whether the tables of a placement have neighbours, and keeps the neighbours if so. It scores
// both tables with the forecast Table, which every forecast of unseen tokens is based on.
func (s *search) tryNeighbours(ctx context.Context, solution *Solution, p *placement.Placement, by placement.Algorithm) error {
	switch {
	case !s.options.seeksNeighbours():
		return nil
	case s.nearest == nil:
		solution.Neighbours, solution.Truncated = &NeighbourTrial{Truncated: true}, true
		return nil
	}
	part := *s
	part.options.Forecast = Table
	candidate := []timedCandidate{{placement: p, algorithm: by}}
	without, err := part.modelled(ctx, candidate)
	if err != nil {
		return err
	}
	part.neighbours = s.nearest
	with, err := part.modelled(ctx, candidate)
	if err != nil {
		return err
	}
	s.unused = part.unused
	n := &NeighbourTrial{Tokens: s.nearest.Tokens(), LAR: with[0].lar, LARWithout: without[0].lar, LayerUS: with[0].mean, LayerUSWithout: without[0].mean}
	if n.judge(); n.Used {
		s.neighbours = s.nearest
	}
	solution.Neighbours = n
	return nil
}
