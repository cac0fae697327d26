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

// Projection is a table of random signs: the mean over a prompt's tokens is then the bag of its words, reduced by a random projection
// that keeps the distances between bags up to a small error (Johnson and Lindenstrauss). It needs no model.
type Projection struct {
	tokens, size int
	// signs has a bit for each value of the vectors [tokens × size], set where the value is negative.
	signs []uint64
}

// Projected returns the projection of that many token ids.
func Projected(tokens, size int, seed uint64) *Projection {
	p := &Projection{tokens: tokens, size: size, signs: make([]uint64, (tokens*size+63)/64)}
	random := rand.New(rand.NewPCG(seed, 0x70726f6a656374))
	for i := range p.signs {
		p.signs[i] = random.Uint64()
	}
	return p
}

// Prompt is Table.Prompt for vectors of length 1.
func (p *Projection) Prompt(tokens []int32) []float32 {
	step := float32(1 / math.Sqrt(float64(p.size)))
	return prompt(tokens, p.tokens, p.size, func(point []float32, id int32) {
		begin := int(id) * p.size
		for i := range point {
			if p.signs[(begin+i)/64]>>((begin+i)%64)&1 == 1 {
				point[i] -= step
			} else {
				point[i] += step
			}
		}
	})
}

// prompt is the mean over tokens of what add adds for each; token ids beyond the vocabulary do not count.
func prompt(tokens []int32, vocabulary, size int, add func(point []float32, id int32)) []float32 {
	point := make([]float32, size)
	counted := float32(0)
	for _, id := range tokens {
		if id >= 0 && int(id) < vocabulary {
			counted++
			add(point, id)
		}
	}
	for i := range point {
		point[i] /= max(counted, 1)
	}
	return point
}

// Prompt is the mean of the vectors of a prompt's tokens; token ids beyond the table do not count.
func (t *Table) Prompt(tokens []int32) []float32 {
	return prompt(tokens, t.Tokens, t.Size, func(point []float32, id int32) {
		for i, v := range t.Vector(id) {
			point[i] += v
		}
	})
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
