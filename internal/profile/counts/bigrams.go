// SPDX-License-Identifier: Apache-2.0

package counts

const (
	// bigramRows and bigramBuckets are the size of a count-min sketch (Cormode and Muthukrishnan 2005). With n counted
	// bigrams, a count is too high by more than e/65536 n with a probability of at most e^-4, and never too low.
	bigramRows, bigramBuckets = 4, 1 << 16
)

// Bigrams counts which tokens follow one another, in a count-min sketch. No sequence can be read from it. It only
// answers whether two given tokens have probably followed one another.
type Bigrams [bigramRows][bigramBuckets]uint32

func (b *Bigrams) add(sequence []int32) {
	for i := 1; i < len(sequence); i++ {
		for row := range b {
			at := &b[row][bucket(row, sequence[i-1], sequence[i])]
			*at = saturated(*at, 1)
		}
	}
}

// Count returns an upper bound of the number of times that token followed previous.
func (b *Bigrams) Count(previous, token int32) uint32 {
	minimum := b[0][bucket(0, previous, token)]
	for row := 1; row < bigramRows; row++ {
		minimum = min(minimum, b[row][bucket(row, previous, token)])
	}
	return minimum
}

func (b *Bigrams) merge(other *Bigrams) {
	for row := range b {
		for i := range b[row] {
			b[row][i] = saturated(b[row][i], other[row][i])
		}
	}
}

// golden is 2^64 divided by the golden ratio. Its multiples are far apart.
const golden = 0x9e3779b97f4a7c15

// bucket returns the upper 16 bits of the hashed pair. Each row uses a different hash.
func bucket(row int, previous, token int32) int {
	return int(mix((uint64(uint32(previous))<<32|uint64(uint32(token)))+uint64(row+1)*golden) >> 48)
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
