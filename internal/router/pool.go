package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/line"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/reports"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
)

const (
	// ejection is how long a backend that could not be reached gets no request while others can take it: long enough not
	// to pay a failed connection for each request, short enough that a wrong verdict does not matter.
	ejection = time.Second
	// failuresInARow is how many inference requests a backend may answer with 5xx, one after the other, before it gets none for as long.
	// With each further one that takes twice as long, so many times at most: eight seconds, since a canary that fails has to get enough
	// requests to be judged by.
	failuresInARow, longerEjections = 2, 3
)

// PoolOptions are the settings of a pool; the zero value stands for DefaultPoolOptions.
type PoolOptions struct {
	// Policy is any of dispatch but dispatch.Window; Cap bounds a rank's share of the last requests of its plan, as a multiple of the
	// fair share; Weights scale what speaks for a place.
	Policy  dispatch.Policy
	Cap     float64
	Weights dispatch.Weights
	// PendingLimitPerRank is the number of inference requests that a rank of a pod may have at a time; 0 is any.
	PendingLimitPerRank int
	// Hold is how long a request may wait for the rank of its experts, at most dispatch.MostHold; 0 is not at all. It is for the policy Price.
	Hold time.Duration
	// CacheTokensPerRank is what a rank is thought to hold in its KV cache.
	CacheTokensPerRank int
}

// DefaultPoolOptions are those of a router without flags.
func DefaultPoolOptions() PoolOptions {
	return PoolOptions{Policy: dispatch.Price, Cap: 1.15, Weights: dispatch.DefaultWeights, CacheTokensPerRank: dispatch.DefaultCacheTokens}
}

func (o *PoolOptions) validate() error {
	switch {
	case o.PendingLimitPerRank < 0:
		return fmt.Errorf("pending limit per rank is %d; it must be at least 0", o.PendingLimitPerRank)
	case o.CacheTokensPerRank < 1:
		return fmt.Errorf("cache tokens per rank is %d; it must be at least 1", o.CacheTokensPerRank)
	case o.Hold < 0 || o.Hold > dispatch.MostHold:
		return fmt.Errorf("hold is %v; allowed is 0 to %v", o.Hold, dispatch.MostHold)
	case o.Hold > 0 && o.Policy != dispatch.Price:
		return fmt.Errorf("hold is %v; requests wait with policy %s alone, it is %s", o.Hold, dispatch.Price, o.Policy)
	}
	_, err := o.newScheduler(1, cost.Shape{}, defaultMachines())
	return err
}

// defaultMachines are those of pods without a plan.
func defaultMachines() cost.Machines { return cost.NodeOf(hardware.DefaultProfile()) }

// newScheduler is for pods of that many ranks that serve a model of that shape on those machines.
func (o *PoolOptions) newScheduler(ranks int, shape cost.Shape, on cost.Machines) (*dispatch.Scheduler, error) {
	return dispatch.NewScheduler(dispatch.Options{
		Policy: o.Policy, Ranks: ranks, Cap: o.Cap, Weights: o.Weights, Costs: shape.Costs(on), Patient: o.Hold > 0,
		First: rand.IntN(1 << 16),
	})
}

// Pool holds the backends, the tokens outstanding on each of their ranks, and the plans that tell their ranks apart. It
// is safe for concurrent use.
type Pool struct {
	mu sync.Mutex
	// groups holds the backends of each plan, and those without one, ordered by digest.
	groups []*group
	// departed are the backends that were taken away while they had requests, until these have ended: one whose pod was not ready for
	// a moment comes back as busy as it is.
	departed map[identity]*backend
	plans    map[string]*scheduled // by digest
	options  PoolOptions
	// prefixes knows what the places hold; spent sums what decisions were made by.
	prefixes *dispatch.Prefixes
	spent    reports.Spent
	// places and at are those of the present decision.
	places  []dispatch.Place
	at      []place
	changed chan struct{} // closed at each change, for those who wait for a backend
	now     func() time.Time
	// checksPins is true where a pinChecker checks new backends.
	checksPins bool
}

// group are the backends of one plan.
type group struct {
	plan     string
	backends []*backend
	// most is the largest number of ranks of its backends; scheduler is for these, where requests have no forecast.
	most      int
	scheduler *dispatch.Scheduler
}

type backend struct {
	discovery.Backend
	outstanding  []int64 // by rank: tokens
	next         []int64 // by rank: those of prompts that were sent since an answer last began or ended, which the next step computes
	pending      []int   // by rank: inference requests
	caches       []int   // by rank: its number among the pool's prefixes
	ejectedUntil time.Time
	// pins is what is known of the rank of requests, by route.
	pins     map[string]pin
	check    pinCheckState
	failures int       // inference requests that it has answered with 5xx since it last served one
	answered time.Time // when a gateway last had an answer of it
}

// width is how many ranks one of its places stands for.
func (b *backend) width() int64 {
	if b.Ranks > 0 {
		return 1
	}
	return int64(max(1, b.Width))
}

// identity tells backends apart.
type identity struct{ pod, address string }

func identityOf(b discovery.Backend) identity { return identity{b.Pod, b.Address} }

// requests returns the number of inference requests on the backend.
func (b *backend) requests() (total int) {
	for _, pending := range b.pending {
		total += pending
	}
	return total
}

// idle tells that no request is on the backend.
func (b *backend) idle() bool {
	return !slices.ContainsFunc(b.outstanding, func(tokens int64) bool { return tokens > 0 }) &&
		!slices.ContainsFunc(b.pending, func(requests int) bool { return requests > 0 })
}

// scheduled is a plan with the scheduler of its requests. layout is own, or has another plan's tables in the place of its own.
type scheduled struct {
	own, layout *plans.Layout
	scheduler   *dispatch.Scheduler
	// line is nil where no request waits.
	line *line.Line[waiting]
}

// NewPool returns an empty pool with the default options.
func NewPool() *Pool {
	p, err := NewPoolWith(DefaultPoolOptions())
	if err != nil {
		panic(err) // the defaults are valid
	}
	return p
}

// NewPoolWith returns an empty pool.
func NewPoolWith(options PoolOptions) (*Pool, error) {
	if options == (PoolOptions{}) {
		options = DefaultPoolOptions()
	}
	if err := options.validate(); err != nil {
		return nil, err
	}
	return &Pool{
		departed: map[identity]*backend{}, plans: map[string]*scheduled{}, changed: make(chan struct{}), now: time.Now,
		options: options, prefixes: dispatch.NewPrefixes(options.CacheTokensPerRank),
	}, nil
}

// Set replaces the backends. Those that stay, or come back before their requests have ended, keep their outstanding tokens, and what
// they are thought to have cached.
func (p *Pool) Set(backends []discovery.Backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	oldGroups, old := map[string]*group{}, p.departed
	for _, g := range p.groups {
		oldGroups[g.plan] = g
		for _, b := range g.backends {
			old[identityOf(b.Backend)] = b
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
		next := p.takeOver(old, b)
		g.backends = append(g.backends, next)
		g.most = max(g.most, len(next.outstanding))
	}
	p.departed = old
	for _, gone := range old {
		p.dropIdle(gone)
	}
	for _, g := range p.groups {
		if was := oldGroups[g.plan]; was != nil && was.most == g.most {
			g.scheduler = was.scheduler
		} else {
			g.scheduler = p.mustSchedule(g.most, shapeOf(g.backends[0].Backend), defaultMachines())
		}
	}
	slices.SortFunc(p.groups, func(a, b *group) int { return cmp.Compare(a.plan, b.plan) })
	p.notify()
}

// takeOver makes a backend of an old one, which is then no longer among these, where its ranks are as many.
func (p *Pool) takeOver(old map[identity]*backend, b discovery.Backend) *backend {
	was, known := old[identityOf(b)]
	if !known {
		return p.newBackend(b)
	}
	delete(old, identityOf(b))
	if len(was.outstanding) != max(1, b.Ranks) {
		p.forget(was)
		return p.newBackend(b)
	}
	was.Backend = b
	return was
}

// dropIdle drops a departed backend that has no request any more.
func (p *Pool) dropIdle(b *backend) {
	if at := identityOf(b.Backend); p.departed[at] == b && b.idle() {
		delete(p.departed, at)
		p.forget(b)
	}
}

// forget forgets what a backend is thought to have cached: it gets no more requests.
func (p *Pool) forget(b *backend) {
	for _, cache := range b.caches {
		p.prefixes.Remove(cache)
	}
	b.caches = nil // their numbers become those of others
}

func (p *Pool) newBackend(b discovery.Backend) *backend {
	ranks := max(1, b.Ranks)
	next := &backend{Backend: b, pins: map[string]pin{}, outstanding: make([]int64, ranks), next: make([]int64, ranks), pending: make([]int, ranks), caches: make([]int, ranks)}
	for rank := range next.caches {
		next.caches[rank] = p.prefixes.Add()
	}
	if p.checksPins && next.sharesAddress() {
		next.check.holdUntil = p.now().Add(pinHold)
	}
	return next
}

// shapeOf is what a pod tells of its model.
func shapeOf(b discovery.Backend) cost.Shape {
	if b.Shape == nil {
		return cost.Shape{}
	}
	return cost.Shape{MoELayers: len(b.Shape.MoELayers), TopK: b.Shape.ExpertsPerToken}
}

// mustSchedule returns a scheduler: the options were found valid, and there is a rank.
func (p *Pool) mustSchedule(ranks int, shape cost.Shape, on cost.Machines) *dispatch.Scheduler {
	scheduler, err := p.options.newScheduler(ranks, shape, on)
	if err != nil {
		panic(err)
	}
	return scheduler
}

// notify wakes those who wait for a backend. The lock must be held.
func (p *Pool) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// AddLayout gives the pool a plan; backends that name it are scored from now on, with the plan's own tables.
func (p *Pool) AddLayout(l *plans.Layout) {
	scheduler := p.mustSchedule(l.Ranks, l.Shape, l.Machines)
	p.mu.Lock()
	defer p.mu.Unlock()
	plan := &scheduled{own: l, layout: l, scheduler: scheduler}
	if p.options.Hold > 0 {
		plan.line = line.New[waiting](l.Ranks, p.options.Hold)
	}
	p.plans[l.Digest] = plan
	p.notify() // a request for routed experts may have waited for it
}

// DropLayout takes a plan away; backends that name it are balanced by load from now on.
func (p *Pool) DropLayout(digest string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.plans, digest)
}

// UseTables has requests to backends that name a plan scored with the tables of a plan from now on, which can be the same. What
// runs stays as it was forecast, and prices stay too: they are about how much ranks have had, which is no other by new tables.
func (p *Pool) UseTables(plan, tables string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	to, from := p.plans[plan], p.plans[tables]
	if to == nil || from == nil {
		return plans.ErrNotLoaded
	}
	if to.layout.Tables == tables {
		return nil
	}
	layout, err := to.own.WithTables(from.own)
	if err == nil {
		to.layout = layout
	}
	return err
}

// Tables are the digests of the plans whose tables score requests, by that of the plan that backends name. Plans that are not
// loaded are left out.
func (p *Pool) Tables() map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	tables := map[string]string{}
	for _, g := range p.groups {
		if plan := p.plans[g.plan]; plan != nil {
			tables[g.plan] = plan.layout.Tables
		}
	}
	return tables
}

// Spent is a copy of what decisions were made by.
func (p *Pool) Spent() reports.Spent {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.spent
}

// backends returns the backends.
func (p *Pool) backends() []discovery.Backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []discovery.Backend
	for _, g := range p.groups {
		for _, b := range g.backends {
			all = append(all, b.Backend)
		}
	}
	return all
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
	Backend discovery.Backend
	// Rank is the rank to pin to, or NoRank.
	Rank int

	// layout is the backend's plan; nil where it has none, or the plan is not loaded.
	layout *plans.Layout
	// scored tells that the layout's tables have scored the request, whose forecast says how; unscored says why they have not
	// although the backend has a plan.
	scored   bool
	unscored string

	pool *Pool
	on   *backend
	// place is the rank of the backend that is charged with the tokens, and with the pending request.
	place   int
	tokens  int64
	pending int
	// inFlight is the number of other inference requests on the backend when the place was taken.
	inFlight int
	// route is the path of an inference request; empty for others.
	route string
	// spread is true where the engine picks the rank: each rank of the backend is charged with an equal share of the tokens.
	spread bool
	// otherRank is true once the answer has reported another rank than Rank.
	otherRank bool
	// begun tells that the answer of an inference request has begun.
	begun bool
	// taken is when the place was taken.
	taken time.Time
	// prefixes identify the beginnings of the request, given are those that the place holds if it serves it, and did not before.
	prefixes, given []uint64
	// held is the memory that is kept for what the engine tells of the request; unhold gives it back, and is nil where none was.
	held   int64
	unhold func()
	once   sync.Once
}

// endpoint is host:port of the rank.
func (l *Lease) endpoint() string { return l.Backend.Endpoint(l.Rank) }

// errAllFull says that every rank that a request could go to has as many requests as it may.
var errAllFull = errors.New("all ranks have as many requests as they may")

// acquire takes a rank for a request, among those whose endpoint is not in tried, and adds the request's tokens to
// it. It reports false where none is left, or where all ranks are full: then the request's refused says so.
func (p *Pool) acquire(r *request, tried map[string]bool) (*Lease, bool) {
	for {
		lease, ok, unknown := p.choose(r, tried)
		switch {
		case unknown.layout != nil:
			// The plan of the chosen pods has no forecast for the request yet. By the time it has, they may have changed.
			r.score(unknown.layout)
		case unknown.text:
			r.hash()
		default:
			return lease, ok
		}
	}
}

// wait acquires as acquire does, and waits for a backend until the context ends where there is none, and for a rank that suits where
// the request may stand in line. Where all are full it does not wait: the client does that better.
func (p *Pool) wait(ctx context.Context, r *request, tried map[string]bool) (*Lease, bool) {
	defer p.giveUp(r)
	var patience <-chan time.Time
	if p.options.Hold > 0 {
		timer := time.NewTimer(p.options.Hold)
		defer timer.Stop()
		patience = timer.C
	}
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		if lease, ok := p.acquire(r, tried); ok {
			return lease, true
		}
		if r.refused != nil {
			return nil, false
		}
		select {
		case <-ctx.Done():
			if r.standing == nil || ctx.Err() != context.DeadlineExceeded {
				return nil, false
			}
			r.patient = false // there is a place, if not the one that it waits for
			return p.acquire(r, tried)
		case <-changed:
		case <-r.standing.Turn():
		case <-patience:
			r.patient = false
		}
	}
}

// Release gives the place back. Further calls do nothing.
func (l *Lease) Release() {
	l.once.Do(func() {
		if l.unhold != nil {
			l.unhold()
		}
		l.pool.mu.Lock()
		defer l.pool.mu.Unlock()
		l.leave()
	})
}

// leave takes the request off its place. The lock must be held.
func (l *Lease) leave() {
	l.charge(l.on.outstanding, -l.tokens)
	l.on.pending[l.place] -= l.pending
	l.stepped()
	l.pool.dropIdle(l.on)
}

// charge adds tokens to the lease's place in a list of loads by rank. Where the engine picks the rank, each rank gets an equal share.
func (l *Lease) charge(loads []int64, tokens int64) {
	if !l.spread {
		loads[l.place] += tokens
		return
	}
	for rank := range loads {
		loads[rank] += tokens / int64(len(loads))
	}
}

// Answered tells that the first event of a streamed answer has come. Further calls do nothing.
func (l *Lease) Answered() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if !l.begun {
		l.begun = true
		l.stepped()
	}
}

// stepped notes that an answer has begun or ended: a step of the engine is over, and all prompts that were sent there are in the one that
// begins, if they were not in that.
func (l *Lease) stepped() {
	if l.pending > 0 {
		clear(l.on.next)
	}
}

// Eject keeps requests away from the lease's backend for a moment: it could not be reached.
func (l *Lease) Eject() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.eject(ejection)
}

// eject is Eject for a time, where the lock is held.
func (l *Lease) eject(pause time.Duration) {
	if until := l.pool.now().Add(pause); until.After(l.on.ejectedUntil) {
		l.on.ejectedUntil = until
	}
}

// judge notes whether the lease's backend serves inference requests. One that fails them at once would look idle, and draw all of them;
// but what has failed may be the request. What was sent before its ejection has ended says no more of it,
// however late it fails.
func (l *Lease) judge(serves bool) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	switch {
	case serves:
		l.on.failures = 0
	case l.taken.Before(l.on.ejectedUntil):
	default:
		l.on.failures++
		if more := l.on.failures - failuresInARow; more >= 0 {
			l.eject(ejection << min(more, longerEjections))
		}
	}
}

// give notes that the lease's place caches the request, of which the pool's prefixes were just asked. The lock must be held.
func (l *Lease) give(prefixes []uint64) {
	l.prefixes = prefixes
	if len(prefixes) == 0 || l.place >= len(l.on.caches) {
		return
	}
	cache := l.on.caches[l.place]
	l.given = prefixes[l.pool.prefixes.Hit(cache).Tokens/dispatch.PrefixBlock:]
	l.pool.prefixes.Put(cache, prefixes)
}

// Unserved takes back that the lease's place caches the request: it has not served it.
func (l *Lease) Unserved() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.place < len(l.on.caches) {
		l.pool.prefixes.Forget(l.on.caches[l.place], l.given)
	}
	l.given = nil
}
