package lossless

import (
	"errors"
	"fmt"
	"math"
)

// The tolerances, in nats. Engines compute in bfloat16, and sum in another order with every batch, number of ranks and
// image: reports on such engines have mean differences of 0.01 to 0.04 between implementations, and for mixture-of-experts
// models single ones above 0.1, where a gate's choice was close. Experts that are mistaken for one another give whole
// nats.
const (
	// Tolerance bounds the difference of one log-probability.
	Tolerance = 0.5
	// MeanTolerance bounds the mean difference over everything that was compared: noise has tails, a fault has a mean.
	MeanTolerance = 0.1
	// SmallMargin is up to where another token is noise: the two must have moved by half of it each, against one another.
	SmallMargin = 0.5
)

// ErrNothingCompared says that engine and stored answers have no token in common, each for a reason that is allowed.
var ErrNothingCompared = errors.New("no token could be compared: every answer differs at its first token, where the margin is small")

// DifferenceError says that the engine's outputs are not those of the unplanned start.
type DifferenceError struct{ message string }

func (e *DifferenceError) Error() string { return e.message }

// Drift is how far answers are apart.
type Drift struct {
	// Positions is how many log-probabilities were compared, Same at how many of them the tokens were the same.
	Positions, Same int
	// Total is the sum of the absolute differences, in nats.
	Total float64
}

// Compare compares the answers to one prompt position by position, up to the first one where the tokens differ: what
// follows continues different texts. A *DifferenceError says which position cannot be noise.
//
// Where tokens differ, the log-probabilities are compared all the same. Each is the largest of its position, and the
// largest of several numbers moves by no more than they do.
func Compare(want, got Answer) (Drift, error) {
	var drift Drift
	for i := range max(len(want.Tokens), len(got.Tokens)) {
		if i >= len(want.Tokens) || i >= len(got.Tokens) {
			return drift, compareEnds(want, got, i)
		}
		same := want.Tokens[i] == got.Tokens[i]
		delta := math.Abs(want.Logprobs[i] - got.Logprobs[i])
		switch {
		case !same && want.Margins[i] > SmallMargin:
			return drift, differencef(want, i, "the token is %s (log-probability %.4f), without the plan %s (%.4f), by a margin of %.4f; another token is allowed up to %v",
				quote(got.Tokens[i]), got.Logprobs[i], quote(want.Tokens[i]), want.Logprobs[i], want.Margins[i], SmallMargin)
		case !(delta <= Tolerance): // so that a NaN is a difference
			return drift, differencef(want, i, "the log-probability of token %s is %.4f, without the plan that of %s is %.4f; allowed is a difference of %v",
				quote(got.Tokens[i]), got.Logprobs[i], quote(want.Tokens[i]), want.Logprobs[i], Tolerance)
		}
		drift.Positions++
		drift.Total += delta
		if !same {
			break
		}
		drift.Same++
	}
	return drift, nil
}

// compareEnds judges answers of which one ended before position i. That is a choice of the end's token, which engines do
// not all show: its margin is known only where the stored answer went on.
func compareEnds(want, got Answer, i int) error {
	if i < len(want.Tokens) && want.Margins[i] <= SmallMargin {
		return nil
	}
	if i < len(want.Tokens) {
		return differencef(want, i, "the answer ends, without the plan it goes on with token %s (log-probability %.4f), by a margin of %.4f; another end is allowed up to %v",
			quote(want.Tokens[i]), want.Logprobs[i], want.Margins[i], SmallMargin)
	}
	return differencef(want, i, "the answer goes on with token %s (log-probability %.4f), without the plan it ends", quote(got.Tokens[i]), got.Logprobs[i])
}

// plus adds what another comparison found.
func (d Drift) plus(other Drift) Drift {
	return Drift{d.Positions + other.Positions, d.Same + other.Same, d.Total + other.Total}
}

// Err judges all that was compared: nil, ErrNothingCompared or a *DifferenceError.
func (d Drift) Err() error {
	if d.Same == 0 {
		return ErrNothingCompared
	}
	if mean := d.Total / float64(d.Positions); mean > MeanTolerance {
		return &DifferenceError{fmt.Sprintf("the log-probabilities of %d tokens are %.4f away from those without the plan in the mean; allowed is %v", d.Positions, mean, MeanTolerance)}
	}
	return nil
}

func differencef(want Answer, position int, format string, args ...any) error {
	return &DifferenceError{fmt.Sprintf("prompt %s, position %d: ", quote(want.Prompt), position) + fmt.Sprintf(format, args...)}
}

// quote shows the beginning of a text on one line.
func quote(text string) string {
	const most = 40
	if runes := []rune(text); len(runes) > most {
		text = string(runes[:most]) + "…"
	}
	return fmt.Sprintf("%q", text)
}
