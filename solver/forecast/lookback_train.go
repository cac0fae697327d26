// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"context"
	"math"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// sequenceShrinkage is the weight, in occurrences, of the distribution after the sequence without its farthest
	// layer, towards which the distribution after a sequence is shrunk.
	sequenceShrinkage = 4
	// maxLookBackSamples and maxLookBackCells (samples × ranks) bound time and memory of fitting the weight of a layer.
	maxLookBackSamples = 1 << 15
	maxLookBackCells   = 1 << 22
	// largestLookBackWeight is the maximum weight of a layer; a weight is below 1 if the sequence and the token carry
	// the same information.
	largestLookBackWeight = 2
	// weightPenalty keeps a weight near 0 without sufficient evidence: the penalty is half of its square.
	weightPenalty = 1
	// newtonSteps is the number of Newton steps; the log-likelihood is concave in the weight, and six digits take five
	// steps.
	newtonSteps = 8
)

// TrainLookBack fits a look-back of the given depth to the listed requests for a placement, given by its hosts in each
// layer.
func TrainLookBack(ctx context.Context, t *trace.Trace, requests []int, hosts []affinity.Hosts, ranks, depth int, seed uint64, progress func(done, total int)) (*LookBack, error) {
	if err := checkDepth(depth, ranks); err != nil {
		return nil, err
	}
	m := &LookBack{Layers: len(hosts), Ranks: ranks, Depth: depth}
	m.Factor = make([]float32, m.Layers*m.Sequences()*ranks)
	profile := t.Subset(requests)
	c, routes := newCorpus(profile), affinity.Routes(profile, hosts, ranks)
	done := affinity.Counter(m.Layers, progress)
	err := affinity.Parallel(ctx, m.Layers, func(l int) {
		r := newSequenceRows(c, routes, hosts[l], ranks, l, depth)
		r.store(m, r.fit(seed))
		done()
	})
	return m, err
}

// sequenceRows contains the rows of token ids and of sequences of ranks in one layer, as sums over positions.
type sequenceRows struct {
	tokenRows
	layer int
	// routes are the ranks of every position in every layer, length is the number of previous layers used.
	routes [][]uint16
	length int
	// sum are the shares per rank summed over all positions after a sequence, n their number, for each length from 1 on
	// [length][sequences × ranks].
	sum, n [][]float32
}

func newSequenceRows(c *corpus, routes [][]uint16, hosts affinity.Hosts, ranks, layer, depth int) *sequenceRows {
	r := &sequenceRows{tokenRows: *newTokenRows(c, hosts, ranks, layer), layer: layer, routes: routes, length: min(depth, layer)}
	for length := 1; length <= r.length; length++ {
		sequences := power(ranks, length)
		r.sum, r.n = append(r.sum, make([]float32, sequences*ranks)), append(r.n, make([]float32, sequences))
	}
	for _, document := range c.documents {
		r.countSequences(document, 1)
	}
	return r
}

// count adds a document to the sums (sign 1) or removes it (sign -1).
func (r *sequenceRows) count(document []int, sign float32) {
	r.tokenRows.count(document, sign)
	r.countSequences(document, sign)
}

func (r *sequenceRows) countSequences(document []int, sign float32) {
	r.corpus.each(document, func(p, _ int) {
		number := r.sequence(p)
		for length := r.length; length > 0; length-- {
			r.n[length-1][number] += sign
			add(r.sum[length-1][number*r.ranks:(number+1)*r.ranks], r.position(p), sign)
			number /= r.ranks // without the farthest layer
		}
	})
}

// sequence returns the number of the sequence before a position.
func (r *sequenceRows) sequence(position int) int {
	return sequence(r.ranks, r.length, func(back int) int { return int(r.routes[r.layer-back][position]) })
}

// shares fills dst with the shares per rank after a sequence of the given length.
func (r *sequenceRows) shares(dst []float32, length, number int) {
	if length == 0 {
		copy(dst, r.prior)
		return
	}
	r.shares(dst, length-1, number/r.ranks)
	n := r.n[length-1][number]
	for rank, sum := range r.sum[length-1][number*r.ranks : (number+1)*r.ranks] {
		dst[rank] = (max(sum, 0) + sequenceShrinkage*dst[rank]) / (n + sequenceShrinkage)
	}
}

// ratios fills dst with the logarithm of the ratio of the shares after a sequence to the average shares.
func (r *sequenceRows) ratios(dst []float32, number int) {
	r.shares(dst, r.length, number)
	for rank, prior := range r.prior {
		if prior == 0 {
			dst[rank] = 0 // a rank that is never used
			continue
		}
		dst[rank] = float32(math.Log(float64(dst[rank] / prior)))
	}
}

// sequenceSamples contains, for positions of documents that are not in the counts, the token's shares and the
// sequence's ratios [samples, ranks], and the mean ratio over the activations of each position.
type sequenceSamples struct {
	ranks          int
	shares, ratios []float32
	mean           []float64
}

// gather collects samples with each document's own counts removed from the rows.
func (r *sequenceRows) gather(seed uint64) *sequenceSamples {
	random := rand.New(rand.NewPCG(seed, 0x6c6f6f6b6261636b^uint64(r.layer)))
	s := &sequenceSamples{ranks: r.ranks}
	shares, ratios := make([]float32, r.ranks), make([]float32, r.ranks)
	for _, d := range random.Perm(len(r.corpus.documents)) {
		if len(s.mean) >= min(maxLookBackSamples, maxLookBackCells/r.ranks) {
			break
		}
		document := r.corpus.documents[d]
		r.count(document, -1)
		r.corpus.each(document, func(p, _ int) {
			r.token(shares, r.corpus.trace.Tokens[p])
			r.ratios(ratios, r.sequence(p))
			mean := 0.0
			for rank, share := range r.position(p) {
				mean += float64(share * ratios[rank])
			}
			s.shares, s.ratios, s.mean = append(s.shares, shares...), append(s.ratios, ratios...), append(s.mean, mean)
		})
		r.count(document, 1)
	}
	return s
}

// fit returns the layer's maximum-likelihood weight by Newton's method. It is 0 if the profile is a single document,
// because no other document remains for the evaluation.
func (r *sequenceRows) fit(seed uint64) float64 {
	if r.length == 0 {
		return 0
	}
	samples, weight := r.gather(seed), 0.0
	for range newtonSteps {
		slope, curvature := samples.likelihood(weight)
		slope, curvature = slope-weightPenalty*weight, curvature+weightPenalty
		weight = min(max(weight+slope/curvature, 0), largestLookBackWeight)
	}
	return weight
}

// likelihood returns the slope and the negative curvature of the log-likelihood at a weight.
func (s *sequenceSamples) likelihood(weight float64) (slope, curvature float64) {
	for i, observed := range s.mean {
		total, mean, square := 0.0, 0.0, 0.0
		shares := s.shares[i*s.ranks : (i+1)*s.ranks]
		for rank, ratio := range s.ratios[i*s.ranks : (i+1)*s.ranks] {
			ratio := float64(ratio)
			share := float64(shares[rank]) * math.Exp(weight*ratio)
			total += share
			mean += share * ratio
			square += share * ratio * ratio
		}
		if total == 0 {
			continue
		}
		mean, square = mean/total, square/total
		slope += observed - mean
		curvature += square - mean*mean
	}
	return slope, curvature
}

// store writes the layer's factors. In the first layers, which have fewer previous layers than the length of a
// sequence, the remaining digits are ignored.
func (r *sequenceRows) store(m *LookBack, weight float64) {
	beyond := power(r.ranks, m.Depth-r.length)
	for number := range m.Sequences() {
		at := (r.layer*m.Sequences() + number) * r.ranks
		factors := m.Factor[at : at+r.ranks]
		r.ratios(factors, number/beyond)
		for rank, ratio := range factors {
			factors[rank] = float32(min(max(math.Exp(weight*float64(ratio)), 1.0/largestFactor), largestFactor))
		}
	}
}
