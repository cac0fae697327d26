package counts

const (
	// bigramRows and bigramBuckets are the size of a count-min sketch: with n bigrams counted, a count is too high by more than
	// e/65536 n with a probability of e^-4 at most, and never too low.
	bigramRows, bigramBuckets = 4, 1 << 16
)

// Bigrams count which tokens follow one another: a count-min sketch. No sequence can be read from it, only whether two tokens
// that somebody asks for have probably followed one another.
type Bigrams [bigramRows][bigramBuckets]uint32

func (b *Bigrams) add(sequence []int32) {
	for i := 1; i < len(sequence); i++ {
		for row := range b {
			at := &b[row][bucket(row, sequence[i-1], sequence[i])]
			*at = saturated(*at, 1)
		}
	}
}

// Count is how often a token followed another, or more.
func (b *Bigrams) Count(previous, token int32) uint32 {
	least := b[0][bucket(0, previous, token)]
	for row := 1; row < bigramRows; row++ {
		least = min(least, b[row][bucket(row, previous, token)])
	}
	return least
}

func (b *Bigrams) merge(other *Bigrams) {
	for row := range b {
		for i := range b[row] {
			b[row][i] = saturated(b[row][i], other[row][i])
		}
	}
}

// golden is 2^64 over the golden ratio: multiples of it are far apart.
const golden = 0x9e3779b97f4a7c15

// bucket is the upper 16 bits of the mixed pair, a different mix for each row.
func bucket(row int, previous, token int32) int {
	return int(mix((uint64(uint32(previous))<<32|uint64(uint32(token)))+uint64(row+1)*golden) >> 48)
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
