// SPDX-License-Identifier: Apache-2.0

package profile

import "testing"

// TestReservoir checks that the reservoir stays within its limit and wastes at most one request of it, keeps the order
// of the data set, and keeps short and long requests with the same probability.
func TestReservoir(t *testing.T) {
	const limit, requests, seeds = 1000, 200, 400
	kept := map[int]int{} // by length
	for seed := range uint64(seeds) {
		r := newReservoir(limit, seed)
		for i := range requests {
			r.add(&recorded{item: i, tokens: make([]int32, []int{5, 50}[i%2])})
		}
		tokens, last := 0, -1
		for _, request := range r.requests() {
			if request.item <= last {
				t.Fatalf("seed %d: item %d follows %d", seed, request.item, last)
			}
			last = request.item
			tokens += len(request.tokens)
			kept[len(request.tokens)]++
		}
		if tokens != r.tokens || tokens > limit || tokens <= limit-50 {
			t.Fatalf("seed %d: %d tokens of at most %d, recorded as %d", seed, tokens, limit, r.tokens)
		}
	}
	if short, long := kept[5], kept[50]; short < long*95/100 || short > long*110/100 {
		t.Errorf("%d short and %d long requests were kept, want similar numbers", short, long)
	}
}
