package drift

import (
	"fmt"
	"math"
	"slices"
)

// Text is what the tokens of a request say of its local share beyond what its forecast does: a linear function of the shares of its
// tokens in buckets of token ids. Requests of one domain are made of the same tokens, and it is in their domains that residuals differ.
type Text struct {
	// Weights are local shares, one for each bucket; over the requests that they were learnt from the mean of Of is 0.
	Weights []float32 `json:"weights"`
}

// Buckets is the number of buckets of token ids: twice as many explain hardly more of residuals, a quarter of them a third less.
const Buckets = 256

// bucketOf is a token's bucket, by multiplicative hashing (Knuth, The Art of Computer Programming 3, section 6.4): the highest bits of the
// product with a number near the golden ratio of 32 bits.
func bucketOf(token int32) int { return int(uint32(token) * 2654435761 >> 24) }

// Bag are the shares of tokens by bucket [Buckets]; all are 0 where there are none.
func Bag(tokens []int32) []float32 {
	bag := make([]float32, Buckets)
	for _, token := range tokens {
		bag[bucketOf(token)] += 1 / float32(len(tokens))
	}
	return bag
}

// Of is what the tokens of a bag say; 0 where nothing was learnt.
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
	if len(t.Weights) != Buckets {
		return fmt.Errorf("text.weights has %d entries; there are %d buckets", len(t.Weights), Buckets)
	}
	for _, weight := range t.Weights {
		if !finite(float64(weight)) {
			return fmt.Errorf("text.weights must be numbers; one is %v", weight)
		}
	}
	return nil
}

// told are the requests with what their tokens say.
func (t *Text) told(requests []Request) []Request {
	told := slices.Clone(requests)
	for i := range told {
		told[i].text = t.Of(told[i].Bag)
	}
	return told
}

// folds is in how many parts documents are parted to see what is learnt from the others.
const folds = 10

func foldOf(r Request) int { return bucketOf(int32(r.Document)) % folds }

// penalties are those that are tried, relative to the mean variance of a feature over all requests.
var penalties = []float64{0.03, 0.1, 0.3, 1, 3, 10}

// learnText learns from residuals what tokens say, by ridge regression. Told are the requests with what is learnt from documents of other
// folds than theirs: a test must not be judged by what it was fitted to. The penalty is the one with which that explains most; where none
// explains anything, there is no text.
func learnText(requests []Request, residuals []float64) (text *Text, told []Request) {
	l := newLesson(requests, residuals)
	least := l.unexplained(requests)
	for _, relative := range penalties {
		penalty := relative * l.all.meanVariance()
		if penalty == 0 {
			break // all requests have the same tokens
		}
		crossed := l.crossed(penalty)
		if left := l.unexplained(crossed); left < least {
			least, text, told = left, l.features.text(l.all.solve(penalty)), crossed
		}
	}
	return text, told
}

// lesson is what text is learnt from: the sums of all requests, and of those of each fold.
type lesson struct {
	requests []Request
	// residuals are about their mean.
	residuals []float64
	features  *features
	all       ridge
	parts     [folds]ridge
}

func newLesson(requests []Request, residuals []float64) *lesson {
	l := &lesson{requests: requests, residuals: slices.Clone(residuals), features: newFeatures(requests)}
	mean := 0.0
	for _, residual := range residuals {
		mean += residual / float64(len(residuals))
	}
	for i, r := range requests {
		l.residuals[i] -= mean
		x := l.features.of(r.Bag)
		l.all.add(x, l.residuals[i])
		l.parts[foldOf(r)].add(x, l.residuals[i])
	}
	return l
}

// crossed are the requests with what documents of other folds say of their tokens.
func (l *lesson) crossed(penalty float64) []Request {
	crossed := slices.Clone(l.requests)
	for fold := range l.parts {
		text := l.features.text(l.all.without(&l.parts[fold]).solve(penalty))
		for i, r := range crossed {
			if foldOf(r) == fold {
				crossed[i].text = text.Of(r.Bag)
			}
		}
	}
	return crossed
}

// unexplained is the sum of the squares of what residuals are beyond what tokens say.
func (l *lesson) unexplained(requests []Request) float64 {
	sum := 0.0
	for i, r := range requests {
		left := l.residuals[i] - r.text
		sum += left * left
	}
	return sum
}

// features are bags about their mean, each bucket divided by the standard deviation of a count with its mean (Poisson): without
// that the few most frequent tokens have all the say.
type features struct{ mean, scale [Buckets]float64 }

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

// text is the function of bags that slopes on features are. The constant is part of all weights: shares sum to 1.
func (f *features) text(slopes *vector) *Text {
	constant := 0.0
	for i, slope := range slopes {
		constant += slope * f.scale[i] * f.mean[i]
	}
	t := Text{Weights: make([]float32, Buckets)}
	for i, slope := range slopes {
		t.Weights[i] = float32(slope*f.scale[i] - constant)
	}
	return &t
}

type vector [Buckets]float64

// ridge holds the sums of a regression on features; of xx, which is symmetric, the lower half.
type ridge struct {
	xx [Buckets]vector
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

// without are the sums less those of a part.
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
	return sum / Buckets
}

// solve finds the slopes by Cholesky's decomposition; a penalty above 0 keeps it from failing.
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
	for i := Buckets - 1; i >= 0; i-- {
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
