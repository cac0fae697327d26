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
)

// validate solves and judges a placement within the train requests alone, so that the test requests judge a plan that was
// not chosen by them. It says why the default placement is to be preferred, or nothing; truncated, the time budget was spent before it
// could tell. Both are scored with the token table: what the placement is worth does not hang on the forecast, and tables are cheap.
func (s *search) validate(ctx context.Context, deadline time.Time) (preferred string, truncated bool, err error) {
	part := &search{trace: s.trace.Subset(s.train), options: s.options, groups: s.groups}
	part.options.Forecast, part.options.Embeddings, part.options.Progress = Table, nil, nil
	if part.train, part.test, err = trace.Split(part.trace, validationPercent, s.options.Seed); err != nil {
		return "no gain expected: the profile has one document, and nothing to judge a placement by", false, nil
	}
	if err := part.count(ctx); err != nil {
		return "", false, err
	}
	solved, truncated, err := part.score(ctx, placement.Auto, deadline)
	if err != nil || truncated {
		return "", truncated, err
	}
	plain, _, err := part.score(ctx, placement.ContiguousAlgorithm, time.Time{})
	tokens := float64(part.trace.TokenCount(part.test) * len(part.trace.Model.Layers))
	if err != nil || s.options.worthwhile(&solved, &plain, tokens, part.trace.Model.TopK) {
		return "", false, err
	}
	what, of := s.options.judged(&solved)
	_, ofPlain := s.options.judged(&plain)
	return fmt.Sprintf("no gain expected: on held-out documents of the profile the solved placement has %s %.3f, the default one %.3f", what, of, ofPlain), false, nil
}

// worthwhile reports whether the objective gains enough for a solved placement, over that many tokens in all layers.
func (o *Options) worthwhile(solved, plain *cost.Report, tokens float64, topK int) bool {
	_, of := o.judged(solved)
	_, ofPlain := o.judged(plain)
	if o.messages().None() {
		chance := math.Sqrt(2 * ofPlain * (1 - ofPlain) / (tokens * float64(topK)))
		return of >= ofPlain*(1+leastGain)+leastDeviations*chance
	}
	// A token's messages vary by less than what independent ones of their number and cost would.
	dearest := max(float64(o.messages().Rank), float64(o.messages().Node))
	chance := math.Sqrt(2 * ofPlain * dearest / tokens)
	return of <= ofPlain*(1-leastGain)-leastDeviations*chance
}

// judged is the figure of a report that the objective is about, and its name.
func (o *Options) judged(r *cost.Report) (string, float64) {
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
func (s *search) score(ctx context.Context, by placement.Algorithm, deadline time.Time) (report cost.Report, truncated bool, err error) {
	result, err := s.place(ctx, by, deadline)
	if err != nil {
		return cost.Report{}, false, err
	}
	plan, err := s.plan(ctx, result.Placement, by)
	if err != nil {
		return cost.Report{}, false, err
	}
	report, err = s.evaluate(ctx, plan, s.evaluation())
	return report, result.Truncated, err
}
