// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Steps runs the steps of Solve one by one. Studies use it to score many placements of one profile (solver/lab).
type Steps struct{ search *search }

// NewSteps validates the options against the trace and splits the trace, as Solve does.
func NewSteps(t *trace.Trace, o Options) (Steps, error) {
	s, err := newSearch(t, o)
	return Steps{s}, err
}

// StepsOn returns Steps for the parts of a split, without validation.
func StepsOn(t *trace.Trace, o Options, train, test []int) Steps {
	return Steps{&search{trace: t, groups: 1, options: o, train: train, test: test}}
}

// With returns Steps with other options and the same counts.
func (s Steps) With(o Options) Steps {
	other := *s.search
	other.options = o
	return Steps{&other}
}

// WithoutPairs returns Steps that place for the mean occurrence of a token.
func (s Steps) WithoutPairs() Steps {
	other := *s.search
	other.pairs = nil
	return Steps{&other}
}

// Options returns the options.
func (s Steps) Options() Options { return s.search.options }

// Split returns the train and the test requests.
func (s Steps) Split() (train, test []int) { return s.search.train, s.search.test }

// Count counts the activations of the train requests for the algorithm.
func (s Steps) Count(ctx context.Context) error { return s.search.count(ctx) }

// CountRelations counts the pairs and transitions of experts, which only some algorithms need.
func (s Steps) CountRelations(ctx context.Context) (err error) {
	if s.search.pairs, err = affinity.CountPairs(ctx, s.search.trace, s.search.train); err != nil {
		return err
	}
	s.search.transitions, err = affinity.CountTransitions(ctx, s.search.trace, s.search.train)
	return err
}

// Tokens returns the counts by token of each MoE layer.
func (s Steps) Tokens() []affinity.Counts { return s.search.tokens }

// Relations returns the results of CountRelations.
func (s Steps) Relations() (pairs []affinity.Pairs, transitions [][]float32) {
	return s.search.pairs, s.search.transitions
}

// Clustered returns the train requests, or a sample of them, of which whole requests are clustered.
func (s Steps) Clustered() []int { return s.search.counted }

// Place solves the placement without a time limit.
func (s Steps) Place(ctx context.Context) (placement.Result, error) {
	return s.search.place(ctx, s.search.options.Algorithm, time.Time{})
}

// Plan builds the tables of a placement.
func (s Steps) Plan(ctx context.Context, p *placement.Placement) (*Plan, error) {
	return s.search.plan(ctx, p, s.search.options.Algorithm)
}

// Evaluation returns options that score the test requests, without bounds.
func (s Steps) Evaluation() cost.Options { return s.search.evaluation() }
