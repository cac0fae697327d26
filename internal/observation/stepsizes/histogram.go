// SPDX-License-Identifier: Apache-2.0

package stepsizes

import (
	"math"
	"slices"
)

const (
	// Parts is the number of sizes that describe a distribution. Each represents the same number of steps.
	Parts = 8
	// maxTokens is the maximum number of tokens of a step, several times that of the largest known deployments.
	maxTokens = 1 << 24

	// binsPerOctave is the resolution of a Histogram; bins covers 1 to maxTokens.
	binsPerOctave = 4
	bins          = 24*binsPerOctave + 1
)

// Histogram counts steps by their number of tokens. The zero value is empty.
type Histogram struct {
	steps, tokens [bins]float64
	prefill       float64
}

// Add adds steps steps of tokens tokens each, prefill of which computed prompts.
func (h *Histogram) Add(tokens, steps, prefill float64) {
	tokens = min(max(tokens, 1), maxTokens)
	i := int(binsPerOctave * math.Log2(tokens))
	h.steps[i] += steps
	h.tokens[i] += steps * tokens
	h.prefill += prefill
}

// Fade multiplies all counts by a factor, so that older steps weigh less than steps that are added later.
func (h *Histogram) Fade(factor float64) {
	for i := range h.steps {
		h.steps[i] *= factor
		h.tokens[i] *= factor
	}
	h.prefill *= factor
}

// Steps returns the number of steps, in which faded steps count partially.
func (h *Histogram) Steps() float64 {
	sum := 0.0
	for _, n := range h.steps {
		sum += n
	}
	return sum
}

// PrefillShare returns the share of steps that computed prompts; 0 without steps.
func (h *Histogram) PrefillShare() float64 {
	if steps := h.Steps(); steps > 0 {
		return min(1, h.prefill/steps)
	}
	return 0
}

// Sizes returns the mean tokens of the smallest eighth of the steps, of the next eighth, and so on; nil without steps.
func (h *Histogram) Sizes() []float64 {
	each := h.Steps() / Parts
	if each <= 0 {
		return nil
	}
	sizes := make([]float64, Parts)
	part, room := 0, each
	for i, left := range h.steps {
		if left == 0 {
			continue
		}
		size := h.tokens[i] / left
		for left > 0 {
			n := min(left, room)
			if part == Parts-1 { // the last part takes the rounding error
				n = left
			}
			sizes[part] += n / each * size
			left -= n
			if room -= n; room <= 0 && part < Parts-1 {
				part, room = part+1, each
			}
		}
	}
	return sizes
}

// roundSizes rounds sizes to powers of two and 1.5 times powers of two: a small change of the traffic changes few of them.
func roundSizes(sizes []float64) []int32 {
	rounded := make([]int32, len(sizes))
	for i, size := range sizes {
		size = min(max(size, 1), maxTokens)
		power := math.Exp2(math.Floor(math.Log2(size)))
		nearest := power
		switch ratio := size / power; { // the limits are geometric means of adjacent sizes
		case ratio > math.Sqrt(3):
			nearest = 2 * power
		case ratio > math.Sqrt(1.5):
			nearest = 1.5 * power
		}
		rounded[i] = int32(math.Round(nearest))
	}
	return rounded
}

// Differ reports whether two distributions differ much: the median or the mean of one is at least twice that of the
// other. The steps of roundSizes are smaller.
func Differ(from, to []int32) bool {
	far := func(a, b float64) bool { return a >= 2*b || b >= 2*a }
	return far(median(from), median(to)) || far(mean(from), mean(to))
}

func median(sizes []int32) float64 {
	if len(sizes) == 0 {
		return 0
	}
	return float64(slices.Sorted(slices.Values(sizes))[len(sizes)/2])
}

func mean(sizes []int32) float64 {
	sum := 0.0
	for _, size := range sizes {
		sum += float64(size) / float64(len(sizes))
	}
	return sum
}
