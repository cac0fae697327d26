package router

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// NoRank is the rank of a backend that takes none.
const NoRank = -1

// ejection is how long a backend that could not be reached gets no request while others can take it: long enough not to
// pay a failed connection for each request, short enough that a wrong verdict does not matter.
const ejection = time.Second

// Pool holds the backends and the tokens outstanding on each of their ranks. It is safe for concurrent use.
type Pool struct {
	mu       sync.Mutex
	backends map[string]*backend // by address
	changed  chan struct{}       // closed at each change, for those who wait for a backend
	now      func() time.Time
}

type backend struct {
	Backend
	outstanding  []int64 // by rank
	ejectedUntil time.Time
}

// NewPool returns an empty pool.
func NewPool() *Pool {
	return &Pool{backends: map[string]*backend{}, changed: make(chan struct{}), now: time.Now}
}

// Set replaces the backends. Those that stay keep their outstanding tokens.
func (p *Pool) Set(backends []Backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := make(map[string]*backend, len(backends))
	for _, b := range backends {
		if old, ok := p.backends[b.Address]; ok && old.Backend.equal(b) {
			next[b.Address] = old
			continue
		}
		next[b.Address] = &backend{Backend: b, outstanding: make([]int64, max(1, b.Ranks))}
	}
	p.backends = next
	close(p.changed)
	p.changed = make(chan struct{})
}

// Len is the number of backends.
func (p *Pool) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.backends)
}

// Lease is a place on one rank, taken for the time of a request.
type Lease struct {
	Backend Backend
	// Rank is the rank to pin to, or NoRank.
	Rank int

	pool   *Pool
	on     *backend
	tokens int64
	once   sync.Once
}

// Acquire takes the rank with the fewest outstanding tokens among the backends whose address is not in tried, and adds
// the request's tokens to it. Ties are broken at random, so that several routers do not all choose alike. Backends that
// were just found unreachable are taken only where there is no other. It reports false where no backend is left.
func (p *Pool) Acquire(tokens int64, tried map[string]bool) (*Lease, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	var best *backend
	var bestRank, ties int
	for _, b := range p.backends {
		if tried[b.Address] {
			continue
		}
		for rank, load := range b.outstanding {
			switch order := compare(b, load, best, bestRank, now); {
			case order < 0:
				best, bestRank, ties = b, rank, 1
			case order == 0:
				if ties++; rand.IntN(ties) == 0 {
					best, bestRank = b, rank
				}
			}
		}
	}
	if best == nil {
		return nil, false
	}
	best.outstanding[bestRank] += tokens
	lease := &Lease{Backend: best.Backend, Rank: bestRank, pool: p, on: best, tokens: tokens}
	if best.Ranks == 0 {
		lease.Rank = NoRank
	}
	return lease, true
}

// compare orders a candidate against the best so far: negative where it is better.
func compare(b *backend, load int64, best *backend, bestRank int, now time.Time) int {
	if best == nil {
		return -1
	}
	if ejected, bestEjected := now.Before(b.ejectedUntil), now.Before(best.ejectedUntil); ejected != bestEjected {
		if ejected {
			return 1
		}
		return -1
	}
	switch difference := load - best.outstanding[bestRank]; {
	case difference < 0:
		return -1
	case difference > 0:
		return 1
	}
	return 0
}

// Wait acquires as Acquire does, and waits for a backend until the context ends where there is none.
func (p *Pool) Wait(ctx context.Context, tokens int64, tried map[string]bool) (*Lease, bool) {
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		if lease, ok := p.Acquire(tokens, tried); ok {
			return lease, true
		}
		select {
		case <-ctx.Done():
			return nil, false
		case <-changed:
		}
	}
}

// Release gives the place back. Further calls do nothing.
func (l *Lease) Release() {
	l.once.Do(func() {
		l.pool.mu.Lock()
		defer l.pool.mu.Unlock()
		l.on.outstanding[max(0, l.Rank)] -= l.tokens
	})
}

// Eject keeps requests away from the lease's backend for a moment: it could not be reached.
func (l *Lease) Eject() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.on.ejectedUntil = l.pool.now().Add(ejection)
}
