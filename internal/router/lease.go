// SPDX-License-Identifier: Apache-2.0

package router

import (
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/solver/dispatch"
)

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
	// trial is true while the request counts as a trial of a half-open breaker.
	trial bool
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
	if l.trial {
		l.on.breaker.End()
		l.trial = false
	}
	l.pool.dropIdle(l.on)
	l.pool.wakeWaiter()
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
	l.eject()
}

// eject is Eject. The lock must be held.
func (l *Lease) eject() {
	l.pool.ejections[l.on.breaker.Unreachable(&l.pool.options.Breaker, l.pool.now())]++
}

// recordOutcome records whether the backend of the lease serves inference requests. A backend that fails requests
// immediately would look idle and attract all of them, but the request itself may be the cause.
func (l *Lease) recordOutcome(serves bool) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	settings, now := &l.pool.options.Breaker, l.pool.now()
	if serves {
		l.on.breaker.Served(settings, l.taken, now)
	} else {
		l.pool.ejections[l.on.breaker.Failed(settings, l.taken, now)]++
	}
}

// recordUnavailable keeps requests away from the backend of the lease, which has answered 503.
func (l *Lease) recordUnavailable() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.pool.ejections[l.on.breaker.Unavailable(&l.pool.options.Breaker, l.taken, l.pool.now())]++
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

// mark sets the response headers that identify the pod, the rank and the plan. It removes those of the engine.
func (l *Lease) mark(header http.Header) {
	removeOwn(header)
	header.Set(HeaderPod, l.Backend.Pod)
	l.markRank(header)
	if l.scored {
		header.Set(HeaderPlan, artifact.Digest(l.layout.Tables).Short())
	}
}

// removeOwn removes the headers of the router from a header or trailer of an engine. The client gets the id of the
// request from the router, whether or not the engine repeats it.
func removeOwn(header http.Header) {
	for name := range header {
		if isOwnHeader(name) || name == HeaderRequestID {
			delete(header, name)
		}
	}
}

// markRank sets the header with the rank that served the request. It removes the header if the rank is not known.
func (l *Lease) markRank(header http.Header) {
	header.Del(HeaderRank)
	if rank := l.knownRank(); rank != discovery.NoRank {
		header.Set(HeaderRank, strconv.Itoa(rank))
	}
}

// leasedBody releases the place on the rank when the response has been read or the client has disconnected.
type leasedBody struct {
	io.ReadCloser
	// response contains the trailer, once the body has ended.
	response *http.Response
	lease    *Lease
	once     sync.Once
}

func (b *leasedBody) Close() error {
	b.once.Do(b.lease.Release)
	err := b.ReadCloser.Close()
	removeOwn(b.response.Trailer)
	return err
}
