// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/breaker"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/reports"
	"github.com/semmoe/operator/internal/router/waitqueue"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
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
	// Queue configures the queue of the requests above this limit.
	Queue QueueOptions
	// Breaker configures when a backend gets no request while other backends can take it.
	Breaker breaker.Settings
	// Hold is the maximum time that a request waits for the rank of its experts, at most dispatch.MostHold. 0 disables
	// waiting. It requires the policy Price.
	Hold time.Duration
	// CacheTokensPerRank is the assumed capacity of the KV cache of a rank, in tokens.
	CacheTokensPerRank int
}

// DefaultPoolOptions returns the options of a router without flags.
func DefaultPoolOptions() PoolOptions {
	return PoolOptions{Policy: dispatch.Price, Cap: 1.15, Weights: dispatch.DefaultWeights, CacheTokensPerRank: dispatch.DefaultCacheTokens, Breaker: breaker.Default()}
}

const (
	// maxCacheTokens is far above the KV cache of any device.
	maxCacheTokens = 1 << 26
	// maxCap and maxWeight keep sums of scores finite.
	maxCap, maxWeight = 4096, 1_000_000
)

// Validate returns an error for options that are out of bounds.
func (o *PoolOptions) Validate() error {
	switch {
	case o.PendingLimitPerRank < 0:
		return fmt.Errorf("pendingLimitPerRank: %d is invalid: it must be at least 0", o.PendingLimitPerRank)
	case o.CacheTokensPerRank < 1 || o.CacheTokensPerRank > maxCacheTokens:
		return fmt.Errorf("cacheTokensPerRank: %d is invalid: it must be 1 to %d", o.CacheTokensPerRank, maxCacheTokens)
	case o.Cap > maxCap:
		return fmt.Errorf("cap: %v is invalid: it must be 1 to %d", o.Cap, maxCap)
	case max(o.Weights.Affinity, o.Weights.Prefix, o.Weights.Load, o.Weights.Wait) > maxWeight:
		return fmt.Errorf("weights: %+v is invalid: a weight must be 0 to %d", o.Weights, maxWeight)
	case o.Hold < 0 || o.Hold > dispatch.MaxWait:
		return fmt.Errorf("hold: %v is invalid: it must be 0 to %v", o.Hold, dispatch.MaxWait)
	case o.Hold > 0 && o.Policy != dispatch.Price:
		return fmt.Errorf("hold: %v is invalid: waiting requires policy %s, not %s", o.Hold, dispatch.Price, o.Policy)
	}
	if err := o.Queue.validate(o.PendingLimitPerRank); err != nil {
		return err
	}
	if err := o.Breaker.Validate(); err != nil {
		return err
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
	// events are the KV events of the ranks; nil if they are not read.
	events *kvevents.Subscriptions
	// waiters are the requests that wait for a place; nil without a queue. queueSeconds measures their waiting times.
	waiters      *waitqueue.FairQueue[filter]
	queueSeconds *prometheus.HistogramVec
	// ejections counts the ejections by reason.
	ejections [breaker.ReasonCount]int
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
	outstanding []int64 // by rank: tokens
	next        []int64 // by rank: prompt tokens sent since a response last began or ended, which the next engine step computes
	pending     []int   // by rank: inference requests
	caches      []int   // by rank: the index in the prefixes of the pool
	breaker     breaker.Breaker
	// pins records, by route, whether the engine reads the rank of requests.
	pins     map[string]pin
	check    pinCheckState
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
	if err := options.Validate(); err != nil {
		return nil, err
	}
	p := &Pool{
		departed: map[identity]*backend{}, plans: map[string]*scheduled{}, changed: make(chan struct{}), now: time.Now,
		options: options, prefixes: dispatch.NewPrefixes(options.CacheTokensPerRank), queueSeconds: newQueueSeconds(),
	}
	if options.Queue.Size > 0 {
		p.waiters = waitqueue.NewFairQueue[filter](options.Queue.Size)
	}
	return p, nil
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
	p.wakeWaiter()
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

// readsPrompts reports whether requests are scored by plans, or policies read their prefixes. A request that was read
// before the first plan was loaded is balanced by load.
func (p *Pool) readsPrompts() bool {
	if p.options.Policy.ReadsPrefixes() {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.plans) > 0
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

// engineServer is a server of an engine: host:port, and the scheme of its URLs.
type engineServer struct{ scheme, endpoint string }

// servers returns the servers of all backends: one per pod, or per rank with its own port.
func (p *Pool) servers() []engineServer {
	var all []engineServer
	for _, b := range p.backends() {
		if len(b.RankAddresses) == 0 {
			all = append(all, engineServer{b.Scheme(), b.Address})
			continue
		}
		for _, address := range b.RankAddresses {
			if address != "" {
				all = append(all, engineServer{b.Scheme(), address})
			}
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
