// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/semmoe/operator/solver/embedding"
)

// Neighbours contains, for each token id that a profile has not seen, the most similar seen token ids.
type Neighbours struct {
	// Nearest contains up to neighbours ids for each token id, nearest first. It is empty for seen ids and for ids with
	// a zero embedding.
	Nearest [][]int32
}

// Tokens returns the number of token ids that have neighbours.
func (n *Neighbours) Tokens() int {
	tokens := 0
	for _, near := range n.Nearest {
		tokens += min(len(near), 1)
	}
	return tokens
}

const (
	// neighbours is the number of rows that replace the row of an unseen token.
	neighbours = 8
	// maxCandidates bounds the work: neighbours are selected among this many of the most frequent seen tokens, which
	// have the most reliable rows.
	maxCandidates = 4096
	// neighbourBlock is the number of unseen tokens that are compared with all seen tokens together, in blocks of
	// seenBlock tokens: as many vectors of a thousand values as fit into a second-level cache.
	neighbourBlock = 64
	seenBlock      = 128
)

// NearestSeen returns the seen tokens nearest to each unseen token by the cosine of their embeddings. occurrences are
// the profile's [V]. It compares all pairs: unseen × (seen, or maxCandidates) × Dim multiplications.
func NearestSeen(ctx context.Context, e *embedding.Table, occurrences []float32, progress func(done, total int)) (*Neighbours, error) {
	if e.Size < 1 || e.Tokens != len(occurrences) || len(e.Values) != e.Tokens*e.Size {
		return nil, fmt.Errorf("embeddings of %d tokens with %d values in vectors of %d do not match the vocabulary of %d tokens", e.Tokens, len(e.Values), e.Size, len(occurrences))
	}
	var seen, unseen []int32
	for id, n := range occurrences {
		switch {
		case norm(e.Vector(int32(id))) == 0:
		case n > 0:
			seen = append(seen, int32(id))
		default:
			unseen = append(unseen, int32(id))
		}
	}
	found := &Neighbours{Nearest: make([][]int32, len(occurrences))}
	if len(seen) == 0 {
		return found, nil
	}
	// Select the most frequent tokens, in the order of their ids.
	slices.SortStableFunc(seen, func(a, b int32) int { return cmp.Compare(occurrences[b], occurrences[a]) })
	seen = seen[:min(len(seen), maxCandidates)]
	slices.Sort(seen)
	known := unit(e, seen)
	blocks := slices.Collect(slices.Chunk(unseen, neighbourBlock))
	done := Counter(len(blocks), progress)
	err := Parallel(ctx, len(blocks), func(i int) {
		lists := nearest(unit(e, blocks[i]), known, len(seen), e.Size)
		for j, id := range blocks[i] {
			for _, at := range lists[j] {
				found.Nearest[id] = append(found.Nearest[id], seen[at])
			}
		}
		done()
	})
	return found, err
}

// norm returns the Euclidean norm, computed in float64 to avoid overflow and underflow of squares.
func norm(vector []float32) float64 {
	squares := 0.0
	for _, v := range vector {
		squares += float64(v) * float64(v)
	}
	return math.Sqrt(squares)
}

// unit copies the vectors of the ids, scaled to length 1 [ids, Dim] and padded with zero vectors to a multiple of 4.
func unit(e *embedding.Table, ids []int32) []float32 {
	units := make([]float32, (len(ids)+3)/4*4*e.Size)
	for i, id := range ids {
		vector := e.Vector(id)
		length := norm(vector)
		for d, v := range vector {
			units[i*e.Size+d] = float32(float64(v) / length)
		}
	}
	return units
}

// nearest returns, for each vector, the indices among the first seen vectors of known with the largest products, in
// descending order. Ties go to the lower index.
func nearest(vectors, known []float32, seen, dim int) [][]int32 {
	rows := len(vectors) / dim
	best := make([]topList, rows)
	for first := 0; first < seen; first += seenBlock {
		last := min(first+seenBlock, len(known)/dim)
		for i := 0; i < rows; i += 4 {
			for j := first; j < last; j += 4 {
				products := products4x4(vectors[i*dim:(i+4)*dim], known[j*dim:(j+4)*dim], dim)
				for p, product := range products {
					if at := j + p%4; at < seen {
						best[i+p/4].offer(product, int32(at))
					}
				}
			}
		}
	}
	lists := make([][]int32, rows)
	for i := range best {
		lists[i] = slices.Clone(best[i].index[:best[i].n])
	}
	return lists
}

// products4x4 returns the products of four vectors with four others. Sixteen sums at a time use each loaded value four
// times.
func products4x4(a, b []float32, dim int) [16]float32 {
	a0, a1, a2, a3 := a[:dim], a[dim:][:dim], a[2*dim:][:dim], a[3*dim:][:dim]
	b0, b1, b2, b3 := b[:dim], b[dim:][:dim], b[2*dim:][:dim], b[3*dim:][:dim]
	var s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33 float32
	for d := range dim {
		y0, y1, y2, y3 := b0[d], b1[d], b2[d], b3[d]
		x := a0[d]
		s00, s01, s02, s03 = s00+float32(x*y0), s01+float32(x*y1), s02+float32(x*y2), s03+float32(x*y3)
		x = a1[d]
		s10, s11, s12, s13 = s10+float32(x*y0), s11+float32(x*y1), s12+float32(x*y2), s13+float32(x*y3)
		x = a2[d]
		s20, s21, s22, s23 = s20+float32(x*y0), s21+float32(x*y1), s22+float32(x*y2), s23+float32(x*y3)
		x = a3[d]
		s30, s31, s32, s33 = s30+float32(x*y0), s31+float32(x*y1), s32+float32(x*y2), s33+float32(x*y3)
	}
	return [16]float32{s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33}
}

// topList keeps the largest offered values.
type topList struct {
	n     int
	value [neighbours]float32
	index [neighbours]int32
}

func (l *topList) offer(value float32, index int32) {
	if l.n == neighbours && value <= l.value[neighbours-1] {
		return
	}
	at := min(l.n, neighbours-1)
	for ; at > 0 && l.value[at-1] < value; at-- {
		l.value[at], l.index[at] = l.value[at-1], l.index[at-1]
	}
	l.value[at], l.index[at] = value, index
	l.n = min(l.n+1, neighbours)
}
