// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
)

// The test statistic, in nats. Engines compute in bfloat16. A plan changes the order of summation, and, if gate scores
// are equal in bfloat16, which of two experts is chosen, because the position decides. A token after such a choice can
// differ by whole nats. A limit on single tokens would therefore reject correct plans. Instead, Judge limits means of
// absolute differences. Each difference is clipped to maxDifference, so that rare large differences do not matter and
// the mean of many has a narrow distribution.
//
// The mean of n differences may be at most baseMean + spread/sqrt(n). Correct permutations have a mean of 0.029 and
// exceed baseMean by at most 0.29/sqrt(n). docs/lossless-probe.md has the measurement and the resulting false-refusal rate and
// power.
const (
	maxDifference = 1.0
	baseMean      = 0.05
	spread        = 0.8
)

// errNothingCompared is returned if no token of the engine's answers is comparable with the stored answers, although
// all differences are below the limits.
var errNothingCompared = errors.New("no log-probability could be compared: every answer differs at its first token")

// DifferenceError reports that the engine's outputs differ from those without a plan.
type DifferenceError struct{ message string }

func (e *DifferenceError) Error() string { return e.message }

// Distance is the distance between answers.
type Distance struct {
	// Positions is the number of compared log-probabilities. Same is the number of positions with equal tokens.
	Positions, Same int
	// Total is the sum of the absolute differences, each clipped to maxDifference.
	Total float64
}

// Compare compares two answers to one prompt. It compares the log-probabilities of the prompt's tokens if both answers
// have the same number, and those of the continuations up to the first differing token. Later tokens continue different
// texts.
//
// If tokens differ, at least one of two log-probabilities has changed by half of the margin between them, which counts
// as the difference. The same applies at the end of a shorter answer. Tokens beyond the stored ones are not compared.
func Compare(want, got Answer) Distance {
	var d Distance
	if len(want.PromptLogprobs) == len(got.PromptLogprobs) { // with other lengths, tokenizers or engines differ
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

// add adds a difference. NaN counts as maxDifference.
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

// Plus returns the sum of two distances.
func (d Distance) Plus(other Distance) Distance {
	return Distance{d.Positions + other.Positions, d.Same + other.Same, d.Total + other.Total}
}

// Mean returns the mean difference, or 0 if nothing was compared.
func (d Distance) Mean() float64 { return d.Total / float64(max(d.Positions, 1)) }

// Allowed returns the maximum mean difference of correct engines.
func (d Distance) Allowed() float64 { return baseMean + spread/math.Sqrt(float64(max(d.Positions, 1))) }

// Judge evaluates the responses of an engine. It returns nil, errNothingCompared or a *DifferenceError. It tests each
// rank, all ranks together, and each prompt, because an error in few experts changes few prompts, but changes these
// more.
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
	all, err := judge(anyRank, responses)
	if err != nil {
		return err
	}
	for _, r := range responses {
		if _, err := judge(r.Rank, []Response{r}); err != nil {
			return err
		}
	}
	if all.Same == 0 {
		return errNothingCompared
	}
	return nil
}

// judge evaluates the responses of a rank, or of all ranks for anyRank.
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
	return all, &DifferenceError{fmt.Sprintf("%s: %d log-probabilities differ from those without the plan by a mean of %.4f nats, with at most %.4f allowed. "+
		"The largest mean difference is %.4f, for the prompt %s", rankName(rank), all.Positions, all.Mean(), all.Allowed(), worst.Mean(), quote(prompt))}
}

func rankName(rank int) string {
	if rank == anyRank {
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
