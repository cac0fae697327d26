// SPDX-License-Identifier: Apache-2.0

package pattern

import (
	"slices"
	"sync"
	"unicode"
)

// set is a set of characters.
type set struct {
	// ranges are inclusive, sorted, and neither overlap nor touch.
	ranges []interval
	// ascii contains the members below 128.
	ascii [128]bool
}

type interval struct{ low, high rune }

// newSet returns the union of ranges in any order.
func newSet(ranges []interval) *set {
	ranges = slices.Clone(ranges)
	slices.SortFunc(ranges, func(a, b interval) int { return int(a.low) - int(b.low) })
	merged := ranges[:0]
	for _, r := range ranges {
		if last := len(merged) - 1; last >= 0 && r.low <= merged[last].high+1 {
			merged[last].high = max(merged[last].high, r.high)
			continue
		}
		merged = append(merged, r)
	}
	s := &set{ranges: merged}
	for c := range rune(len(s.ascii)) {
		s.ascii[c] = s.search(c)
	}
	return s
}

func ofTable(table *unicode.RangeTable) *set {
	var ranges []interval
	add := func(low, high, stride rune) {
		if stride == 1 {
			ranges = append(ranges, interval{low, high})
			return
		}
		for c := low; c <= high; c += stride {
			ranges = append(ranges, interval{c, c})
		}
	}
	for _, r := range table.R16 {
		add(rune(r.Lo), rune(r.Hi), rune(r.Stride))
	}
	for _, r := range table.R32 {
		add(rune(r.Lo), rune(r.Hi), rune(r.Stride))
	}
	return newSet(ranges)
}

func (s *set) has(c rune) bool {
	if uint32(c) < uint32(len(s.ascii)) {
		return s.ascii[c]
	}
	return s.search(c)
}

func (s *set) search(c rune) bool {
	low, high := 0, len(s.ranges)
	for low < high {
		middle := int(uint(low+high) / 2)
		switch r := s.ranges[middle]; {
		case c < r.low:
			high = middle
		case c > r.high:
			low = middle + 1
		default:
			return true
		}
	}
	return false
}

func (s *set) not() *set {
	var ranges []interval
	next := rune(0)
	for _, r := range s.ranges {
		if r.low > next {
			ranges = append(ranges, interval{next, r.low - 1})
		}
		next = r.high + 1
	}
	if next <= unicode.MaxRune {
		ranges = append(ranges, interval{next, unicode.MaxRune})
	}
	return newSet(ranges)
}

func union(sets ...*set) *set {
	var ranges []interval
	for _, s := range sets {
		ranges = append(ranges, s.ranges...)
	}
	return newSet(ranges)
}

func intersection(a, b *set) *set { return union(a.not(), b.not()).not() }

// foldable lists the characters that have another case, about 2,800.
var foldable = sync.OnceValue(func() []rune {
	var list []rune
	for c := range rune(unicode.MaxRune + 1) {
		if unicode.SimpleFold(c) != c {
			list = append(list, c)
		}
	}
	return list
})

// folded returns the set extended by all other cases of its members.
func (s *set) folded() *set {
	ranges := slices.Clone(s.ranges)
	for _, c := range foldable() {
		if !s.search(c) {
			continue
		}
		for other := unicode.SimpleFold(c); other != c; other = unicode.SimpleFold(other) {
			ranges = append(ranges, interval{other, other})
		}
	}
	return newSet(ranges)
}

var (
	spaces  = ofTable(unicode.White_Space)
	digits  = ofTable(unicode.Nd)
	newline = newSet([]interval{{'\n', '\n'}})
	// classWords is \w within a class. Outside of a class, \w of the reference implementation also contains Latin-1's
	// superscript digits and fractions.
	classWords = union(ofTable(unicode.L), ofTable(unicode.Nl), ofTable(unicode.Other_Alphabetic), ofTable(unicode.M), digits, ofTable(unicode.Pc))
	words      = union(classWords, newSet([]interval{{'²', '³'}, {'¹', '¹'}, {'¼', '¾'}}))
)
