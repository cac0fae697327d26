// SPDX-License-Identifier: Apache-2.0

package dispatch

import "slices"

// sharesOf normalizes the ranks' capacities, in any unit, to a sum of 1; nil yields equal shares.
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

// apportion splits n tokens by shares, to within one token, by largest remainder. With equal shares the first ranks get
// the remainder.
func apportion(dst []int, n int, shares []float64) {
	assigned := 0
	for rank, share := range shares {
		dst[rank] = int(share*float64(n) + 1e-9)
		assigned += dst[rank]
	}
	for ; assigned < n; assigned++ {
		largest := 0
		for rank, share := range shares {
			if share*float64(n)-float64(dst[rank]) > shares[largest]*float64(n)-float64(dst[largest])+1e-9 {
				largest = rank
			}
		}
		dst[largest]++
	}
}
