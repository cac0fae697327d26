package dispatch

// PrefixBlock is the number of tokens by which one hashed prefix is longer than the one before.
const PrefixBlock = 64

// PrefixHashes appends to dst one hash for each whole block of tokens, each covering everything from the first token on.
func PrefixHashes(dst []uint64, tokens []int32) []uint64 {
	// FNV-1a over 64-bit words, with a final mix: cheap, and good enough for a table of hints.
	const offset, prime = 14695981039346656037, 1099511628211
	hash := uint64(offset)
	for i, token := range tokens {
		hash = (hash ^ uint64(uint32(token))) * prime
		if (i+1)%PrefixBlock == 0 {
			mixed := hash ^ hash>>32
			dst = append(dst, mixed*0x9e3779b97f4a7c15)
		}
	}
	return dst
}

// prefixTable remembers which rank served a prefix last. Its size is fixed: a newer prefix takes the place of an older
// one with the same slot.
type prefixTable struct {
	slots []prefixSlot
}

type prefixSlot struct {
	hash uint64
	rank int32
	used bool
}

const prefixSlots = 1 << 16

func newPrefixTable() *prefixTable { return &prefixTable{make([]prefixSlot, prefixSlots)} }

// lookup returns the rank of the longest known prefix.
func (t *prefixTable) lookup(prefixes []uint64) (rank int, known bool) {
	for i := len(prefixes) - 1; i >= 0; i-- {
		slot := t.slots[prefixes[i]%prefixSlots]
		if slot.used && slot.hash == prefixes[i] {
			return int(slot.rank), true
		}
	}
	return 0, false
}

func (t *prefixTable) remember(prefixes []uint64, rank int) {
	for _, hash := range prefixes {
		t.slots[hash%prefixSlots] = prefixSlot{hash, int32(rank), true}
	}
}
