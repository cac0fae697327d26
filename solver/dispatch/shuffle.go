package dispatch

import "slices"

// Shuffle is an order of a batch's tokens in which those of each rank lie together: what a shuffled reduce-scatter permutes rows by,
// and what the all-gather after the layer is put back in order by. The zero value is an empty batch's; Group makes it a batch's.
type Shuffle struct {
	// Order is the token at each place of the shuffled batch, Inverse the place of each token [tokens].
	Order, Inverse []int32
	// Bounds are where each rank's tokens begin in Order, and the end [ranks + 1].
	Bounds []int32
}

// Group orders tokens by their ranks [tokens], each below the number of ranks: rank 0 first, tokens of one rank as they were (a stable
// counting sort). Memory of earlier batches is used again.
func (s *Shuffle) Group(rankOf []uint16, ranks int) {
	s.Order, s.Inverse = resize(s.Order, len(rankOf)), resize(s.Inverse, len(rankOf))
	s.Bounds = resize(s.Bounds, ranks+1)
	clear(s.Bounds)
	for _, rank := range rankOf {
		s.Bounds[rank+1]++
	}
	for rank := range ranks {
		s.Bounds[rank+1] += s.Bounds[rank]
	}
	for token, rank := range rankOf {
		place := s.Bounds[rank]
		s.Order[place], s.Inverse[token] = int32(token), place
		s.Bounds[rank]++
	}
	// Each rank's beginning has moved on to its end, which is where the next one begins.
	copy(s.Bounds[1:], s.Bounds[:ranks])
	s.Bounds[0] = 0
}

func resize(values []int32, n int) []int32 { return slices.Grow(values[:0], n)[:n] }

// Rebatch copies the rows of a batch [tokens × width] into the shuffled order.
func Rebatch[T any](dst, src []T, width int, s *Shuffle) { take(dst, src, width, s.Order) }

// Resume copies the rows of a shuffled batch back into the tokens' own order: the inverse of Rebatch.
func Resume[T any](dst, src []T, width int, s *Shuffle) { take(dst, src, width, s.Inverse) }

func take[T any](dst, src []T, width int, index []int32) {
	for i, from := range index {
		copy(dst[i*width:(i+1)*width], src[int(from)*width:])
	}
}
