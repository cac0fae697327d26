// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"context"
	"math/rand/v2"
)

// PartLayers randomly assigns the occurrences of every token id to two sets, the given percentage to the first. It is
// the way to split counts, which do not identify documents. Both sets contain the activations of whole occurrences.
func PartLayers(ctx context.Context, layers []Counts, percent int, seed uint64) (first, second []Counts, err error) {
	if len(layers) == 0 {
		return nil, nil, nil
	}
	taken := make([]int, layers[0].Vocabulary())
	random := rand.New(rand.NewPCG(seed, 0x70617274))
	for id, n := range layers[0].Occurrences {
		for range int(n) {
			if random.IntN(100) < percent {
				taken[id]++
			}
		}
	}
	first, second = make([]Counts, len(layers)), make([]Counts, len(layers))
	err = Parallel(ctx, len(layers), func(l int) {
		first[l], second[l] = layers[l].part(taken, rand.New(rand.NewPCG(seed, uint64(l)+1)))
	})
	return first, second, err
}

// part draws the activations of some occurrences of each token id without replacement.
func (c *Counts) part(taken []int, random *rand.Rand) (first, second Counts) {
	sides := [2]Counts{}
	for i := range sides {
		sides[i] = Counts{Experts: c.Experts, TopK: c.TopK, Start: make([]int, c.Vocabulary()+1), Occurrences: make([]float32, c.Vocabulary())}
	}
	row, rest := make([]float32, c.Experts), make([]float32, c.Experts)
	for id := range c.Vocabulary() {
		n := c.addRow(rest, id, 1)
		c.draw(row, rest, id, min(taken[id], int(n))*c.TopK, random)
		sides[0].Occurrences[id] = float32(min(taken[id], int(n)))
		sides[1].Occurrences[id] = n - sides[0].Occurrences[id]
		sides[0].appendRow(row)
		sides[1].appendRow(rest)
		for i := range sides {
			sides[i].Start[id+1] = len(sides[i].Expert)
		}
	}
	return sides[0], sides[1]
}

// draw moves wanted activations of a token id from rest to row, uniformly at random.
func (c *Counts) draw(row, rest []float32, id, wanted int, random *rand.Rand) {
	experts, counts := c.Row(id)
	left := 0
	for _, n := range counts {
		left += int(n)
	}
	for i, e := range experts {
		for range int(counts[i]) {
			if random.IntN(left) < wanted {
				row[e]++
				rest[e]--
				wanted--
			}
			left--
		}
	}
}
