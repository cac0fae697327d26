package router

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// NoRank is the rank of a backend that takes none.
const NoRank = -1

const (
	// ejection is how long a backend that could not be reached gets no request while others can take it: long enough not
	// to pay a failed connection for each request, short enough that a wrong verdict does not matter.
	ejection = time.Second
	// loadCap bounds a rank's share of the last requests of its plan, as a multiple of the fair share.
	loadCap = 1.15
)

// Pool holds the backends, the tokens outstanding on each of their ranks, and the plans that tell their ranks apart. It
// is safe for concurrent use.
type Pool struct {
	mu sync.Mutex
	// groups holds the backends of each plan, and those without one, ordered by digest.
	groups  []*group
	plans   map[string]*scheduled // by digest
	changed chan struct{}         // closed at each change, for those who wait for a backend
	now     func() time.Time
}

// group are the backends of one plan.
type group struct {
	plan     string
	backends []*backend
}

type backend struct {
	Backend
	outstanding  []int64 // by rank
	ejectedUntil time.Time
}

// scheduled is a plan with the scheduler of its requests.
type scheduled struct {
	layout    *Layout
	scheduler *dispatch.Scheduler
}

// NewPool returns an empty pool.
func NewPool() *Pool {
	return &Pool{plans: map[string]*scheduled{}, changed: make(chan struct{}), now: time.Now}
}

// Set replaces the backends. Those that stay keep their outstanding tokens.
func (p *Pool) Set(backends []Backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := map[string]*backend{}
	for _, g := range p.groups {
		for _, b := range g.backends {
			old[b.Address] = b
		}
	}
	groups := map[string]*group{}
	p.groups = nil
	for _, b := range backends {
		g, known := groups[b.PlanDigest]
		if !known {
			g = &group{plan: b.PlanDigest}
			groups[b.PlanDigest] = g
			p.groups = append(p.groups, g)
		}
		next, stays := old[b.Address]
		if !stays || !next.equal(b) {
			next = &backend{Backend: b, outstanding: make([]int64, max(1, b.Ranks))}
		}
		g.backends = append(g.backends, next)
	}
	slices.SortFunc(p.groups, func(a, b *group) int { return cmp.Compare(a.plan, b.plan) })
	p.notify()
}

// notify wakes those who wait for a backend. The lock must be held.
func (p *Pool) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// AddLayout gives the pool a plan; backends that name it are scored from now on.
func (p *Pool) AddLayout(l *Layout) {
	// The policy and the cap are constants that it accepts, and a plan has a rank.
	scheduler, err := dispatch.NewScheduler(dispatch.Price, l.ranks, loadCap)
	if err != nil {
		panic(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.plans[l.digest] = &scheduled{l, scheduler}
	p.notify() // a request for routed experts may have waited for it
}

// DropLayout takes a plan away; backends that name it are balanced by load from now on.
func (p *Pool) DropLayout(digest string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.plans, digest)
}

// Len is the number of backends.
func (p *Pool) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, g := range p.groups {
		n += len(g.backends)
	}
	return n
}

// Plans counts the plans that backends name: those that are loaded and those that are not.
func (p *Pool) Plans() (loaded, pending int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.groups {
		switch {
		case g.plan == "":
		case p.plans[g.plan] != nil:
			loaded++
		default:
			pending++
		}
	}
	return loaded, pending
}

// Lease is a place on one rank, taken for the time of a request.
type Lease struct {
	Backend Backend
	// Rank is the rank to pin to, or NoRank.
	Rank int

	// layout is the backend's plan; nil where it has none, or the plan is not loaded.
	layout *Layout
	// predicted is the forecast local share of the request on the rank, scored whether there is one; unscored says why
	// there is none although the backend has a plan.
	predicted float64
	scored    bool
	unscored  string

	pool   *Pool
	on     *backend
	tokens int64
	once   sync.Once
}

// endpoint is host:port of the rank.
func (l *Lease) endpoint() string { return l.Backend.Endpoint(l.Rank) }

// acquire takes a rank for a request, among those whose endpoint is not in tried, and adds the request's tokens to
// it. It reports false where none is left.
func (p *Pool) acquire(r *request, tried map[string]bool) (*Lease, bool) {
	for {
		lease, ok, unknown := p.choose(r, tried)
		if unknown == nil {
			return lease, ok
		}
		// The plan of the chosen pods has no forecast for the request yet. By the time it has, they may have changed.
		r.score(unknown)
	}
}

// wait acquires as acquire does, and waits for a backend until the context ends where there is none.
func (p *Pool) wait(ctx context.Context, r *request, tried map[string]bool) (*Lease, bool) {
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		if lease, ok := p.acquire(r, tried); ok {
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
