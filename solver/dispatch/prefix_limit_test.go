package dispatch

import "testing"

// Adding a place visits the others only where their limit falls, which is seldom: a pod with many ranks costs time in proportion to them.
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
