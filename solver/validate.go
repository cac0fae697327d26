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
	// validationPercent of the train requests are learnt from when it is decided whether a solved placement is worth having;
	// the others judge.
	validationPercent = 75
	// leastGain is how much better than the default placement, in proportion, it must be there, and leastDeviations by how
	// many standard deviations of what chance makes of independent activations: a small profile proves little.
	leastGain       = 0.02
	leastDeviations = 2
	// leastJudges is the number of requests from which on their spread counts with attention DP, by one standard error. Of fewer it would refuse what
	// recorded routing gains: a placement from three quarters of a small profile gains a tenth where that from all of it gains three
	// quarters. One that passes by chance loses nothing.
	leastJudges = 32
)

// validate solves and judges a placement within the train requests alone, so that the test requests judge a plan that was
// not chosen by them. It says why the default placement is to be preferred, or nothing; truncated, the time budget was spent before it
// could tell. Both are scored with the token table, which is cheap; only where it sees no gain, with another forecast that was asked for:
// that may tell tokens apart which the table cannot.
func (s *search) validate(ctx context.Context, deadline time.Time) (preferred string, truncated bool, err error) {
	part := &search{trace: s.trace.Subset(s.train), options: s.options, groups: s.groups}
	part.options.Embeddings, part.options.Progress = nil, nil
	if part.train, part.test, err = trace.Split(part.trace, validationPercent, s.options.Seed); err != nil {
		return "no gain expected: the profile has one document, and nothing to judge a placement by", false, nil
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

// prefer says why the plain placement is to be preferred to the solved one when both are served by a forecast, or nothing.
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
	chance := s.chance(&with, &without)
	if s.options.worthwhile(with.Rates(), without.Rates(), chance) {
		return "", nil
	}
	what, of := s.options.judged(with.Rates())
	_, ofPlain := s.options.judged(without.Rates())
	return fmt.Sprintf("no gain expected: on held-out documents of the profile the solved placement has %s %.3f, the default one %.3f; chance makes differences of %.3f", what, of, ofPlain, chance), nil
}

// worthwhile reports whether the objective gains enough for a solved placement, where chance makes such differences.
func (o *Options) worthwhile(solved, plain cost.Rates, chance float64) bool {
	_, of := o.judged(solved)
	_, ofPlain := o.judged(plain)
	if o.messages().None() {
		return of >= ofPlain*(1+leastGain)+chance
	}
	return of <= ofPlain*(1-leastGain)-chance
}

// chance is how much a placement may seem to gain where there is nothing to gain. With attention DP a request has one rank: its activations
// are local together, and the gain varies from request to request.
func (s *search) chance(solved, plain *cost.Report) float64 {
	least := leastDeviations * s.chanceOfActivations(plain)
	if s.options.Attention == placement.DataParallel && len(s.test) >= leastJudges {
		least = max(least, s.chanceOfRequests(solved, plain))
	}
	return least
}

// chanceOfActivations is the standard deviation of the gain by independent activations.
func (s *search) chanceOfActivations(plain *cost.Report) float64 {
	_, ofPlain := s.options.judged(plain.Rates())
	rows := float64(s.trace.TokenCount(s.test) * len(s.trace.Model.Layers))
	if m := s.options.messages(); !m.None() {
		// A token's messages vary by less than what independent ones of their number and cost would.
		return math.Sqrt(2 * ofPlain * max(float64(m.Rank), float64(m.Node)) / rows)
	}
	return math.Sqrt(2 * ofPlain * (1 - ofPlain) / (rows * float64(s.trace.Model.TopK)))
}

// chanceOfRequests is the standard error of the gain's mean over requests, weighted by tokens.
func (s *search) chanceOfRequests(solved, plain *cost.Report) float64 {
	_, of := s.options.judged(solved.Rates())
	_, ofPlain := s.options.judged(plain.Rates())
	squares := 0.0
	for i, request := range s.test {
		_, mine := s.options.judged(solved.ByRequest[i])
		_, minePlain := s.options.judged(plain.ByRequest[i])
		deviation := float64(s.trace.Length(request)) * (mine - minePlain - (of - ofPlain))
		squares += deviation * deviation
	}
	n := float64(len(s.test))
	return math.Sqrt(squares*n/(n-1)) / float64(s.trace.TokenCount(s.test))
}

// judged is the one of the rates that the objective is about, and its name.
func (o *Options) judged(r cost.Rates) (string, float64) {
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

// score is the report of an algorithm's placement on the test requests.
func (s *search) score(ctx context.Context, p *placement.Placement, by placement.Algorithm) (cost.Report, error) {
	plan, err := s.plan(ctx, p, by)
	if err != nil {
		return cost.Report{}, err
	}
	o := s.evaluation()
	o.ByRequest = true
	return s.evaluate(ctx, plan, o)
}
