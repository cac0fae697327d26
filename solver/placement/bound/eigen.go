// SPDX-License-Identifier: Apache-2.0

package bound

import (
	"cmp"
	"math"
	"slices"
)

// eigenvalues returns the eigenvalues of a symmetric matrix [n × n], largest first. The matrix is overwritten.
func eigenvalues(m []float64, n int) []float64 {
	diagonal, offDiagonal := tridiagonal(m, n)
	implicitQL(diagonal, offDiagonal, nil)
	slices.SortFunc(diagonal, func(a, b float64) int { return cmp.Compare(b, a) })
	return diagonal
}

// eigenvectors returns eigenvalues, largest first, with their eigenvectors. The matrix is overwritten.
func eigenvectors(m []float64, n int) ([]float64, [][]float64) {
	diagonal, offDiagonal := tridiagonal(m, n)
	// Rows of basis are vectors. The rotations of the iteration turn them into the tridiagonal matrix's eigenvectors.
	basis := make([][]float64, n)
	for i := range basis {
		basis[i] = make([]float64, n)
		basis[i][i] = 1
	}
	implicitQL(diagonal, offDiagonal, basis)
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(diagonal[b], diagonal[a]), a-b) })
	values, vectors := make([]float64, n), make([][]float64, n)
	for i, from := range order {
		values[i], vectors[i] = diagonal[from], basis[from]
		reflectBack(vectors[i], m, n)
	}
	return values, vectors
}

// tridiagonal reduces the matrix by Householder reflections to its diagonal and its off-diagonal (offDiagonal[i]
// couples i and i+1). The k'th reflection vector, of length √2, is stored in row k of the matrix from column k+1 on.
func tridiagonal(m []float64, n int) (diagonal, offDiagonal []float64) {
	diagonal, offDiagonal = make([]float64, n), make([]float64, n)
	product := make([]float64, n)
	for k := range n - 1 {
		row := m[k*n : (k+1)*n]
		diagonal[k] = row[k]
		v := row[k+1:]
		offDiagonal[k] = reflection(v)
		rest := n - k - 1
		// A ← H A H with H = I − v vᵀ: A − v wᵀ − w vᵀ, w = A v − (vᵀ A v / 2) v.
		w := product[:rest]
		along := 0.0
		for i := range rest {
			w[i] = dot(m[(k+1+i)*n+k+1:(k+2+i)*n], v)
			along += w[i] * v[i]
		}
		for i := range rest {
			w[i] -= along / 2 * v[i]
		}
		for i := range rest {
			vi, wi := v[i], w[i]
			target := m[(k+1+i)*n+k+1 : (k+2+i)*n]
			for j := range target {
				target[j] -= vi*w[j] + wi*v[j]
			}
		}
	}
	diagonal[n-1] = m[n*n-1]
	return diagonal, offDiagonal
}

// reflection replaces x by the vector v of length √2 for which (I − v vᵀ) x has only a first entry, and returns this
// entry. If x is already of this form, v is zero.
func reflection(x []float64) float64 {
	norm := 0.0
	for _, value := range x {
		norm = math.Hypot(norm, value)
	}
	first := x[0]
	if norm == math.Abs(first) {
		clear(x)
		return first
	}
	// In a matrix of low rank the rest can be denormal rounding errors. Their squares underflow, but not their ratios
	// to the norm.
	for i := range x {
		x[i] /= norm
	}
	scale := 1 / math.Sqrt(1+math.Abs(x[0]))
	x[0] += math.Copysign(1, first)
	for i := range x {
		x[i] *= scale
	}
	return -math.Copysign(norm, first)
}

// reflectBack applies the reflections stored by tridiagonal in the matrix, last first.
func reflectBack(x, m []float64, n int) {
	for k := n - 2; k >= 0; k-- {
		v := m[k*n+k+1 : (k+1)*n]
		part := x[k+1:]
		along := dot(v, part)
		for i := range part {
			part[i] -= along * v[i]
		}
	}
}

func dot(a, b []float64) float64 {
	sum := 0.0
	for i, v := range a {
		sum += v * b[i]
	}
	return sum
}

// implicitQL diagonalizes a symmetric tridiagonal matrix by QL iteration with implicit shifts (Golub and Van Loan,
// "Matrix Computations", section 8.3). The rotations are applied to the rows of basis, if given.
func implicitQL(d, e []float64, basis [][]float64) {
	const iterations = 60
	n := len(d)
	for l := range n {
		for range iterations {
			m := l
			for ; m < n-1; m++ {
				if math.Abs(e[m]) <= 0x1p-52*(math.Abs(d[m])+math.Abs(d[m+1])) {
					break
				}
			}
			if m == l {
				break
			}
			sweep(d, e, l, m, basis)
		}
	}
}

// sweep chases the bulge of one shifted QL step from m up to l.
func sweep(d, e []float64, l, m int, basis [][]float64) {
	g := (d[l+1] - d[l]) / (2 * e[l])
	g = d[m] - d[l] + e[l]/(g+math.Copysign(math.Hypot(g, 1), g))
	s, c, p := 1.0, 1.0, 0.0
	for i := m - 1; i >= l; i-- {
		f, b := s*e[i], c*e[i]
		r := math.Hypot(f, g)
		e[i+1] = r
		if r == 0 {
			d[i+1] -= p
			e[m] = 0
			return
		}
		s, c = f/r, g/r
		g = d[i+1] - p
		r = (d[i]-g)*s + 2*c*b
		p = s * r
		d[i+1] = g + p
		g = c*r - b
		if basis != nil {
			low, high := basis[i], basis[i+1]
			for k, value := range high {
				high[k] = s*low[k] + c*value
				low[k] = c*low[k] - s*value
			}
		}
	}
	d[l] -= p
	e[l] = g
	e[m] = 0
}
