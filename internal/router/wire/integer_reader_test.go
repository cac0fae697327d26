// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"slices"
	"testing"
)

var reports = map[string][]int{
	`{"meta_info":{"dp_rank":3}}`:                                                        {3},
	`{"meta_info":{"dp_rank" : 12 }}`:                                                    {12},
	`[{"meta_info":{"dp_rank":1}},{"meta_info":{"dp_rank":0}}]`:                          {1, 0},
	`{"text":"\"dp_rank\":5","x":"dp_rank"}`:                                             nil,
	`{"text":"dp_rank","dp_rank":null,"dp_rank":"4"}`:                                    nil,
	`{"dp_rank":-1,"dp_rank":99999999999999999999999}`:                                   nil,
	"data: {\"meta_info\":{\"dp_rank\":2}}\n\ndata: {\"meta_info\":{\"dp_rank\":2}}\n\n": {2, 2},
}

// TestIntegerReader checks that the same ranks are found for any split of a response into pieces.
func TestIntegerReader(t *testing.T) {
	for text, want := range reports {
		for first := range len(text) + 1 {
			for second := first; second <= len(text); second++ {
				var got []int
				r := NewIntegerReader("dp_rank")
				for _, piece := range []string{text[:first], text[first:second], text[second:]} {
					r.Add([]byte(piece), func(value int) { got = append(got, value) })
				}
				if !slices.Equal(slices.Compact(slices.Sorted(slices.Values(got))), slices.Compact(slices.Sorted(slices.Values(want)))) {
					t.Fatalf("%s in pieces at %d and %d: ranks %v, want %v", text, first, second, got, want)
				}
			}
		}
	}
}

func FuzzIntegerReader(f *testing.F) {
	for text := range reports {
		f.Add([]byte(text), 3)
	}
	f.Fuzz(func(t *testing.T, text []byte, size int) {
		size = min(max(size, 1), 200)
		whole, pieces := map[int]bool{}, map[int]bool{}
		NewIntegerReader("dp_rank").Add(text, func(value int) { whole[value] = true })
		r := NewIntegerReader("dp_rank")
		for piece := range slices.Chunk(text, size) {
			r.Add(piece, func(value int) { pieces[value] = true })
		}
		for rank := range pieces { // a member that is longer than the window may be missed in pieces
			if !whole[rank] {
				t.Fatalf("rank %d is found in pieces of %d bytes only: %q", rank, size, text)
			}
		}
	})
}
