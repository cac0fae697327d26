// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"fmt"
	"math"
	"slices"
)

// Text is a linear model of the local share on the token ids of a request, in addition to its forecast. Its inputs are
// the shares of tokens in buckets of token ids. Requests of one domain contain the same tokens, and residuals differ
// mainly between domains.
type Text struct {
	// Weights are local shares, one per bucket. The mean of Of over the training requests is 0.
	Weights []float32 `json:"weights"`
}

// buckets is the number of buckets of token ids. Twice as many hardly explain more of the residuals, a quarter as many
// explain a third less.
const buckets = 256

// bucketOf returns the bucket of a token by multiplicative hashing (Knuth, The Art of Computer Programming 3, section
// 6.4): the highest bits of the product with a number near the golden ratio of 32 bits.
func bucketOf(token int32) int { return int(uint32(token) * 2654435761 >> 24) }

// Bag returns the share of the tokens in each bucket [buckets]; all shares are 0 without tokens.
func Bag(tokens []int32) []float32 {
	bag := make([]float32, buckets)
	for _, token := range tokens {
		bag[bucketOf(token)] += 1 / float32(len(tokens))
	}
	return bag
}

// Of returns the text term of a bag, a local share. It is 0 for a nil Text and for a bag of another size.
func (t *Text) Of(bag []float32) float64 {
	if t == nil || len(bag) != len(t.Weights) {
		return 0
	}
	sum := 0.0
	for i, share := range bag {
		sum += float64(share) * float64(t.Weights[i])
	}
	return sum
}

func (t *Text) validate() error {
	if len(t.Weights) != buckets {
		return fmt.Errorf("text.weights has %d entries; there are %d buckets", len(t.Weights), buckets)
	}
	for _, weight := range t.Weights {
		if !finite(float64(weight)) {
			return fmt.Errorf("text.weights must be numbers; one is %v", weight)
		}
	}
	return nil
}

// apply returns a copy of the requests with their text terms.
func (t *Text) apply(requests []Request) []Request {
	applied := slices.Clone(requests)
	for i := range applied {
		applied[i].text = t.Of(applied[i].Bag)
	}
	return applied
}

// folds is the number of cross-validation folds. Folds consist of whole documents.
const folds = 10

func foldOf(r Request) int { return bucketOf(int32(r.Document)) % folds }

// penalties are the ridge penalties to try, relative to the mean variance of a feature over all requests.
var penalties = []float64{0.03, 0.1, 0.3, 1, 3, 10}

// fitText fits a text model to residuals by ridge regression. It selects the penalty with the smallest cross-validated
// residual sum of squares, and returns nil if no penalty improves on no model. The returned requests carry text terms
// from models that were fitted to documents of other folds: a test must not be evaluated on its training data.
func fitText(requests []Request, residuals []float64) (text *Text, withText []Request) {
	l := newTextTraining(requests, residuals)
	smallest := l.residualSumOfSquares(requests)
	for _, relative := range penalties {
		penalty := relative * l.all.meanVariance()
		if penalty == 0 {
			break // all requests have the same bag
		}
		fitted := l.crossFitted(penalty)
		if sum := l.residualSumOfSquares(fitted); sum < smallest {
			smallest, text, withText = sum, l.features.text(l.all.solve(penalty)), fitted
		}
	}
	return text, withText
}

// textTraining contains the regression sums of all requests and of each fold.
type textTraining struct {
	requests []Request
	// residuals are centred at their mean.
	residuals []float64
	features  *features
	all       ridge
	folds     [folds]ridge
}

func newTextTraining(requests []Request, residuals []float64) *textTraining {
	l := &textTraining{requests: requests, residuals: slices.Clone(residuals), features: newFeatures(requests)}
	mean := 0.0
	for _, residual := range residuals {
		mean += residual / float64(len(residuals))
	}
	for i, r := range requests {
		l.residuals[i] -= mean
		x := l.features.of(r.Bag)
		l.all.add(x, l.residuals[i])
		l.folds[foldOf(r)].add(x, l.residuals[i])
	}
	return l
}

// crossFitted returns the requests with text terms from models of the other folds.
func (l *textTraining) crossFitted(penalty float64) []Request {
	fitted := slices.Clone(l.requests)
	for fold := range l.folds {
		text := l.features.text(l.all.without(&l.folds[fold]).solve(penalty))
		for i, r := range fitted {
			if foldOf(r) == fold {
				fitted[i].text = text.Of(r.Bag)
			}
		}
	}
	return fitted
}

// residualSumOfSquares returns the sum of squares of residuals minus text terms.
func (l *textTraining) residualSumOfSquares(requests []Request) float64 {
	sum := 0.0
	for i, r := range requests {
		rest := l.residuals[i] - r.text
		sum += rest * rest
	}
	return sum
}

// features transforms bags: centred at the mean, each bucket divided by the standard deviation of a Poisson count with
// its mean. Without this scaling, the few most frequent tokens dominate.
type features struct{ mean, scale [buckets]float64 }

func newFeatures(requests []Request) *features {
	var f features
	for _, r := range requests {
		for i, share := range r.Bag {
			f.mean[i] += float64(share) / float64(len(requests))
		}
	}
	for i, mean := range f.mean {
		if mean > 0 {
			f.scale[i] = 1 / math.Sqrt(mean)
		}
	}
	return &f
}

func (f *features) of(bag []float32) *vector {
	var x vector
	for i, share := range bag {
		x[i] = (float64(share) - f.mean[i]) * f.scale[i]
	}
	return &x
}

// text converts slopes on features into weights of bags. The constant is included in every weight, because shares sum
// to 1.
func (f *features) text(slopes *vector) *Text {
	constant := 0.0
	for i, slope := range slopes {
		constant += slope * f.scale[i] * f.mean[i]
	}
	t := Text{Weights: make([]float32, buckets)}
	for i, slope := range slopes {
		t.Weights[i] = float32(slope*f.scale[i] - constant)
	}
	return &t
}

type vector [buckets]float64

// ridge accumulates the sums of a ridge regression on features. Only the lower triangle of the symmetric xx is used.
type ridge struct {
	xx [buckets]vector
	xy vector
}

func (r *ridge) add(x *vector, y float64) {
	for i, xi := range x {
		for j, xj := range x[:i+1] {
			r.xx[i][j] += xi * xj
		}
		r.xy[i] += xi * y
	}
}

// without returns the sums minus those of a fold.
func (r *ridge) without(part *ridge) *ridge {
	rest := *r
	for i := range rest.xx {
		for j := range i + 1 {
			rest.xx[i][j] -= part.xx[i][j]
		}
		rest.xy[i] -= part.xy[i]
	}
	return &rest
}

func (r *ridge) meanVariance() float64 {
	sum := 0.0
	for i := range r.xx {
		sum += r.xx[i][i]
	}
	return sum / buckets
}

// solve returns the slopes by Cholesky decomposition, which cannot fail with a penalty above 0.
func (r *ridge) solve(penalty float64) *vector {
	lower, slopes := r.xx, r.xy
	for i := range lower {
		row := &lower[i]
		row[i] += penalty
		for j := range i {
			row[j] = (row[j] - dot(row[:j], lower[j][:j])) / lower[j][j]
		}
		row[i] = math.Sqrt(row[i] - dot(row[:i], row[:i]))
		slopes[i] = (slopes[i] - dot(row[:i], slopes[:i])) / row[i]
	}
	for i := buckets - 1; i >= 0; i-- {
		slopes[i] /= lower[i][i]
		for j := range i {
			slopes[j] -= lower[i][j] * slopes[i]
		}
	}
	return &slopes
}

func dot(a, b []float64) float64 {
	sum := 0.0
	for i, x := range a {
		sum += x * b[i]
	}
	return sum
}
