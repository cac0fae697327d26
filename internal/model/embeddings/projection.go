// SPDX-License-Identifier: Apache-2.0

package embeddings

import (
	"math"
	"math/rand/v2"
	"runtime"

	"golang.org/x/sync/errgroup"
)

const (
	// sampledRows is the maximum number of rows from which the projection is computed.
	sampledRows = 2048
	// iterations is the number of subspace iterations. The spectrum of embeddings decays slowly, but any basis of most of
	// the variance suffices.
	iterations = 4
	// seed is the seed of the first basis.
	seed = 0x656d62656464
)

// projection maps rows to their coordinates in the subspace of the largest principal components. A random projection to
// as few numbers changes cosines by up to a tenth, which is more than the differences between a token's neighbours.
type projection struct {
	width, to int
	// basis contains, for each input, its part in each output [width × to]. It is nil if inputs are short enough to be
	// kept.
	basis []float32
}

// newProjection returns the projection for sampled rows, by randomized subspace iteration (Halko, Martinsson and Tropp,
// Finding Structure with Randomness, 2011). It centres the rows.
func newProjection(rows []float32, width int) *projection {
	if width <= Dimensions {
		return &projection{width: width, to: width}
	}
	n := len(rows) / width
	for d := range width {
		sum := 0.0
		for i := range n {
			sum += float64(rows[i*width+d])
		}
		for i := range n {
			rows[i*width+d] -= float32(sum / float64(n))
		}
	}
	p := &projection{width: width, to: Dimensions, basis: make([]float32, width*Dimensions)}
	random := rand.New(rand.NewPCG(seed, uint64(width)))
	for i := range p.basis {
		p.basis[i] = float32(random.NormFloat64())
	}
	coordinates := make([]float32, n*Dimensions)
	for range iterations {
		p.orthonormalize()
		clear(coordinates)
		p.applyAll(coordinates, rows)
		parallel(width, func(d int) {
			part := p.basis[d*Dimensions : (d+1)*Dimensions]
			clear(part)
			for i := range n {
				axpy(part, rows[i*width+d], coordinates[i*Dimensions:])
			}
		})
	}
	p.orthonormalize()
	return p
}

// orthonormalize applies the modified Gram-Schmidt process to the outputs. Outputs that depend on earlier ones become
// 0.
func (p *projection) orthonormalize() {
	outputs := make([][]float64, p.to)
	for k := range outputs {
		outputs[k] = make([]float64, p.width)
		before := 0.0
		for d := range outputs[k] {
			outputs[k][d] = float64(p.basis[d*p.to+k])
			before += outputs[k][d] * outputs[k][d]
		}
		for _, other := range outputs[:k] {
			product := 0.0
			for d, v := range other {
				product += v * outputs[k][d]
			}
			for d, v := range other {
				outputs[k][d] -= product * v
			}
		}
		after := 0.0
		for _, v := range outputs[k] {
			after += v * v
		}
		scale := 0.0
		const dependent = 1e-10 // rounding leaves this share of the squared length
		if after > dependent*before {
			scale = 1 / math.Sqrt(after)
		}
		for d := range outputs[k] {
			outputs[k][d] *= scale
			p.basis[d*p.to+k] = float32(outputs[k][d])
		}
	}
}

// applyAll writes the projections of rows to dst, which is zero.
func (p *projection) applyAll(dst, rows []float32) {
	parallel(len(rows)/p.width, func(i int) {
		p.apply(dst[i*p.to:(i+1)*p.to], rows[i*p.width:(i+1)*p.width])
	})
}

// apply writes the projection of a row to dst, which is zero.
func (p *projection) apply(dst, row []float32) {
	if p.basis == nil {
		copy(dst, row)
		return
	}
	for d, v := range row {
		axpy(dst, v, p.basis[d*Dimensions:])
	}
}

// axpy adds Dimensions values of x, times a factor, to dst.
func axpy(dst []float32, factor float32, x []float32) {
	to, from := (*[Dimensions]float32)(dst), (*[Dimensions]float32)(x)
	for k := range to {
		to[k] += float32(factor * from[k])
	}
}

// parallel calls do for 0 to n-1 on all processors. Results do not depend on the number of processors.
func parallel(n int, do func(i int)) {
	var group errgroup.Group
	workers := min(n, runtime.GOMAXPROCS(0))
	for w := range workers {
		group.Go(func() error {
			for i := w; i < n; i += workers {
				do(i)
			}
			return nil
		})
	}
	_ = group.Wait() // the functions return no error
}
