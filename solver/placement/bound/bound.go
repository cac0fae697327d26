// SPDX-License-Identifier: Apache-2.0

package bound

import (
	"math"
	"slices"
)

// Rows collects the rows (tokens, occurrences of tokens, or requests) with their activations. Columns are the experts
// of one layer, or of several layers side by side. A row has one rank for all its columns.
type Rows struct {
	// ranks is the number of ranks, experts the number per layer, layers the number of layers.
	ranks, experts, layers int
	size                   int
	// gram is Σ T Tᵀ / a, and tangent is Σ a g'(σ) π πᵀ, over rows with activations T, weight a and shares π [size ×
	// size], as upper triangles.
	gram, tangent []float64
	// constant is Σ a (g(σ) − g'(σ) σ), activations is Σ T, weight is Σ a, best is Σ of each row's largest feasible local
	// sum.
	constant, activations, weight, best float64
	largest                             []float64
	// whole bounds the largest share of rows with activations of one each; nil for other rows.
	whole *envelope
}

// New returns an empty set of rows.
func New(ranks, experts, layers int) *Rows {
	size := experts * layers
	return &Rows{
		ranks: ranks, experts: experts, layers: layers, size: size,
		gram: make([]float64, size*size), tangent: make([]float64, size*size),
	}
}

// NewOccurrences returns an empty set of rows for occurrences of tokens in one layer: every row has topK activations of
// one each, for which Tangent is tighter.
func NewOccurrences(ranks, experts, topK int) *Rows {
	r := New(ranks, experts, 1)
	if ranks > 1 {
		r.whole = newEnvelope(topK, ranks, experts/ranks)
	}
	return r
}

// ahead is the position of the tangent point of a whole row, as a fraction of the distance from the incumbent's
// concentration to 1. The spectral bound allows higher concentrations than the incumbent, where this tangent is lower.
// On recorded routing at EP 4, 8 and 16, 0.1 is the best of 0, .03, .06, .1, .15 and .2, or within .002 of the best.
const ahead = 0.1

// touch returns the point where the row's tangent touches the bound on its largest share, and the slope.
func (r *Rows) touch(sigma float64) (value, slope, at float64) {
	if r.whole != nil {
		return r.whole.tangent(sigma + ahead*(1-sigma))
	}
	return r.tangentPoint(sigma)
}

// tangentPoint limits σ to values away from 1/E, where the slope of g is infinite.
func (r *Rows) tangentPoint(sigma float64) (value, slope, at float64) {
	e := float64(r.ranks)
	at = min(max(sigma, 1/e+1e-3), 1)
	root := math.Sqrt((e - 1) * (e*at - 1))
	return (1 + root) / e, (e - 1) / (2 * root), at
}

// Add adds a row: its non-zero columns (ascending) with their activations, its weight a (tokens), and the concentration
// σ = Σ over ranks of (share of the row's activations on the rank)² under an incumbent placement. Rows of
// NewOccurrences have topK columns with one activation each, and weight 1.
func (r *Rows) Add(columns []int, activations []float64, weight, sigma float64) {
	total := 0.0
	for _, t := range activations {
		total += t
	}
	if r.ranks < 2 || total == 0 {
		r.activations, r.weight, r.best = r.activations+total, r.weight+weight, r.best+total
		return
	}
	value, slope, at := r.touch(sigma)
	r.constant += total * (value - slope*at)
	r.activations += total
	r.weight += weight
	r.best += r.feasible(columns, activations)
	for i, column := range columns {
		gramWeight, tangentWeight := activations[i]/weight, slope*activations[i]/total
		gram, tangent := r.gram[column*r.size:(column+1)*r.size], r.tangent[column*r.size:(column+1)*r.size]
		for j := i; j < len(columns); j++ {
			gram[columns[j]] += gramWeight * activations[j]
			tangent[columns[j]] += tangentWeight * activations[j]
		}
	}
}

// feasible returns the largest sum that fits on one rank: the N/E largest entries of each layer.
func (r *Rows) feasible(columns []int, activations []float64) float64 {
	slots, sum := r.experts/r.ranks, 0.0
	for begin := 0; begin < len(columns); {
		end := begin
		r.largest = r.largest[:0]
		for ; end < len(columns) && columns[end]/r.experts == columns[begin]/r.experts; end++ {
			r.largest = append(r.largest, activations[end])
		}
		if len(r.largest) > slots {
			slices.Sort(r.largest)
			r.largest = r.largest[len(r.largest)-slots:]
		}
		for _, t := range r.largest {
			sum += t
		}
		begin = end
	}
	return sum
}

// PerRow returns the bound with a separate placement for every row: the N/E largest entries of each row.
func (r *Rows) PerRow() float64 {
	if r.activations == 0 {
		return 1
	}
	return min(1, r.best/r.activations)
}

// Balanced returns the nuclear-norm bound for assignments in which no rank has more than load times its share of the
// rows' weight. With load equal to the number of ranks it holds for all assignments.
func (r *Rows) Balanced(load float64) float64 {
	if r.ranks < 2 || r.activations == 0 {
		return 1
	}
	e := float64(r.ranks)
	values := eigenvalues(r.centred(r.gram), r.size)
	sum := 0.0
	for i := range min(r.ranks-1, len(values)) {
		sum += math.Sqrt(max(values[i], 0))
	}
	scale := math.Sqrt(load * r.weight / e * float64(r.size) / e)
	return min(1, 1/e+scale*sum/r.activations)
}

// Tangent returns the tangent bound. A row's largest share is at most a concave function of its concentration, which is
// linear in the same-rank matrix. The best same-rank matrix is bounded by the leading eigenvalues, after a correction
// by the given number of subgradient steps (each one an eigendecomposition; 0 means no correction).
func (r *Rows) Tangent(steps int) float64 {
	if r.ranks < 2 || r.activations == 0 {
		return 1
	}
	s := newSameRank(r)
	best := s.value(steps > 0)
	for range steps {
		s.step()
		best = min(best, s.value(true))
	}
	return min(1, (r.constant+best)/r.activations)
}

// centred mirrors the upper triangle and subtracts each layer's mean from rows and columns: P M P.
func (r *Rows) centred(upper []float64) []float64 {
	m := mirrored(upper, r.size)
	r.centre(m)
	return m
}

func mirrored(upper []float64, size int) []float64 {
	m := slices.Clone(upper)
	for i := range size {
		for j := range i {
			m[i*size+j] = m[j*size+i]
		}
	}
	return m
}

func (r *Rows) centre(m []float64) {
	n := float64(r.experts)
	for i := range r.size {
		for begin := 0; begin < r.size; begin += r.experts {
			part := m[i*r.size+begin : i*r.size+begin+r.experts]
			mean := 0.0
			for _, v := range part {
				mean += v / n
			}
			for j := range part {
				part[j] -= mean
			}
		}
	}
	for j := range r.size {
		for begin := 0; begin < r.size; begin += r.experts {
			mean := 0.0
			for i := begin; i < begin+r.experts; i++ {
				mean += m[i*r.size+j] / n
			}
			for i := begin; i < begin+r.experts; i++ {
				m[i*r.size+j] -= mean
			}
		}
	}
}

// sameRank bounds max ⟨M, Y⟩ over 0/1 matrices Y, where an entry is 1 if two columns share a rank. For any symmetric U
// with off-diagonal entries of at most 0,
// off-diagonal entries are at most 0,
//
//	⟨M, Y⟩ ≤ ⟨M−U, J⟩/E + (columns/E) Σ_{i<E} λ⁺_i(P (M−U) P) + tr U,
//
// because Y has ones on its diagonal and non-negative entries elsewhere.
type sameRank struct {
	rows *Rows
	// m is M−U; trace is tr U.
	m     []float64
	upper []float64
	trace float64
	// vectors are the leading eigenvectors of the last value, current is that value, lowest the minimum so far.
	vectors [][]float64
	current float64
	lowest  float64
	shrink  float64
}

func newSameRank(r *Rows) *sameRank {
	m := mirrored(r.tangent, r.size)
	return &sameRank{rows: r, m: m, upper: slices.Clone(m), lowest: math.Inf(1), shrink: 1}
}

func (s *sameRank) value(withVectors bool) float64 {
	size, e := s.rows.size, float64(s.rows.ranks)
	sum := 0.0
	for _, v := range s.m {
		sum += v
	}
	centred := slices.Clone(s.m)
	s.rows.centre(centred)
	var values []float64
	s.vectors = s.vectors[:0]
	if withVectors {
		var columns [][]float64
		values, columns = eigenvectors(centred, size)
		for i := range min(s.rows.ranks-1, size) {
			if values[i] > 0 {
				s.vectors = append(s.vectors, columns[i])
			}
		}
	} else {
		values = eigenvalues(centred, size)
	}
	leading := 0.0
	for i := range min(s.rows.ranks-1, size) {
		leading += max(values[i], 0)
	}
	s.current = sum/e + float64(size)/e*leading + s.trace
	if s.current >= s.lowest {
		s.shrink *= 0.8
	}
	s.lowest = min(s.lowest, s.current)
	return s.current
}

// step moves U against the subgradient I − Ŷ, where Ŷ = J/E + (columns/E) V Vᵀ is the relaxed same-rank matrix of the
// leading eigenvectors.
func (s *sameRank) step() {
	size, e := s.rows.size, float64(s.rows.ranks)
	gradient := make([]float64, size*size)
	norm := 0.0
	for k := range size {
		for l := k; l < size; l++ {
			y := 0.0
			for _, v := range s.vectors {
				y += v[k] * v[l]
			}
			y = 1/e + float64(size)/e*y
			d := -y
			if k == l {
				d = 1 - y
			} else if u := s.upper[k*size+l] - s.m[k*size+l]; u >= 0 && d < 0 {
				d = 0
			}
			gradient[k*size+l], gradient[l*size+k] = d, d
			norm += d * d
			if l > k {
				norm += d * d
			}
		}
	}
	if norm < 1e-9 {
		// The relaxation is tight: the gradient contains only rounding errors.
		return
	}
	// The unknown optimum is a few percent lower. The step aims there and becomes shorter after each overshoot.
	length := s.shrink * 0.05 * math.Abs(s.current) / norm
	s.trace = 0
	for k := range size {
		for l := range size {
			u := s.upper[k*size+l] - s.m[k*size+l] - length*gradient[k*size+l]
			if k != l {
				u = min(u, 0)
			} else {
				s.trace += u
			}
			s.m[k*size+l] = s.upper[k*size+l] - u
		}
	}
}
