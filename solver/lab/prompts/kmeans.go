// SPDX-License-Identifier: Apache-2.0

package prompts

import "math/rand/v2"

const (
	// kmeansStarts is the number of starts, of which the smallest sum of squared distances wins. kmeansRounds is the
	// maximum number of rounds per start.
	kmeansStarts = 4
	kmeansRounds = 50
)

// Clusters contains the centres of k-means.
type Clusters struct{ centres [][]float32 }

// KMeans clusters points around at most k centres (Lloyd), with initial centres drawn by k-means++.
func KMeans(points [][]float32, k int, seed uint64) *Clusters {
	var best *Clusters
	smallest := 0.0
	for start := range kmeansStarts {
		c, sum := lloyd(points, k, rand.New(rand.NewPCG(seed, uint64(start))))
		if best == nil || sum < smallest {
			best, smallest = c, sum
		}
	}
	return best
}

func lloyd(points [][]float32, k int, random *rand.Rand) (*Clusters, float64) {
	c := initialCentres(points, min(k, len(points)), random)
	last := -1.0
	for range kmeansRounds {
		sums, counts, sum := make([][]float32, len(c.centres)), make([]float32, len(c.centres)), 0.0
		for _, point := range points {
			nearest, distance := c.nearest(point)
			sum += distance
			counts[nearest]++
			if sums[nearest] == nil {
				sums[nearest] = make([]float32, len(point))
			}
			for i, v := range point {
				sums[nearest][i] += v
			}
		}
		if sum == last {
			break
		}
		last = sum
		for j, centre := range c.centres {
			for i := range sums[j] {
				centre[i] = sums[j][i] / counts[j]
			}
		}
	}
	return c, last
}

// initialCentres draws points as centres (k-means++): the probability of a point is proportional to the squared
// distance to its nearest centre.
func initialCentres(points [][]float32, k int, random *rand.Rand) *Clusters {
	c := &Clusters{}
	pick := random.IntN(len(points))
	for {
		c.centres = append(c.centres, append([]float32(nil), points[pick]...))
		if len(c.centres) == k {
			return c
		}
		distances, total := make([]float64, len(points)), 0.0
		for i, point := range points {
			_, distances[i] = c.nearest(point)
			total += distances[i]
		}
		at := random.Float64() * total
		for pick = 0; pick < len(points)-1 && at >= distances[pick]; pick++ {
			at -= distances[pick]
		}
	}
}

// Nearest returns the index of the centre nearest to a point.
func (c *Clusters) Nearest(point []float32) int {
	nearest, _ := c.nearest(point)
	return nearest
}

func (c *Clusters) nearest(point []float32) (at int, smallest float64) {
	for j, centre := range c.centres {
		distance := 0.0
		for i, v := range point {
			d := float64(v - centre[i])
			distance += d * d
		}
		if j == 0 || distance < smallest {
			at, smallest = j, distance
		}
	}
	return at, smallest
}
