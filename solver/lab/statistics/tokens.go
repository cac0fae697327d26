// SPDX-License-Identifier: Apache-2.0

package statistics

import (
	"cmp"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

// Prediction is the quality of predicted sets of experts for occurrences of tokens.
type Prediction struct {
	// Precision is hits / predicted experts, Recall hits / activated experts, F1 their harmonic mean.
	Precision float64 `json:"precision"`
	Recall    float64 `json:"recall"`
	F1        float64 `json:"f1"`
}

// StaticTopK predicts, for every occurrence of a token in the listed requests, the top-k experts that its id activated
// most in the profile (Sem-MoE, section 2: static top-k prediction). Unseen token ids get no prediction, which lowers
// recall but not precision.
func StaticTopK(t *trace.Trace, requests []int, layer int, c *affinity.Counts) Prediction {
	sets := make([][]uint16, c.Vocabulary())
	for id := range sets {
		sets[id] = Hottest(c, id)
	}
	hits, predicted, activated := 0, 0, 0
	each(t, requests, func(position int) {
		set, routed := sets[t.Tokens[position]], t.Row(position, layer)
		predicted, activated = predicted+len(set), activated+len(routed)
		for _, expert := range routed {
			if slices.Contains(set, expert) {
				hits++
			}
		}
	})
	p := Prediction{Precision: ratio(hits, predicted), Recall: ratio(hits, activated)}
	if hits > 0 {
		p.F1 = 2 * p.Precision * p.Recall / (p.Precision + p.Recall)
	}
	return p
}

// Hottest returns the top-k experts that a token id activated most, the lower id first on ties, or none for an unseen
// id.
func Hottest(c *affinity.Counts, token int) []uint16 {
	experts, counts := c.Row(token)
	order := make([]int, len(experts))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), a-b) })
	var hottest []uint16
	for _, i := range order[:min(c.TopK, len(order))] {
		hottest = append(hottest, experts[i])
	}
	return hottest
}

// Concentration describes how unevenly token ids use experts, and the share covered by the most used experts of each
// id.
type Concentration struct {
	// Kurtosis is the mean kurtosis of the rows of token ids, weighted by occurrences (see the function Kurtosis).
	// Above8 is the share of occurrences with more than 8, which publications consider a sign of predictability.
	Kurtosis float64 `json:"kurtosis"`
	Above8   float64 `json:"kurtosis_above_8"`
	// Covered is the share of the profile's activations that go to the top-k experts of their token id.
	Covered float64 `json:"covered"`
	// RestHotness is the share of the k most used experts among the other activations. RestUniform is its value for
	// evenly distributed activations: top-k / experts.
	RestHotness float64 `json:"rest_hotness"`
	RestUniform float64 `json:"rest_uniform"`
}

// Concentrations returns the concentration of a layer's profile.
func Concentrations(c *affinity.Counts) Concentration {
	out := Concentration{RestUniform: float64(c.TopK) / float64(c.Experts)}
	rest := make([]float64, c.Experts)
	occurrences, covered, total := 0.0, 0.0, 0.0
	for id, n := range c.Occurrences {
		experts, counts := c.Row(id)
		if len(experts) == 0 {
			continue
		}
		k := Kurtosis(counts, c.Experts)
		occurrences += float64(n)
		out.Kurtosis += float64(n) * k
		if k > 8 {
			out.Above8 += float64(n)
		}
		top := Hottest(c, id)
		for i, expert := range experts {
			total += float64(counts[i])
			if slices.Contains(top, expert) {
				covered += float64(counts[i])
			} else {
				rest[expert] += float64(counts[i])
			}
		}
	}
	out.Kurtosis, out.Above8, out.Covered = out.Kurtosis/max(occurrences, 1), out.Above8/max(occurrences, 1), covered/max(total, 1)
	if total > covered {
		out.RestHotness = largest(rest, c.TopK) / (total - covered)
	}
	return out
}

// Kurtosis returns the fourth standardised moment (Pearson's: 3 for a normal distribution) of a row over all experts,
// including experts without activations. It is 0 if all experts are activated equally often.
func Kurtosis(counts []float32, experts int) float64 {
	n, mean := float64(experts), 0.0
	for _, x := range counts {
		mean += float64(x) / n
	}
	missing := n - float64(len(counts))
	second, fourth := missing*mean*mean, missing*mean*mean*mean*mean
	for _, x := range counts {
		d := float64(x) - mean
		second += d * d
		fourth += d * d * d * d
	}
	if second < 1e-12 {
		return 0
	}
	return fourth * n / (second * second)
}

// Seen contains the shares of the listed requests that occur in the profile.
type Seen struct {
	// Once is the share of occurrences with a token id that occurs in the profile, Often the share with a token id that
	// occurs there at least five times.
	Once  float64 `json:"once"`
	Often float64 `json:"five_times"`
}

// SeenTokens compares the listed requests with a profile.
func SeenTokens(t *trace.Trace, requests []int, c *affinity.Counts) Seen {
	once, often, all := 0, 0, 0
	each(t, requests, func(position int) {
		all++
		n := c.Occurrences[t.Tokens[position]]
		if n >= 1 {
			once++
		}
		if n >= 5 {
			often++
		}
	})
	return Seen{ratio(once, all), ratio(often, all)}
}

// each calls do for every position of the listed requests.
func each(t *trace.Trace, requests []int, do func(position int)) {
	for _, r := range requests {
		for p := int(t.Offsets[r]); p < int(t.Offsets[r+1]); p++ {
			do(p)
		}
	}
}

func ratio(part, whole int) float64 { return float64(part) / float64(max(whole, 1)) }

// largest returns the sum of the n largest values.
func largest(values []float64, n int) float64 {
	sorted, sum := slices.Clone(values), 0.0
	slices.Sort(sorted)
	for _, v := range sorted[max(len(sorted)-n, 0):] {
		sum += v
	}
	return sum
}
