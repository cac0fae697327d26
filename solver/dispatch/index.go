// SPDX-License-Identifier: Apache-2.0

package dispatch

// blockIndex is a hash table of blocks with open addressing and linear probing. Entries are block indices plus one; 0
// is free.
type blockIndex struct {
	entries []int32
	used    int
}

// minIndex is the initial number of entries. All sizes are powers of two.
const minIndex = 1 << 10

// find returns the index of the block with the hash, or -1.
func (x *blockIndex) find(blocks []block, hash uint64) int {
	if x.used == 0 {
		return -1
	}
	mask := uint64(len(x.entries) - 1)
	for i := hash & mask; x.entries[i] != 0; i = (i + 1) & mask {
		if at := int(x.entries[i] - 1); blocks[at].hash == hash {
			return at
		}
	}
	return -1
}

// insert adds a block with a hash that is not in the index. At most half of the entries are used, which keeps probes
// short.
func (x *blockIndex) insert(blocks []block, at int) {
	if 2*(x.used+1) > len(x.entries) {
		old := x.entries
		x.entries = make([]int32, max(minIndex, 2*len(old)))
		for _, entry := range old {
			if entry != 0 {
				x.place(blocks, entry)
			}
		}
	}
	x.place(blocks, int32(at+1))
	x.used++
}

func (x *blockIndex) place(blocks []block, entry int32) {
	mask := uint64(len(x.entries) - 1)
	i := blocks[entry-1].hash & mask
	for x.entries[i] != 0 {
		i = (i + 1) & mask
	}
	x.entries[i] = entry
}

// remove removes the block of a hash in the index, and moves up entries that probes would no longer find.
func (x *blockIndex) remove(blocks []block, hash uint64) {
	mask := uint64(len(x.entries) - 1)
	hole := hash & mask
	for blocks[x.entries[hole]-1].hash != hash {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; x.entries[i] != 0; i = (i + 1) & mask {
		home := blocks[x.entries[i]-1].hash & mask
		if (i-home)&mask >= (i-hole)&mask {
			x.entries[hole] = x.entries[i]
			hole = i
		}
	}
	x.entries[hole] = 0
	x.used--
}
