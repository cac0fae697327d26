package lossless

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
)

// The statistic, in nats. Engines compute in bfloat16. A plan changes the order in which they sum, and which of two experts
// is chosen where gates are equal in bfloat16, which position decides; a token behind such a choice can move by whole nats.
// A bound on a single token therefore refuses right plans. Judge bounds means of absolute differences instead, each of which
// counts maxDifference at most, so that rare large ones do not matter and the mean of many has a narrow distribution.
//
// The mean of n differences may be baseMean + spread/sqrt(n). Right permutations have a mean of 0.029 and exceed baseMean by
// at most 0.29/sqrt(n); docs/serving.md has the measurement, and the false-refusal rate and the power that follow from it.
const (
	maxDifference = 1.0
	baseMean      = 0.05
	spread        = 0.8
)

// ErrNothingCompared is returned where engine and stored answers have no token in common, each for an allowed reason.
var ErrNothingCompared = errors.New("no log-probability could be compared: every answer differs at its first token")

// DifferenceError reports that the engine's outputs differ from those recorded without a plan.
type DifferenceError struct{ message string }

func (e *DifferenceError) Error() string { return e.message }

// Distance is how far answers are apart.
type Distance struct {
	// Positions is how many log-probabilities were compared, Same at how many of them the tokens were the same.
	Positions, Same int
	// Total is the sum of the absolute differences, each of which counts maxDifference at most.
	Total float64
}

// Compare compares two answers to one prompt: the log-probabilities of the prompt's tokens where both have as many, and
// those of the continuations up to the first token where they differ, since what follows continues different texts.
//
// Where tokens differ, at least one of two log-probabilities has moved by half of the margin between them, which counts as
// the difference. So does the end of an answer. Tokens beyond the stored ones are not compared.
func Compare(want, got Answer) Distance {
	var d Distance
	if len(want.PromptLogprobs) == len(got.PromptLogprobs) { // else tokenizers or engines differ
		for i, logprob := range want.PromptLogprobs {
			d.add(math.Abs(logprob-got.PromptLogprobs[i]), true)
		}
	}
	for i, token := range want.Tokens {
		switch {
		case i >= len(got.Tokens):
			d.add(want.Margins[i]/2, false)
			return d
		case got.Tokens[i] != token:
			d.add(max(math.Abs(want.Logprobs[i]-got.Logprobs[i]), want.Margins[i]/2), false)
			return d
		}
		d.add(math.Abs(want.Logprobs[i]-got.Logprobs[i]), true)
	}
	return d
}

// add adds a difference; NaN counts as the largest.
func (d *Distance) add(difference float64, same bool) {
	if !(difference <= maxDifference) {
		difference = maxDifference
	}
	d.Positions++
	d.Total += difference
	if same {
		d.Same++
	}
}

// Plus adds what another comparison found.
func (d Distance) Plus(other Distance) Distance {
	return Distance{d.Positions + other.Positions, d.Same + other.Same, d.Total + other.Total}
}

// Mean is the mean difference, 0 where nothing was compared.
func (d Distance) Mean() float64 { return d.Total / float64(max(d.Positions, 1)) }

// Allowed is the largest mean difference that right engines have.
func (d Distance) Allowed() float64 { return baseMean + spread/math.Sqrt(float64(max(d.Positions, 1))) }

// Judge judges what an engine has answered: nil, ErrNothingCompared or a *DifferenceError. It judges each rank, all ranks
// together, and each prompt: a fault of few experts changes few prompts, but those by more.
func Judge(responses []Response) error {
	ranks := map[int][]Response{}
	for _, r := range responses {
		ranks[r.Rank] = append(ranks[r.Rank], r)
	}
	for _, rank := range slices.Sorted(maps.Keys(ranks)) {
		if _, err := judge(rank, ranks[rank]); err != nil {
			return err
		}
	}
	all, err := judge(AnyRank, responses)
	if err != nil {
		return err
	}
	for _, r := range responses {
		if _, err := judge(r.Rank, []Response{r}); err != nil {
			return err
		}
	}
	if all.Same == 0 {
		return ErrNothingCompared
	}
	return nil
}

// judge judges the answers of a rank, or of all ranks for AnyRank.
func judge(rank int, responses []Response) (Distance, error) {
	var all, worst Distance
	prompt := ""
	for _, r := range responses {
		d := Compare(r.Want, r.Got)
		if all = all.Plus(d); d.Mean() >= worst.Mean() {
			worst, prompt = d, r.Want.Prompt
		}
	}
	if all.Mean() <= all.Allowed() {
		return all, nil
	}
	return all, &DifferenceError{fmt.Sprintf("%s: %d log-probabilities differ from those without the plan by %.4f nats in the mean; allowed is %.4f. "+
		"They differ most, by %.4f, for the prompt %s", rankName(rank), all.Positions, all.Mean(), all.Allowed(), worst.Mean(), quote(prompt))}
}

func rankName(rank int) string {
	if rank == AnyRank {
		return "the engine"
	}
	return fmt.Sprintf("rank %d", rank)
}

// quote returns the beginning of a text on one line.
func quote(text string) string {
	const limit = 40
	if runes := []rune(text); len(runes) > limit {
		text = string(runes[:limit]) + "…"
	}
	return fmt.Sprintf("%q", text)
}
