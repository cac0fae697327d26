package dispatch

import "slices"

// sharesOf scales the ranks' capacities, in any unit, to sum to 1; none are equal shares.
func sharesOf(capacity []float64, ranks int) []float64 {
	if capacity == nil {
		return slices.Repeat([]float64{1 / float64(ranks)}, ranks)
	}
	sum := 0.0
	for _, c := range capacity {
		sum += c
	}
	shares := make([]float64, ranks)
	for rank, c := range capacity {
		shares[rank] = c / sum
	}
	return shares
}

// deal parts n tokens by shares, to within one token; where equal shares do not divide, the first ranks have one more.
func deal(dst []int, n int, shares []float64) {
	dealt := 0
	for rank, share := range shares {
		dst[rank] = int(share*float64(n) + 1e-9)
		dealt += dst[rank]
	}
	for ; dealt < n; dealt++ {
		most := 0
		for rank, share := range shares {
			if share*float64(n)-float64(dst[rank]) > shares[most]*float64(n)-float64(dst[most])+1e-9 {
				most = rank
			}
		}
		dst[most]++
	}
}
