// SPDX-License-Identifier: Apache-2.0

package assign

import (
	"math"
	"math/bits"
	"slices"
)

// SparseScores are scores [item × bin] of which most are zero. Only the others are stored.
type SparseScores struct {
	// marks has a bit for each bin of each item [item × words] that is set if the score is stored.
	marks []uint64
	words int
	// start is the first entry of each item in bins and scores, followed by their length. Entries of an item ascend by
	// bin.
	start  []int32
	bins   []uint16
	scores []float32
}

// NewSparseScores returns scores without rows, for at most 65,536 bins.
func NewSparseScores(bins int) *SparseScores {
	return &SparseScores{words: (bins + 63) / 64, start: []int32{0}}
}

// Reset removes all rows, and keeps the memory.
func (s *SparseScores) Reset() {
	s.marks, s.start, s.bins, s.scores = s.marks[:0], s.start[:1], s.bins[:0], s.scores[:0]
}

// Append appends the scores of the next item.
func (s *SparseScores) Append(row []float32) {
	stored := len(s.bins)
	s.bins, s.scores = slices.Grow(s.bins, len(row))[:stored+len(row)], slices.Grow(s.scores, len(row))[:stored+len(row)]
	for first := 0; first < len(row); first += 64 {
		part, marks := row[first:min(first+64, len(row))], uint64(0)
		for i, score := range part {
			// Without a branch, which the processor could not predict: the sign of b or of -b is set unless b is 0.
			b := math.Float32bits(score)
			marks |= uint64((b|-b)>>31) << (i % 64)
		}
		s.marks = append(s.marks, marks)
		for ; marks != 0; marks &= marks - 1 {
			i := bits.TrailingZeros64(marks)
			s.bins[stored], s.scores[stored] = uint16(first+i), part[i]
			stored++
		}
	}
	s.bins, s.scores = s.bins[:stored], s.scores[:stored]
	s.start = append(s.start, int32(stored))
}

// row returns the bins of an item whose scores are stored, ascending, and the scores.
func (s *SparseScores) row(item int) ([]uint16, []float32) {
	from, to := s.start[item], s.start[item+1]
	return s.bins[from:to:to], s.scores[from:to:to]
}

// stored reports whether the score of an item in a bin is stored. Scores that are not stored are zero.
func (s *SparseScores) stored(item, bin int) bool {
	return s.marks[item*s.words+bin/64]&(1<<(bin%64)) != 0
}

func (s *SparseScores) at(item, bin int) float32 {
	marks := s.marks[item*s.words:]
	below := uint64(1)<<(bin%64) - 1
	if marks[bin/64]&(below+1) == 0 {
		return 0
	}
	entry := int(s.start[item]) + bits.OnesCount64(marks[bin/64]&below)
	for _, word := range marks[:bin/64] {
		entry += bits.OnesCount64(word)
	}
	return s.scores[entry]
}
