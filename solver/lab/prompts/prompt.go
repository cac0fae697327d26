// SPDX-License-Identifier: Apache-2.0

package prompts

import (
	"math"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/embedding"
)

// Projection is a table of random signs. The mean over a prompt's tokens is the prompt's bag of words under a random
// projection, which preserves the distances between bags up to a small error (Johnson and Lindenstrauss). It needs no
// model.
type Projection struct {
	tokens, size int
	// signs has one bit per value of the vectors [tokens × size], set for negative values.
	signs []uint64
}

// Projected returns a projection for the given number of token ids.
func Projected(tokens, size int, seed uint64) *Projection {
	p := &Projection{tokens: tokens, size: size, signs: make([]uint64, (tokens*size+63)/64)}
	random := rand.New(rand.NewPCG(seed, 0x70726f6a656374))
	for i := range p.signs {
		p.signs[i] = random.Uint64()
	}
	return p
}

// Prompt is Mean for the projection's vectors, which have length 1.
func (p *Projection) Prompt(tokens []int32) []float32 {
	step := float32(1 / math.Sqrt(float64(p.size)))
	return mean(tokens, p.tokens, p.size, func(point []float32, id int32) {
		begin := int(id) * p.size
		for i := range point {
			if p.signs[(begin+i)/64]>>((begin+i)%64)&1 == 1 {
				point[i] -= step
			} else {
				point[i] += step
			}
		}
	})
}

// mean returns the mean of the contributions of add over the tokens; token ids beyond the vocabulary are ignored.
func mean(tokens []int32, vocabulary, size int, add func(point []float32, id int32)) []float32 {
	point := make([]float32, size)
	counted := float32(0)
	for _, id := range tokens {
		if id >= 0 && int(id) < vocabulary {
			counted++
			add(point, id)
		}
	}
	for i := range point {
		point[i] /= max(counted, 1)
	}
	return point
}

// Mean returns the mean of the vectors of a prompt's tokens; token ids beyond the table are ignored.
func Mean(t *embedding.Table, tokens []int32) []float32 {
	return mean(tokens, t.Tokens, t.Size, func(point []float32, id int32) {
		for i, v := range t.Vector(id) {
			point[i] += v
		}
	})
}

// Space compares prompts by their direction from the mean prompt, so that words in all prompts have no influence.
type Space struct{ mean []float32 }

// NewSpace returns the space around the mean of points.
func NewSpace(points [][]float32) *Space {
	s := &Space{make([]float32, len(points[0]))}
	for _, point := range points {
		for i, v := range point {
			s.mean[i] += v / float32(len(points))
		}
	}
	return s
}

// Direction returns the unit vector from the mean to a point, or the zero vector for the mean.
func (s *Space) Direction(point []float32) []float32 {
	direction, squares := make([]float32, len(point)), 0.0
	for i, v := range point {
		direction[i] = v - s.mean[i]
		squares += float64(direction[i]) * float64(direction[i])
	}
	if squares > 0 {
		scale := float32(1 / math.Sqrt(squares))
		for i := range direction {
			direction[i] *= scale
		}
	}
	return direction
}
