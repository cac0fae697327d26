// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// validationPercent is the percentage of train requests to train on when a solved placement is validated. The
	// others score it.
	validationPercent = 75
	// minRelativeGain is the minimum relative gain over the default placement. minSigma is the minimum gain in
	// standard deviations, assuming independent activations: a small profile is weak evidence.
	minRelativeGain = 0.02
	minSigma        = 2
	// minSpreadRequests is the number of requests from which their spread counts with attention DP, by one standard
	// error. With fewer, the test would reject real gains of recorded routing: a placement from three quarters of a
	// small profile gains a tenth, one from the whole profile three quarters. A placement that passes by chance loses
	// nothing.
	minSpreadRequests = 32
)

// validate solves and scores a placement within the train requests, so that the choice is independent of the test
// requests. It returns the reason to prefer the default placement, or an empty string. truncated means that the time
// budget was exhausted before a result. Both placements are scored with the token table, which is cheap. Only if the
// token table shows no gain are they scored with the requested forecast, which may distinguish tokens that the table
// cannot.
func (s *search) validate(ctx context.Context, deadline time.Time) (preferred string, truncated bool, err error) {
	part := &search{trace: s.trace.Subset(s.train), options: s.options, groups: s.groups}
	part.options.Embeddings, part.options.Progress = nil, nil
	if part.train, part.test, err = trace.Split(part.trace, validationPercent, s.options.Seed); err != nil {
		return "no gain expected: the profile has only one document, so no placement can be validated", false, nil
	}
	if err := part.count(ctx); err != nil {
		return "", false, err
	}
	solved, err := part.place(ctx, placement.Auto, deadline)
	if err != nil || solved.Truncated {
		return "", solved.Truncated, err
	}
	plain, err := part.place(ctx, placement.ContiguousAlgorithm, time.Time{})
	if err != nil {
		return "", false, err
	}
	preferred, err = part.prefer(ctx, Table, solved.Placement, plain.Placement)
	if err == nil && preferred != "" && s.options.Forecast != Table {
		preferred, err = part.prefer(ctx, s.options.Forecast, solved.Placement, plain.Placement)
	}
	return preferred, false, err
}

// prefer returns the reason to prefer the plain placement to the solved one with a forecast, or an empty string.
func (s *search) prefer(ctx context.Context, by Forecast, solved, plain *placement.Placement) (string, error) {
	s.options.Forecast = by
	with, err := s.score(ctx, solved, placement.Auto)
	if err != nil {
		return "", err
	}
	without, err := s.score(ctx, plain, placement.ContiguousAlgorithm)
	if err != nil {
		return "", err
	}
	noise := s.noise(&with, &without)
	if s.options.exceedsChance(with.Rates(), without.Rates(), noise) {
		return "", nil
	}
	what, of := s.options.objectiveRate(with.Rates())
	_, ofPlain := s.options.objectiveRate(without.Rates())
	return fmt.Sprintf("no gain expected: on held-out documents of the profile the solved placement has %s %.3f, the default one %.3f; chance explains differences of up to %.3f", what, of, ofPlain, noise), nil
}

// exceedsChance reports whether the solved placement improves the objective by more than the minimum gain plus chance.
func (o *Options) exceedsChance(solved, plain cost.Rates, noise float64) bool {
	_, of := o.objectiveRate(solved)
	_, ofPlain := o.objectiveRate(plain)
	if o.messages().None() {
		return of >= ofPlain*(1+minRelativeGain)+noise
	}
	return of <= ofPlain*(1-minRelativeGain)-noise
}

// noise returns the gain that chance can explain. With attention DP a request has one rank: its activations are local
// together, so the gain varies between requests.
func (s *search) noise(solved, plain *cost.Report) float64 {
	minimum := minSigma * s.activationNoise(plain)
	if s.options.Attention == placement.DataParallel && len(s.test) >= minSpreadRequests {
		minimum = max(minimum, s.requestNoise(solved, plain))
	}
	return minimum
}

// activationNoise returns the standard deviation of the gain for independent activations.
func (s *search) activationNoise(plain *cost.Report) float64 {
	_, ofPlain := s.options.objectiveRate(plain.Rates())
	rows := float64(s.trace.TokenCount(s.test) * len(s.trace.Model.Layers))
	if m := s.options.messages(); !m.None() {
		// The messages of a token vary less than the same number of independent messages of the same cost.
		return math.Sqrt(2 * ofPlain * max(float64(m.Rank), float64(m.Node)) / rows)
	}
	return math.Sqrt(2 * ofPlain * (1 - ofPlain) / (rows * float64(s.trace.Model.TopK)))
}

// requestNoise returns the standard error of the gain's mean over requests, weighted by tokens.
func (s *search) requestNoise(solved, plain *cost.Report) float64 {
	_, of := s.options.objectiveRate(solved.Rates())
	_, ofPlain := s.options.objectiveRate(plain.Rates())
	squares := 0.0
	for i, request := range s.test {
		_, mine := s.options.objectiveRate(solved.ByRequest[i])
		_, minePlain := s.options.objectiveRate(plain.ByRequest[i])
		deviation := float64(s.trace.Length(request)) * (mine - minePlain - (of - ofPlain))
		squares += deviation * deviation
	}
	n := float64(len(s.test))
	return math.Sqrt(squares*n/(n-1)) / float64(s.trace.TokenCount(s.test))
}

// objectiveRate returns the name and value of the rate that the objective optimizes.
func (o *Options) objectiveRate(r cost.Rates) (string, float64) {
	switch o.objective() {
	case placement.RankDedup:
		return "remote ranks per token", r.RemoteRanksPerToken
	case placement.NodeDedup:
		return "remote nodes per token", r.RemoteNodesPerToken
	case placement.Hierarchical:
		return "weighted messages per token", r.RemoteRanksPerToken + cost.NodeMessage(o.profile())*r.RemoteNodesPerToken
	default:
		return "local activation rate", r.LAR
	}
}

// score returns the report of an algorithm's placement on the test requests.
func (s *search) score(ctx context.Context, p *placement.Placement, by placement.Algorithm) (cost.Report, error) {
	plan, err := s.plan(ctx, p, by)
	if err != nil {
		return cost.Report{}, err
	}
	o := s.evaluation()
	o.ByRequest = true
	return s.evaluate(ctx, plan, o)
}
