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
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/reports"
	"github.com/semmoe/operator/internal/router/waitqueue"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
)

const (
	// ejection is the time for which an unreachable backend gets no request while other backends can take it. It is
	// long enough to avoid a failed connection for each request, and short enough that a false ejection has little
	// effect.
	ejection = time.Second
	// failuresToEject is the number of consecutive inference requests answered with 5xx after which a backend is
	// ejected. Each further failure doubles the ejection time, at most maxEjectionDoublings times: up to 8 s. The bound
	// leaves a failing canary enough requests for its evaluation.
	failuresToEject, maxEjectionDoublings = 2, 3
)

// PoolOptions configures a pool. The zero value means DefaultPoolOptions.
type PoolOptions struct {
	// Policy is any policy of package dispatch except dispatch.Window. Cap bounds the share of a rank in the last
	// requests of its plan, as a multiple of the fair share. Weights scale the terms of the score of a place.
	Policy  dispatch.Policy
	Cap     float64
	Weights dispatch.Weights
	// PendingLimitPerRank is the maximum number of concurrent inference requests per rank of a pod; 0 means no limit.
	PendingLimitPerRank int
	// Hold is the maximum time that a request waits for the rank of its experts, at most dispatch.MostHold. 0 disables
	// waiting. It requires the policy Price.
	Hold time.Duration
	// CacheTokensPerRank is the assumed capacity of the KV cache of a rank, in tokens.
	CacheTokensPerRank int
}

// DefaultPoolOptions returns the options of a router without flags.
func DefaultPoolOptions() PoolOptions {
	return PoolOptions{Policy: dispatch.Price, Cap: 1.15, Weights: dispatch.DefaultWeights, CacheTokensPerRank: dispatch.DefaultCacheTokens}
}

func (o *PoolOptions) validate() error {
	switch {
	case o.PendingLimitPerRank < 0:
		return fmt.Errorf("pendingLimitPerRank: %d is invalid: it must be at least 0", o.PendingLimitPerRank)
	case o.CacheTokensPerRank < 1:
		return fmt.Errorf("cacheTokensPerRank: %d is invalid: it must be at least 1", o.CacheTokensPerRank)
	case o.Hold < 0 || o.Hold > dispatch.MaxWait:
		return fmt.Errorf("hold: %v is invalid: it must be 0 to %v", o.Hold, dispatch.MaxWait)
	case o.Hold > 0 && o.Policy != dispatch.Price:
		return fmt.Errorf("hold: %v is invalid: waiting requires policy %s, not %s", o.Hold, dispatch.Price, o.Policy)
	}
	_, err := o.newScheduler(1, cost.Shape{}, defaultMachines())
	return err
}

// defaultMachines returns the machines that are assumed for pods without a plan.
func defaultMachines() cost.Machines { return cost.NodeOf(hardware.DefaultProfile()) }

// newScheduler returns a scheduler for pods with this number of ranks, this model shape and these machines.
func (o *PoolOptions) newScheduler(ranks int, shape cost.Shape, on cost.Machines) (*dispatch.Scheduler, error) {
	return dispatch.NewScheduler(dispatch.Options{
		Policy: o.Policy, Ranks: ranks, Cap: o.Cap, Weights: o.Weights, Costs: shape.Costs(on), Patient: o.Hold > 0,
		First: rand.IntN(1 << 16),
	})
}

// Pool holds the backends, the outstanding tokens of each of their ranks, and the plans that score the ranks. It is
// safe for concurrent use.
type Pool struct {
	mu sync.Mutex
	// groups holds the backends of each plan, and those without a plan, ordered by digest.
	groups []*group
	// departed holds backends that were removed while they had requests, until these requests end. A backend whose pod
	// was briefly not ready returns with its load.
	departed map[identity]*backend
	plans    map[string]*scheduled // by digest
	options  PoolOptions
	// prefixes records the cached prefixes of the places. decisionSums sums the score terms of the decisions.
	prefixes     *dispatch.Prefixes
	decisionSums reports.DecisionSums
	// places and at describe the candidates of the current decision.
	places  []dispatch.Place
	at      []place
	changed chan struct{} // closed at each change, to wake requests that wait for a backend
	now     func() time.Time
	// checksPins is true if a pinChecker checks new backends.
	checksPins bool
}

// group contains the backends of one plan.
type group struct {
	plan     string
	backends []*backend
	// maxRanks is the largest number of ranks of the backends. scheduler serves requests without a forecast, for that
	// number.
	maxRanks  int
	scheduler *dispatch.Scheduler
}

type backend struct {
	discovery.Backend
	outstanding  []int64 // by rank: tokens
	next         []int64 // by rank: prompt tokens sent since a response last began or ended, which the next engine step computes
	pending      []int   // by rank: inference requests
	caches       []int   // by rank: the index in the prefixes of the pool
	ejectedUntil time.Time
	// pins records, by route, whether the engine reads the rank of requests.
	pins     map[string]pin
	check    pinCheckState
	failures int       // consecutive inference requests answered with 5xx
	answered time.Time // when a gateway last received an answer from the backend
}

// width returns the number of ranks that one place of the backend represents.
func (b *backend) width() int64 {
	if b.Ranks > 0 {
		return 1
	}
	return int64(max(1, b.Width))
}

// identity identifies a backend.
type identity struct{ pod, address string }

func identityOf(b discovery.Backend) identity { return identity{b.Pod, b.Address} }

// requests returns the number of inference requests on the backend.
func (b *backend) requests() (total int) {
	for _, pending := range b.pending {
		total += pending
	}
	return total
}

// idle reports whether the backend has no requests.
func (b *backend) idle() bool {
	return !slices.ContainsFunc(b.outstanding, func(tokens int64) bool { return tokens > 0 }) &&
		!slices.ContainsFunc(b.pending, func(requests int) bool { return requests > 0 })
}

// scheduled is a plan with the scheduler of its requests. layout is own, or own with the tables of another plan.
type scheduled struct {
	own, layout *plans.Layout
	scheduler   *dispatch.Scheduler
	// queue is nil if requests do not wait.
	queue *waitqueue.Queue[waiting]
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

// Set replaces the backends. Backends that stay, or return before their requests have ended, keep their outstanding
// tokens and their recorded cache content.
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
		g.maxRanks = max(g.maxRanks, len(next.outstanding))
	}
	p.departed = old
	for _, gone := range old {
		p.dropIdle(gone)
	}
	for _, g := range p.groups {
		if was := oldGroups[g.plan]; was != nil && was.maxRanks == g.maxRanks {
			g.scheduler = was.scheduler
		} else {
			g.scheduler = p.mustSchedule(g.maxRanks, shapeOf(g.backends[0].Backend), defaultMachines())
		}
	}
	slices.SortFunc(p.groups, func(a, b *group) int { return cmp.Compare(a.plan, b.plan) })
	p.notify()
}

// takeOver removes the old backend of b from the map and returns it with b's data. If there is none, or it has another
// number of ranks, takeOver returns a new backend.
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

// dropIdle drops a departed backend that has no requests left.
func (p *Pool) dropIdle(b *backend) {
	if at := identityOf(b.Backend); p.departed[at] == b && b.idle() {
		delete(p.departed, at)
		p.forget(b)
	}
}

// forget drops the recorded cache content of a backend that gets no more requests.
func (p *Pool) forget(b *backend) {
	for _, cache := range b.caches {
		p.prefixes.Remove(cache)
	}
	b.caches = nil // the pool reuses the indexes for other backends
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

// shapeOf returns the model shape that a pod reports.
func shapeOf(b discovery.Backend) cost.Shape {
	if b.Shape == nil {
		return cost.Shape{}
	}
	return cost.Shape{MoELayers: len(b.Shape.MoELayers), TopK: b.Shape.ExpertsPerToken}
}

// mustSchedule returns a scheduler. It panics only on invalid options, which NewPoolWith rejects.
func (p *Pool) mustSchedule(ranks int, shape cost.Shape, on cost.Machines) *dispatch.Scheduler {
	scheduler, err := p.options.newScheduler(ranks, shape, on)
	if err != nil {
		panic(err)
	}
	return scheduler
}

// notify wakes the requests that wait for a backend. The lock must be held.
func (p *Pool) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// AddLayout adds a plan. Requests to backends that name the plan are then scored with the plan's own tables.
func (p *Pool) AddLayout(l *plans.Layout) {
	scheduler := p.mustSchedule(l.Ranks, l.Shape, l.Machines)
	p.mu.Lock()
	defer p.mu.Unlock()
	plan := &scheduled{own: l, layout: l, scheduler: scheduler}
	if p.options.Hold > 0 {
		plan.queue = waitqueue.New[waiting](l.Ranks, p.options.Hold)
	}
	p.plans[l.Digest] = plan
	p.notify() // a request for routed experts may have waited for it
}

// DropLayout removes a plan. Requests to backends that name the plan are then balanced by load.
func (p *Pool) DropLayout(digest string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.plans, digest)
}

// UseTables scores requests to backends of a plan with the tables of another plan, or again with its own. Running
// requests keep their forecasts. Prices are kept too: they depend on the load of the ranks, which new tables do not
// change.
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

// Tables returns the digest of the plan that provides the scoring tables, by the digest of the plan that backends name.
// It omits plans that are not loaded.
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

// DecisionSums returns a copy of the sums of the score terms of the decisions.
func (p *Pool) DecisionSums() reports.DecisionSums {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.decisionSums
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

// Len returns the number of backends.
func (p *Pool) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, g := range p.groups {
		n += len(g.backends)
	}
	return n
}

// Plans returns how many of the plans that backends name are loaded, and how many are not.
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

// Lease is a place on one rank that is reserved for a request.
type Lease struct {
	Backend discovery.Backend
	// Rank is the rank that the request is pinned to, or NoRank.
	Rank int

	// layout is the plan of the backend. It is nil if the backend has no plan or the plan is not loaded.
	layout *plans.Layout
	// scored is true if the tables of the layout scored the request; its forecast has the scores. unscored is the
	// reason if the backend has a plan but the request was not scored.
	scored   bool
	unscored string

	pool *Pool
	on   *backend
	// place is the rank of the backend that is charged with the tokens and the pending request.
	place   int
	tokens  int64
	pending int
	// inFlight is the number of other inference requests on the backend when the place was reserved.
	inFlight int
	// route is the path of an inference request; empty for others.
	route string
	// spread is true if the engine picks the rank. Each rank of the backend is then charged with an equal share of the
	// tokens.
	spread bool
	// otherRank is true once the response has reported a rank other than Rank.
	otherRank bool
	// begun is true once the response to an inference request has begun.
	begun bool
	// taken is the time at which the place was reserved.
	taken time.Time
	// prefixes are the hashed prefixes of the request. given are the ones that this request adds to the cache of the
	// place.
	prefixes, given []uint64
	// reserved is the memory reserved for the routed experts of the response, in bytes. releaseReserved releases it;
	// nil if nothing was reserved.
	reserved        int64
	releaseReserved func()
	once            sync.Once
}

// endpoint returns host:port of the rank.
func (l *Lease) endpoint() string { return l.Backend.Endpoint(l.Rank) }

// errAllFull is returned if every rank that a request could go to has reached its limit of pending requests.
var errAllFull = errors.New("all ranks have reached their limit of pending requests")

// acquire reserves a rank for a request, among endpoints that are not in tried, and adds the tokens of the request to
// it. It reports false if no rank is left or all ranks are full; if they are full, it sets r.refused.
func (p *Pool) acquire(r *request, tried map[string]bool) (*Lease, bool) {
	for {
		lease, ok, unknown := p.choose(r, tried)
		switch {
		case unknown.layout != nil:
			// The plan of the chosen pods has no forecast for the request yet. The backends may change while it is
			// computed.
			r.score(unknown.layout)
		case unknown.text:
			r.hash()
		default:
			return lease, ok
		}
	}
}

// wait acquires a rank like acquire. If there is no backend, it waits for one until the context ends. If the request
// may queue, it also waits for a suitable rank. It does not wait if all ranks are full: the client retries.
func (p *Pool) wait(ctx context.Context, r *request, tried map[string]bool) (*Lease, bool) {
	defer p.leaveQueue(r)
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
			if r.queued == nil || ctx.Err() != context.DeadlineExceeded {
				return nil, false
			}
			r.mayWait = false // a place is free, but not the one that the request waits for
			return p.acquire(r, tried)
		case <-changed:
		case <-r.queued.Woken():
		case <-patience:
			r.mayWait = false
		}
	}
}

// Release releases the place. Further calls do nothing.
func (l *Lease) Release() {
	l.once.Do(func() {
		if l.releaseReserved != nil {
			l.releaseReserved()
		}
		l.pool.mu.Lock()
		defer l.pool.mu.Unlock()
		l.leave()
	})
}

// leave removes the request from its place. The lock must be held.
func (l *Lease) leave() {
	l.charge(l.on.outstanding, -l.tokens)
	l.on.pending[l.place] -= l.pending
	l.stepped()
	l.pool.dropIdle(l.on)
}

// charge adds tokens to the place of the lease in a list of loads by rank. If the engine picks the rank, each rank gets
// an equal share.
func (l *Lease) charge(loads []int64, tokens int64) {
	if !l.spread {
		loads[l.place] += tokens
		return
	}
	for rank := range loads {
		loads[rank] += tokens / int64(len(loads))
	}
}

// Answered records that the first event of a streamed response has arrived. Further calls do nothing.
func (l *Lease) Answered() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if !l.begun {
		l.begun = true
		l.stepped()
	}
}

// stepped records that a response has begun or ended. An engine step is then complete, and the next step contains all
// prompts that were sent before.
func (l *Lease) stepped() {
	if l.pending > 0 {
		clear(l.on.next)
	}
}

// Eject keeps requests away from the backend of the lease for the ejection time, because it was unreachable.
func (l *Lease) Eject() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.eject(ejection)
}

// eject is Eject for a given time. The lock must be held.
func (l *Lease) eject(pause time.Duration) {
	if until := l.pool.now().Add(pause); until.After(l.on.ejectedUntil) {
		l.on.ejectedUntil = until
	}
}

// recordOutcome records whether the backend of the lease serves inference requests. A backend that fails requests
// immediately would look idle and attract all of them, but the request itself may be the cause. Failures of requests
// that were sent before the end of the backend's ejection do not count.
func (l *Lease) recordOutcome(serves bool) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	switch {
	case serves:
		l.on.failures = 0
	case l.taken.Before(l.on.ejectedUntil):
	default:
		l.on.failures++
		if more := l.on.failures - failuresToEject; more >= 0 {
			l.eject(ejection << min(more, maxEjectionDoublings))
		}
	}
}

// recordCached records that the place of the lease caches the request. It must follow a Match of the pool's prefixes
// for the same request. The lock must be held.
func (l *Lease) recordCached(prefixes []uint64) {
	l.prefixes = prefixes
	if len(prefixes) == 0 || l.place >= len(l.on.caches) {
		return
	}
	cache := l.on.caches[l.place]
	l.given = prefixes[l.pool.prefixes.Hit(cache).Tokens/dispatch.PrefixBlock:]
	l.pool.prefixes.Put(cache, prefixes)
}

// Unserved removes the request from the recorded cache content of the place, which has not served it.
func (l *Lease) Unserved() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.place < len(l.on.caches) {
		l.pool.prefixes.Forget(l.on.caches[l.place], l.given)
	}
	l.given = nil
}
