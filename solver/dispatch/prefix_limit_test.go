// SPDX-License-Identifier: Apache-2.0

package dispatch

import "testing"

// Add visits the other places only when their limit falls, which is rare, so that adding a pod takes time proportional
// to its ranks.
func TestAddingPlacesIsNotQuadratic(t *testing.T) {
	p := NewPrefixes(0)
	falls := 0
	for p.live = 1; p.live < 1<<18; p.live++ {
		p.live--
		before := p.limit()
		p.live++
		if limit := p.limit(); limit < before {
			falls++
		} else if limit > before {
			t.Fatalf("the limit rises to %d with %d places", limit, p.live)
		}
		if blocks := p.limit() * p.live; blocks > max(maxBlocks, p.live) {
			t.Fatalf("%d places hold up to %d blocks", p.live, blocks)
		}
	}
	if falls > 200 {
		t.Errorf("the limit falls %d times for %d places", falls, p.live)
	}
}

// Add does not visit other places while their limit stays the same. The test gives place 0 more blocks than the limit.
// A visit would evict them, or panic, since the blocks are empty.
func TestAddVisitsPlacesOnlyWhenTheLimitFalls(t *testing.T) {
	p := NewPrefixes(0)
	added := 0
	for range 1 << 12 {
		p.Add()
		before := p.limit()
		p.live++
		falls := p.limit() < before
		p.live--
		if falls {
			continue
		}
		p.places[0].slots = make([]cacheSlot, before+1)
		p.Add()
		if blocks := len(p.places[0].slots); blocks != before+1 {
			t.Fatalf("place %d shrinks place 0 to %d blocks, although the limit stays at %d", p.live, blocks, before)
		}
		p.places[0].slots = nil
		added++
	}
	if added < 1<<11 {
		t.Errorf("the limit stays for only %d places", added)
	}
}
