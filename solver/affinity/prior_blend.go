// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
)

// Tokens returns the number of counted token occurrences.
func (c *Counts) Tokens() float64 {
	sum := 0.0
	for _, n := range c.Occurrences {
		sum += float64(n)
	}
	return sum
}

// Fade returns the weight at which the prior tokens together weigh the given percentage of the recent tokens, but at
// most 1.
func Fade(recent, prior, percent float64) float32 {
	if prior <= 0 {
		return 0
	}
	return float32(min(recent*percent/100/prior, 1))
}

// MergeLayers applies Merge to every layer.
func MergeLayers(a, b []Counts, weightA, weightB float32) ([]Counts, error) {
	if len(a) != len(b) {
		return nil, fmt.Errorf("profiles differ: %d and %d MoE layers", len(a), len(b))
	}
	merged := make([]Counts, len(a))
	for l := range a {
		var err error
		if merged[l], err = Merge(&a[l], &b[l], weightA, weightB); err != nil {
			return nil, err
		}
	}
	return merged, nil
}

// Merge returns the requests of both, with a weight for those of b: a request of weight 0.5 has half of its tokens and
// activations.
func (c *RequestCounts) Merge(b *RequestCounts, weight float32) (*RequestCounts, error) {
	if c.Layers != b.Layers || c.Experts != b.Experts || c.TopK != b.TopK {
		return nil, fmt.Errorf("profiles differ: %d and %d MoE layers, %d and %d experts, top-%d and top-%d",
			c.Layers, b.Layers, c.Experts, b.Experts, c.TopK, b.TopK)
	}
	merged := *c
	merged.Tokens = append(make([]float32, 0, len(c.Tokens)+len(b.Tokens)), c.Tokens...)
	merged.Rows = append(make([][]float32, 0, len(c.Rows)+len(b.Rows)), c.Rows...)
	merged.Weight = make([]float32, 0, len(c.Rows)+len(b.Rows))
	for r := range c.Rows {
		merged.Weight = append(merged.Weight, c.weight(r))
	}
	for r, row := range b.Rows {
		merged.Tokens, merged.Rows = append(merged.Tokens, weight*b.Tokens[r]), append(merged.Rows, scaled(row, weight))
		merged.Weight = append(merged.Weight, weight*b.weight(r))
	}
	return &merged, nil
}

func (c *RequestCounts) weight(r int) float32 {
	if c.Weight == nil {
		return 1
	}
	return c.Weight[r]
}

func scaled(row []float32, by float32) []float32 {
	to := make([]float32, len(row))
	for i, n := range row {
		to[i] = by * n
	}
	return to
}

// Thinned returns about n of the requests, fewer than all, by systematic sampling in the given order. The probability
// of a request is proportional to its weight, and a selected request also represents the omitted ones. The requests of
// the highest weights are all selected with unchanged weight.
func (c *RequestCounts) Thinned(order []int, n int) *RequestCounts {
	minWeight := c.thinnedWeight(n)
	var picked []int
	due := 0.5
	for _, r := range order {
		due += min(float64(c.weight(r))/minWeight, 1)
		if due >= 1 {
			due--
			picked = append(picked, r)
		}
	}
	slices.Sort(picked)
	part := c.Part(picked)
	for i, weight := range part.Weight {
		if by := float32(minWeight) / weight; by > 1 {
			part.Tokens[i], part.Rows[i], part.Weight[i] = by*part.Tokens[i], scaled(part.Rows[i], by), float32(minWeight)
		}
	}
	return part
}

// thinnedWeight returns the weight of a selected request such that n requests have the total weight of all.
func (c *RequestCounts) thinnedWeight(n int) float64 {
	weights, total := make([]float64, len(c.Rows)), 0.0
	for r := range weights {
		weights[r] = float64(c.weight(r))
		total += weights[r]
	}
	slices.SortFunc(weights, func(a, b float64) int { return cmp.Compare(b, a) })
	// Requests above this weight are all selected, which leaves fewer selections for the others.
	for _, weight := range weights {
		if n == 1 || weight <= total/float64(n) {
			break
		}
		total -= weight
		n--
	}
	return total / float64(n)
}

// Trust is the maximum weight of a prior profile's row of a token id, in occurrences: the experts of a token have
// drifted since by about the standard error of this many occurrences. 0 ignores the prior, +Inf treats its counts as
// recent.
type Trust float64

// weight returns the weight of n prior occurrences of a token: the sampling variance of n occurrences and the variance
// of the drift add up.
func (t Trust) weight(n float32) float32 {
	if n == 0 || t == 0 {
		return 0
	}
	return float32(1 / (1/float64(n) + 1/float64(t)))
}

// Blend adds each token's row of a prior profile to the recent row, weighted by trust. This is a hierarchical prior:
// recent counts determine the rows of tokens that are frequent now, prior rows those of tokens that are rare now.
func Blend(recent, prior *Counts, trust Trust) (Counts, error) {
	if err := checkShape(recent, prior); err != nil {
		return Counts{}, err
	}
	c := Counts{Experts: recent.Experts, TopK: recent.TopK, Start: make([]int, recent.Vocabulary()+1), Occurrences: make([]float32, recent.Vocabulary())}
	row := make([]float32, recent.Experts)
	for id := range recent.Vocabulary() {
		c.Occurrences[id] = recent.addRow(row, id, 1)
		if n := prior.Occurrences[id]; n > 0 {
			c.Occurrences[id] += prior.addRow(row, id, trust.weight(n)/n)
		}
		c.appendRow(row)
		c.Start[id+1] = len(c.Expert)
	}
	return c, nil
}

// BlendLayers applies Blend to every layer.
func BlendLayers(recent, prior []Counts, trust Trust) ([]Counts, error) {
	if len(recent) != len(prior) {
		return nil, fmt.Errorf("profiles differ: %d and %d MoE layers", len(recent), len(prior))
	}
	blended := make([]Counts, len(recent))
	for l := range recent {
		var err error
		if blended[l], err = Blend(&recent[l], &prior[l], trust); err != nil {
			return nil, err
		}
	}
	return blended, nil
}

// addRow adds a token's weighted counts to a dense row and returns its weighted occurrences.
func (c *Counts) addRow(row []float32, token int, weight float32) float32 {
	experts, counts := c.Row(token)
	for i, expert := range experts {
		row[expert] += weight * counts[i]
	}
	return weight * c.Occurrences[token]
}

// trusts are the candidates of FitTrust.
var trusts = []Trust{0, 0.5, 1, 2, 4, 8, 16, 64, 256, Trust(math.Inf(1))}

// FitTrust selects the trust in a prior profile by two-fold cross-validation: the trust with which one half of the
// recent counts and the prior best predict the activations of the other half. The halves must not share documents. If
// the mix of text has not changed, the result is +Inf.
func FitTrust(ctx context.Context, first, second, prior []Counts) (Trust, error) {
	for l := range prior {
		for _, half := range [][]Counts{first, second} {
			if len(half) != len(prior) {
				return 0, fmt.Errorf("profiles differ: %d and %d MoE layers", len(half), len(prior))
			}
			if err := checkShape(&half[l], &prior[l]); err != nil {
				return 0, err
			}
		}
	}
	errorsOf := make([][]float64, len(prior))
	err := Parallel(ctx, len(prior), func(l int) {
		errorsOf[l] = make([]float64, len(trusts))
		addErrors(errorsOf[l], &first[l], &second[l], &prior[l])
		addErrors(errorsOf[l], &second[l], &first[l], &prior[l])
	})
	if err != nil {
		return 0, err
	}
	best, minWeight := 0, math.Inf(1)
	for i := range trusts {
		sum := 0.0
		for _, e := range errorsOf {
			sum += e[i]
		}
		if sum < minWeight {
			best, minWeight = i, sum
		}
	}
	return trusts[best], nil
}

// addErrors adds, for each trust, the squared error of the predicted shares over the occurrences of the other half, up
// to a constant that is equal for all trusts.
func addErrors(sums []float64, known, other, prior *Counts) {
	mean, total := known.ExpertTotals(), max(known.Tokens(), 1)
	row, old := make([]float32, known.Experts), make([]float32, known.Experts)
	for id, n := range other.Occurrences {
		if n == 0 || prior.Occurrences[id] == 0 {
			continue // all trusts predict the same shares
		}
		clear(row)
		clear(old)
		occurrences := known.addRow(row, id, 1)
		seen := prior.addRow(old, id, 1)
		experts, counts := other.Row(id)
		for i, trust := range trusts {
			weight := trust.weight(seen)
			whole := occurrences + weight + fitShrinkage
			squares, agreement := 0.0, 0.0
			share := func(e int) float64 {
				return float64((row[e] + old[e]*weight/seen + fitShrinkage*float32(mean[e]/total)) / whole)
			}
			for e := range row {
				s := share(e)
				squares += s * s
			}
			for j, e := range experts {
				agreement += share(int(e)) * float64(counts[j])
			}
			sums[i] += float64(n)*squares - 2*agreement
		}
	}
}

// fitShrinkage is the number of occurrences of the mean token that are added to each token, as in tables.
const fitShrinkage = 1
