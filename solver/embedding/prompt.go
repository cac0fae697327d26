package embedding

import (
	"math"
	"math/rand/v2"
)

// Table is a vector for each token id.
type Table struct {
	// Tokens and Size are the shape.
	Tokens, Size int
	// Values are the vectors [tokens × size].
	Values []float32
}

// Vector is that of one token id.
func (t *Table) Vector(id int32) []float32 { return t.Values[int(id)*t.Size : (int(id)+1)*t.Size] }

// Projected returns a table of random signs: the mean over a prompt's tokens is then the bag of its words, reduced by a random
// projection that keeps the distances between bags up to a small error (Johnson and Lindenstrauss). It needs no model.
func Projected(tokens, size int, seed uint64) *Table {
	t := &Table{Tokens: tokens, Size: size, Values: make([]float32, tokens*size)}
	random := rand.New(rand.NewPCG(seed, 0x70726f6a656374))
	step := float32(1 / math.Sqrt(float64(size)))
	for begin := 0; begin < len(t.Values); begin += 64 {
		signs := random.Uint64()
		for i := range t.Values[begin:min(begin+64, len(t.Values))] {
			t.Values[begin+i] = step
			if signs>>i&1 == 1 {
				t.Values[begin+i] = -step
			}
		}
	}
	return t
}

// Prompt is the mean of the vectors of a prompt's tokens; token ids beyond the table do not count.
func (t *Table) Prompt(tokens []int32) []float32 {
	point := make([]float32, t.Size)
	counted := float32(0)
	for _, id := range tokens {
		if id < 0 || int(id) >= t.Tokens {
			continue
		}
		counted++
		for i, v := range t.Vector(id) {
			point[i] += v
		}
	}
	for i := range point {
		point[i] /= max(counted, 1)
	}
	return point
}

// Space compares prompts by direction, seen from the mean prompt: words that every prompt has say nothing.
type Space struct{ mean []float32 }

// NewSpace is the space around the mean of points.
func NewSpace(points [][]float32) *Space {
	s := &Space{make([]float32, len(points[0]))}
	for _, point := range points {
		for i, v := range point {
			s.mean[i] += v / float32(len(points))
		}
	}
	return s
}

// Direction is the unit vector from the mean to a point; that of the mean is zero.
func (s *Space) Direction(point []float32) []float32 {
	direction, squares := make([]float32, len(point)), 0.0
	for i, v := range point {
		direction[i] = v - s.mean[i]
		squares += float64(direction[i]) * float64(direction[i])
	}
	if squares > 0 {
		scale := float32(1 / math.Sqrt(squares))
		for i := range direction {
			direction[i] *= scale
		}
	}
	return direction
}
