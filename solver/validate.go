package solver

import (
	"context"
	"fmt"
	"math"
	"time"

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
// not chosen by them. It says why the default placement is to be preferred, or nothing. Both are scored with the token
// table: what the placement is worth does not hang on the forecast, and tables are cheap.
func (s *search) validate(ctx context.Context, deadline time.Time) (string, error) {
	part := &search{trace: s.trace.Subset(s.train), options: s.options, groups: s.groups}
	part.options.Forecast, part.options.Embeddings, part.options.Progress = Table, nil, nil
	var err error
	if part.train, part.test, err = trace.Split(part.trace, validationPercent, s.options.Seed); err != nil {
		return "no gain expected: the profile has one document, and nothing to judge a placement by", nil
	}
	if err := part.count(ctx); err != nil {
		return "", err
	}
	gained, truncated, err := part.score(ctx, placement.Auto, deadline)
	if err != nil || truncated {
		return "", err
	}
	plain, _, err := part.score(ctx, placement.ContiguousAlgorithm, time.Time{})
	activations := float64(part.trace.TokenCount(part.test) * part.trace.Model.TopK * len(part.trace.Model.Layers))
	chance := math.Sqrt(2 * plain * (1 - plain) / activations)
	if err != nil || gained >= plain*(1+leastGain)+leastDeviations*chance {
		return "", err
	}
	return fmt.Sprintf("no gain expected: on held-out documents of the profile the solved placement has local activation rate %.3f, the default one %.3f",
		gained, plain), nil
}

// score is the local activation rate of an algorithm's placement on the test requests.
func (s *search) score(ctx context.Context, by placement.Algorithm, deadline time.Time) (lar float64, truncated bool, err error) {
	result, err := s.place(ctx, by, deadline)
	if err != nil {
		return 0, false, err
	}
	plan, err := s.plan(ctx, result.Placement, by)
	if err != nil {
		return 0, false, err
	}
	report, err := Evaluate(ctx, s.trace, plan, s.evaluation())
	return report.LAR, result.Truncated, err
}
