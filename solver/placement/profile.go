// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/affinity"
)

// profileSize is the number of dimensions to which request profiles are reduced.
const profileSize = 32

// profile contains the requests as points: their centered expert shares, reduced by a random projection that
// approximately preserves distances (Johnson-Lindenstrauss), and then turned to the principal directions of the
// requests.
type profile struct {
	points [][]float32
}

func newProfile(c *affinity.RequestCounts) *profile {
	width := c.Layers * c.Experts
	mean := make([]float32, width)
	tokens := float32(0)
	for r, row := range c.Rows {
		for x, count := range row {
			mean[x] += count
		}
		tokens += c.Tokens[r]
	}
	for x := range mean {
		mean[x] /= tokens
	}
	size := min(profileSize, width, len(c.Rows))
	basis := randomBasis(size, width)
	// Subspace iteration: every pass multiplies the basis by the covariance, which turns it to the principal
	// directions.
	const passes = 4
	points := make([][]float32, len(c.Rows))
	for r := range points {
		points[r] = make([]float32, size)
	}
	centred := make([]float32, width)
	centre := func(r int) []float32 {
		for x, count := range c.Rows[r] {
			centred[x] = count/c.Tokens[r] - mean[x]
		}
		return centred
	}
	// This many requests suffice to estimate the principal directions.
	const enough = 1024
	stride := (len(c.Rows) + enough - 1) / enough
	for range passes {
		next := zeroBasis(size, width)
		for r := 0; r < len(c.Rows); r += stride {
			row := centre(r)
			for i, direction := range basis {
				add(next[i], row, dot(row, direction))
			}
		}
		orthonormalize(next)
		basis = next
	}
	for r := range c.Rows {
		row := centre(r)
		for i, direction := range basis {
			points[r][i] = dot(row, direction)
		}
	}
	return &profile{points}
}

func zeroBasis(size, width int) [][]float32 {
	basis := make([][]float32, size)
	for i := range basis {
		basis[i] = make([]float32, width)
	}
	return basis
}

// randomBasis returns the same starting basis for every problem.
func randomBasis(size, width int) [][]float32 {
	random := rand.New(rand.NewPCG(1, 1))
	basis := zeroBasis(size, width)
	for _, direction := range basis {
		for x := range direction {
			direction[x] = float32(random.NormFloat64())
		}
	}
	orthonormalize(basis)
	return basis
}

// orthonormalize applies the Gram-Schmidt process, in order. A vanishing direction becomes zero.
func orthonormalize(basis [][]float32) {
	for i, direction := range basis {
		for _, earlier := range basis[:i] {
			add(direction, earlier, -dot(direction, earlier))
		}
		norm := float32(math.Sqrt(float64(dot(direction, direction))))
		for x := range direction {
			if norm > 1e-12 {
				direction[x] /= norm
			} else {
				direction[x] = 0
			}
		}
	}
}

func dot(a, b []float32) float32 {
	sum := float32(0)
	for i, v := range a {
		sum += v * b[i]
	}
	return sum
}

func add(to, from []float32, weight float32) {
	for i, v := range from {
		to[i] += weight * v
	}
}

func squaredDistance(a, b []float32) float32 {
	sum := float32(0)
	for i, v := range a {
		sum += (v - b[i]) * (v - b[i])
	}
	return sum
}

// spread chooses n initial centers by k-means++ (Arthur and Vassilvitskii 2007): each next center is a point drawn with
// a probability proportional to its squared distance to the previous centers.
func (p *profile) spread(n int, random *rand.Rand) [][]float32 {
	centers := [][]float32{append([]float32(nil), p.points[random.IntN(len(p.points))]...)}
	distance := make([]float64, len(p.points))
	for len(centers) < n {
		total := 0.0
		for r, point := range p.points {
			d := float64(squaredDistance(point, centers[len(centers)-1]))
			if len(centers) == 1 || d < distance[r] {
				distance[r] = d
			}
			total += distance[r]
		}
		pick, at := random.Float64()*total, 0
		for at < len(distance)-1 && pick >= distance[at] {
			pick -= distance[at]
			at++
		}
		centers = append(centers, append([]float32(nil), p.points[at]...))
	}
	return centers
}

// means moves each center to the mean of its points, weighted by size. A center without points stays.
func (p *profile) means(centers [][]float32, ranks []int, sizes []float32) {
	for i, centre := range centers {
		total := float32(0)
		sum := make([]float32, len(centre))
		for r, rank := range ranks {
			if rank == i {
				add(sum, p.points[r], sizes[r])
				total += sizes[r]
			}
		}
		if total > 0 {
			for x := range centre {
				centre[x] = sum[x] / total
			}
		}
	}
}
