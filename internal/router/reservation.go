// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/semmoe/operator/internal/router/wire"
)

var (
	errNoBackend       = errors.New("no serving pod is ready")
	errNoRoutedExperts = errors.New("no ready pod can return routed experts with logical expert IDs")
	errQueueFull       = errors.New("the request queues of the serving pods are full")
)

// errRefused is returned if all pods have answered 503 for refusalWait. The client gets the last of these responses.
var errRefused = errors.New("all serving pods answer that they are not available")

// errAllFull is returned if every rank that a request could go to has reached its limit of pending requests.
var errAllFull = errors.New("all ranks have reached their limit of pending requests")

const (
	// firstPause is the time until a request is sent to all pods again. It doubles each time, up to longestPause.
	firstPause   = 100 * time.Millisecond
	longestPause = time.Second
	// refusalWait is the time for which a request is sent again if all pods answer 503. These pods are ready, so a longer
	// wait rarely helps, and the client can decide by the response.
	refusalWait = 2 * time.Second
)

// tries records the failed attempts of the current round. In a round each pod gets the request once. A pod with
// separate queues per rank gets it a second time if the queue of the first rank is full.
type tries struct {
	places map[string]bool
	// full contains the endpoints that serve requests but have a full queue.
	full map[string]bool
	// pause is the time to wait before the next round.
	pause time.Duration
	// refusal is the last response with status 503, with its body; nil if there is none. refusedAt is the time of the first
	// one.
	refusal   *http.Response
	refusedAt time.Time
}

func newTries() *tries {
	return &tries{places: map[string]bool{}, full: map[string]bool{}, pause: firstPause}
}

// refuse keeps a response with status 503, and closes it. It reports whether the queue of the pod is full.
func (t *tries) refuse(response *http.Response) (full bool) {
	text, _ := io.ReadAll(io.LimitReader(response.Body, maxRefusalBytes)) // a partial text is sufficient
	response.Body.Close()
	if full = wire.IsQueueFull(text); full {
		return true
	}
	if t.refusal == nil {
		t.refusedAt = time.Now()
	}
	if response.Header.Get("Retry-After") == "" {
		response.Header.Set("Retry-After", "1")
	}
	response.Header.Set("Content-Length", strconv.Itoa(len(text)))
	response.ContentLength, response.TransferEncoding = int64(len(text)), nil
	response.Body = io.NopCloser(bytes.NewReader(text))
	t.refusal = response
	return false
}

// refusalOr returns the last response with status 503 if no other pod can take the request, and the error otherwise.
func (t *tries) refusalOr(err error) (*http.Response, error) {
	if t.refusal != nil && (errors.Is(err, errRefused) || errors.Is(err, errNoBackend)) {
		return t.refusal, nil
	}
	return nil, err
}

// add records that the place of a lease did not answer. full is true if its queue is full.
func (t *tries) add(lease *Lease, full bool) {
	endpoint := lease.endpoint()
	place := endpoint
	if full && !t.full[endpoint] && lease.Backend.PinsByHeader(lease.Rank) {
		place = rankAt(endpoint, lease.Rank)
	}
	t.places[place] = true
	if full {
		t.full[endpoint] = true
	}
}

// reserve reserves a rank of a pod that was not tried. Once all pods were tried, it waits and tries all of them again:
// an unreachable pod may have just been deleted, and its successor may be starting. It fails at the deadline. It fails
// at once if pods have full queues, because polling them would add to their load, and after refusalWait if all pods
// answer 503. If all ranks are full, it waits in the queue, if there is one.
func (p *Pool) reserve(ctx context.Context, deadline time.Time, r *request, tries *tries) (*Lease, error) {
	lease, ok := p.reserveUntil(ctx, deadline, r, tries)
	if !ok && r.waiter != nil {
		lease, ok = p.awaitPlace(ctx, deadline, r, tries)
	}
	switch {
	case ok:
		return lease, nil
	case r.refused != nil:
		return nil, r.refused
	case r.asksExperts:
		return nil, errNoRoutedExperts
	}
	return nil, errNoBackend
}

// reserveUntil is reserve with a boolean instead of an error.
func (p *Pool) reserveUntil(ctx context.Context, deadline time.Time, r *request, tries *tries) (*Lease, bool) {
	r.mayWait = len(tries.places) == 0 && r.waiter == nil
	if lease, ok := p.acquire(r, tries.places); ok {
		return lease, true
	}
	if len(tries.full) > 0 {
		r.refused = errQueueFull
	}
	if r.refused != nil {
		return nil, false
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	if len(tries.places) == 0 {
		return p.wait(ctx, r, nil)
	}
	if tries.refusal != nil && time.Since(tries.refusedAt) >= refusalWait && p.Len() > 0 {
		r.refused = errRefused
		return nil, false
	}
	pause, cancelPause := context.WithTimeout(ctx, tries.pause)
	defer cancelPause()
	if lease, ok := p.wait(pause, r, tries.places); ok {
		return lease, true
	}
	if ctx.Err() != nil {
		return nil, false
	}
	clear(tries.places)
	tries.pause = min(2*tries.pause, longestPause)
	return p.wait(ctx, r, nil)
}

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
		case unknown.prefixes:
			r.hash()
			p.observe(r)
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
