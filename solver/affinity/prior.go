package affinity

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
)

// Tokens is how many occurrences of tokens are counted.
func (c *Counts) Tokens() float64 {
	sum := 0.0
	for _, n := range c.Occurrences {
		sum += float64(n)
	}
	return sum
}

// Fade is the weight at which prior tokens weigh together as much as the given percentage of recent ones, and at most as much as
// they are.
func Fade(recent, prior, percent float64) float32 {
	if prior <= 0 {
		return 0
	}
	return float32(min(recent*percent/100/prior, 1))
}

// MergeLayers is Merge for every layer.
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

// Merge returns the requests of both, those of b with a weight: a request that counts half has half of its tokens and activations.
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

// Thinned are about n of the requests, which must be fewer than all: each is the rarer among them the less it counts, and counts for
// its like that are left out. Those that count most are all kept, as they are. Among like ones the order decides.
func (c *RequestCounts) Thinned(order []int, n int) *RequestCounts {
	least := c.leastWeight(n)
	var picked []int
	due := 0.5
	for _, r := range order {
		due += min(float64(c.weight(r))/least, 1)
		if due >= 1 {
			due--
			picked = append(picked, r)
		}
	}
	slices.Sort(picked)
	part := c.Part(picked)
	for i, weight := range part.Weight {
		if by := float32(least) / weight; by > 1 {
			part.Tokens[i], part.Rows[i], part.Weight[i] = by*part.Tokens[i], scaled(part.Rows[i], by), float32(least)
		}
	}
	return part
}

// leastWeight is what a request must count for n of them to count what all do.
func (c *RequestCounts) leastWeight(n int) float64 {
	weights, total := make([]float64, len(c.Rows)), 0.0
	for r := range weights {
		weights[r] = float64(c.weight(r))
		total += weights[r]
	}
	slices.SortFunc(weights, func(a, b float64) int { return cmp.Compare(b, a) })
	// Those that count more are kept in any case: fewer are left to choose among for the others.
	for _, weight := range weights {
		if n == 1 || weight <= total/float64(n) {
			break
		}
		total -= weight
		n--
	}
	return total / float64(n)
}

// Trust is how many occurrences a prior profile's row of a token id weighs at most, however often that was seen there: what a
// token activates has moved since by about as much as that many occurrences leave open. 0 leaves the prior out, +Inf takes
// its counts as if they were recent.
type Trust float64

// weight is what n prior occurrences of a token weigh: chance among n and the move since add up, as variances do.
func (t Trust) weight(n float32) float32 {
	if n == 0 || t == 0 {
		return 0
	}
	return float32(1 / (1/float64(n) + 1/float64(t)))
}

// Blend adds each token's row of a prior profile to the recent one by trust: a hierarchical prior, where the recent counts decide
// what is frequent now and old rows speak for tokens that are rare now.
func Blend(recent, prior *Counts, trust Trust) (Counts, error) {
	if err := alike(recent, prior); err != nil {
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

// BlendLayers is Blend for every layer.
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

// addRow adds a token's counts to a dense row, and returns the occurrences that they are of.
func (c *Counts) addRow(row []float32, token int, weight float32) float32 {
	experts, counts := c.Row(token)
	for i, expert := range experts {
		row[expert] += weight * counts[i]
	}
	return weight * c.Occurrences[token]
}

// trusts are the ones that FitTrust chooses among.
var trusts = []Trust{0, 0.5, 1, 2, 4, 8, 16, 64, 256, Trust(math.Inf(1))}

// FitTrust chooses how far a prior profile is to be trusted: the one that forecasts best what tokens activate in one half of the
// recent counts from the other half and the prior, and the other way round. The halves must not share documents. Where the
// kinds of text are as they were, it is +Inf.
func FitTrust(ctx context.Context, first, second, prior []Counts) (Trust, error) {
	for l := range prior {
		for _, half := range [][]Counts{first, second} {
			if len(half) != len(prior) {
				return 0, fmt.Errorf("profiles differ: %d and %d MoE layers", len(half), len(prior))
			}
			if err := alike(&half[l], &prior[l]); err != nil {
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
	best, least := 0, math.Inf(1)
	for i := range trusts {
		sum := 0.0
		for _, e := range errorsOf {
			sum += e[i]
		}
		if sum < least {
			best, least = i, sum
		}
	}
	return trusts[best], nil
}

// addErrors adds, for each trust, the squared error of the shares forecast from the known half over the occurrences of the other,
// less what is the same for all of them.
func addErrors(sums []float64, known, other, prior *Counts) {
	mean, total := known.ExpertTotals(), max(known.Tokens(), 1)
	row, old := make([]float32, known.Experts), make([]float32, known.Experts)
	for id, n := range other.Occurrences {
		if n == 0 || prior.Occurrences[id] == 0 {
			continue // all trusts forecast the same
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

// fitShrinkage is how many occurrences of the mean token are added to those of each, as tables do.
const fitShrinkage = 1
