// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/internal/refengine/model"
)

// Sampling configures the selection of tokens.
type Sampling struct {
	// Temperature 0 always selects the most likely token.
	Temperature float64
	// TopP keeps the smallest set of most likely tokens with a total probability of at least TopP; 1 keeps all tokens.
	TopP float64
	// TopK keeps that number of most likely tokens; 0 keeps all tokens.
	TopK int
	// Seed makes sampling reproducible.
	Seed uint64
}

// sampler selects the tokens of one request.
type sampler struct {
	Sampling
	random *rand.Rand
	// order and weights are scratch memory.
	order   []int32
	weights []float64
}

func newSampler(s Sampling) *sampler {
	return &sampler{Sampling: s, random: rand.New(rand.NewPCG(s.Seed, s.Seed))}
}

// next selects a token.
func (s *sampler) next(logits []float32) int32 {
	if s.Temperature == 0 {
		return argmax(logits)
	}
	s.rank(logits)
	top := float64(logits[s.order[0]])
	s.weights = s.weights[:0]
	var total float64
	for _, id := range s.order {
		w := math.Exp((float64(logits[id]) - top) / s.Temperature)
		s.weights = append(s.weights, w)
		total += w
	}
	kept := s.cut(total)
	total = 0
	for _, w := range s.weights[:kept] {
		total += w
	}
	point := s.random.Float64() * total
	for i, w := range s.weights[:kept] {
		if point -= w; point < 0 {
			return s.order[i]
		}
	}
	return s.order[kept-1]
}

// rank sorts the tokens in descending order of probability.
func (s *sampler) rank(logits []float32) {
	s.order = s.order[:0]
	for id := range logits {
		s.order = append(s.order, int32(id))
	}
	slices.SortFunc(s.order, func(a, b int32) int {
		return cmp.Or(cmp.Compare(logits[b], logits[a]), cmp.Compare(a, b))
	})
}

// cut returns the number of ranked tokens that TopK and TopP keep, at least one.
func (s *sampler) cut(total float64) int {
	kept := len(s.weights)
	if s.TopK > 0 {
		kept = min(kept, s.TopK)
	}
	if s.TopP >= 1 {
		return kept
	}
	var sum float64
	for i, w := range s.weights[:kept] {
		if sum += w; sum >= s.TopP*total {
			return i + 1
		}
	}
	return kept
}

// argmax returns the most likely token, and the lowest ID among equal ones.
func argmax(logits []float32) int32 {
	best := 0
	for id, v := range logits {
		if v > logits[best] {
			best = id
		}
	}
	return int32(best)
}

// logprobs returns the log probability of a token, and those of the most likely tokens.
func logprobs(logits []float32, id int32, top int) (float32, []TokenLogprob) {
	highest := logits[argmax(logits)]
	var sum float64
	for _, v := range logits {
		sum += float64(model.Exp(v - highest))
	}
	normaliser := float64(highest) + math.Log(sum)
	logprob := func(id int32) float32 { return float32(float64(logits[id]) - normaliser) }
	var best []TokenLogprob
	for _, id := range highestLogits(logits, top) {
		best = append(best, TokenLogprob{id, logprob(id)})
	}
	return logprob(id), best
}

// highestLogits returns the n most likely tokens, with the lowest IDs first among equal ones.
func highestLogits(logits []float32, n int) []int32 {
	best := make([]int32, 0, n+1)
	for id, v := range logits {
		if n == 0 || len(best) == n && v <= logits[best[n-1]] {
			continue
		}
		at := len(best)
		for at > 0 && v > logits[best[at-1]] {
			at--
		}
		best = slices.Insert(best, at, int32(id))
		best = best[:min(len(best), n)]
	}
	return best
}
