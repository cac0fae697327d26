// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"fmt"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
)

// NeighbourTrial compares, on held-out requests, the tables of one placement with and without neighbours: tables that
// score a token that the profile lacks like its nearest neighbours by embedding, and tables that score it like the mean
// of all tokens.
type NeighbourTrial struct {
	// Used is whether the tables of the plan have neighbours.
	Used bool `json:"used"`
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

// Text returns one clause with the result.
func (n *NeighbourTrial) Text() string {
	switch {
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

// nearest returns the nearest neighbours of the tokens that the counts lack.
func (o *Options) nearest(ctx context.Context, counted []affinity.Counts, progress func(done, total int)) (*affinity.Neighbours, error) {
	return affinity.NearestSeen(ctx, o.Embeddings, counted[0].Occurrences, progress)
}

// tryNeighbours decides whether the tables of a placement have neighbours, and keeps the neighbours if so. It scores
// both tables with the forecast Table, which every forecast of unseen tokens is based on.
func (s *search) tryNeighbours(ctx context.Context, p *placement.Placement, by placement.Algorithm) (*NeighbourTrial, error) {
	if !s.options.seeksNeighbours() {
		return nil, nil
	}
	found, err := s.options.nearest(ctx, s.tokens, s.progress("Neighbours"))
	if err != nil {
		return nil, err
	}
	part := *s
	part.options.Forecast = Table
	candidate := []timedCandidate{{placement: p, algorithm: by}}
	without, err := part.modelled(ctx, candidate)
	if err != nil {
		return nil, err
	}
	part.neighbours = found
	with, err := part.modelled(ctx, candidate)
	if err != nil {
		return nil, err
	}
	s.unused = part.unused
	n := &NeighbourTrial{Tokens: found.Tokens(), LAR: with[0].lar, LARWithout: without[0].lar, LayerUS: with[0].mean, LayerUSWithout: without[0].mean}
	if n.judge(); n.Used {
		s.neighbours = found
	}
	return n, nil
}
