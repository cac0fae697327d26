// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/wire"
)

const (
	// noSuchRank is a rank that no pod has (discovery.MaxRanks). A rejection that does not repeat the rank is unlikely
	// to contain this number.
	noSuchRank = 1_048_579
	// pinCheckTimeout bounds one request of a check. An engine that ignores the rank queues the request and generates a
	// token.
	pinCheckTimeout = 30 * time.Second
	// pinHold is the time for which a new backend gets no request while it is checked. Engines reject a rank within
	// milliseconds.
	pinHold = time.Second
	// firstPinPause is the time after an inconclusive check. It doubles each time, up to longestPinPause.
	firstPinPause   = time.Second
	longestPinPause = 10 * time.Minute
	// maxRefusalBytes bounds the part of a response that is read.
	maxRefusalBytes = 64 << 10
)

// pinChecker determines on which routes engines read the rank of a request. An engine rejects a rank that it does not
// have, and names the rank. A route that ignores the rank answers the request. The result depends neither on other
// requests nor on other routers, which check the engine too: a rejection costs the engine no token.
type pinChecker struct {
	pool      *Pool
	engine    *engine.Adapter // of pods that do not name theirs
	transport http.RoundTripper
	log       logr.Logger
}

// checkPins returns a checker for new backends of the pool. Call it before Pool.Set, and run the result.
func checkPins(pool *Pool, options ProxyOptions, log logr.Logger) *pinChecker {
	pool.mu.Lock()
	defer pool.mu.Unlock()
	pool.checksPins = true
	return &pinChecker{pool: pool, engine: options.adapter(), transport: newTransport(options.Engines), log: log}
}

// run checks backends until the context ends.
func (c *pinChecker) run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	for {
		due, wake, changed := c.pool.duePinChecks()
		for _, b := range due {
			running.Go(func() { c.pool.endPinCheck(b.on, c.check(ctx, b.Backend, b.known)) })
		}
		timer := time.NewTimer(wake)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// settle waits until no backend of the pool is on hold, or until the context ends.
func (c *pinChecker) settle(ctx context.Context) {
	for {
		held, changed := c.pool.pinsOnHold()
		if !held {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// check returns the results by route. Routes with a known result are omitted, because an engine that ignores the rank
// would generate a token again, and so are inconclusive ones. Routes that read the rank from the body are
// checked only if another route has rejected the rank: releases of SGLang before 2026-03 exit when a body has a rank
// out of range (sgl-project/sglang#19762), and do not read the header.
func (c *pinChecker) check(ctx context.Context, b discovery.Backend, known map[string]pin) map[string]pin {
	adapter, found := b.Adapter(c.engine), map[string]pin{}
	refuses := slices.Contains(slices.Collect(maps.Values(known)), pinObeyed)
	for _, inBody := range []bool{false, true} {
		for _, route := range pinnedRoutes {
			header, field := adapter.OnRoute(route)
			if header == "" && field == "" || (field != "") != inBody || inBody && !refuses || lacking[route][b.Engine] || known[route].isConclusive() {
				continue
			}
			smallest := engine.APIOf(route).Smallest
			if strings.Contains(smallest, "%s") {
				smallest = fmt.Sprintf(smallest, c.modelName(ctx, b))
			}
			if found[route] = c.ask(ctx, b, route, smallest, header, field); found[route] == pinObeyed {
				refuses = true
			}
		}
	}
	for route, result := range found {
		switch {
		case result == pinIgnored && slices.Contains(adapter.RankRoutes.Mixed, route):
			result = pinByLoad
		case result == pinIgnored && !refuses:
			result = pinUnproven
		}
		found[route] = result
		level := 1
		if result == pinIgnored || result == pinUnproven {
			level = 0
		}
		c.log.V(level).Info("Checked whether an engine reads the rank of requests", "pod", b.Pod, "route", route, "result", result)
	}
	return found
}

// modelName returns the name of the model that a backend serves, as JSON, or "" as JSON if the backend names none.
func (c *pinChecker) modelName(ctx context.Context, b discovery.Backend) string {
	const unknown = `""`
	ctx, cancel := context.WithTimeout(ctx, pinCheckTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, b.URL("/v1/models"), http.NoBody)
	if err != nil {
		return unknown
	}
	response, err := c.transport.RoundTrip(request)
	if err != nil {
		return unknown
	}
	defer response.Body.Close()
	var list struct {
		Data []struct {
			ID json.RawMessage `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxRefusalBytes)).Decode(&list); err != nil || len(list.Data) == 0 {
		return unknown
	}
	return string(list.Data[0].ID)
}

// ask sends the smallest request of a route, with a rank that no engine has.
func (c *pinChecker) ask(ctx context.Context, b discovery.Backend, route, smallest, header, field string) pin {
	ctx, cancel := context.WithTimeout(ctx, pinCheckTimeout)
	defer cancel()
	rank, head, body := strconv.Itoa(noSuchRank), "", []byte(smallest)
	if field != "" {
		head, body = wire.ParseBody(body).With(wire.Addition{Name: field, Value: rank})
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, b.URL(route), bytes.NewReader(append([]byte(head), body...)))
	if err != nil {
		return pinUnchecked // the pod reports an invalid address
	}
	request.Header.Set("Content-Type", "application/json")
	request.Close = true // vLLM 0.22.1 closes the connection, unannounced, after it has refused a rank on /v1/chat/completions
	if header != "" {
		request.Header.Set(header, rank)
	}
	response, err := c.transport.RoundTrip(request)
	if err != nil {
		return pinUnchecked
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxRefusalBytes))
	switch code := response.StatusCode; {
	case err != nil:
		return pinUnchecked
	case code == http.StatusOK:
		return pinIgnored
	case code >= 400 && code < 500 && bytes.Contains(text, []byte(rank)):
		return pinObeyed
	}
	return pinUnchecked
}

// pinCheck is a backend to be checked, with its state when the check became due.
type pinCheck struct {
	discovery.Backend
	on    *backend
	known map[string]pin
}

// duePinChecks returns the backends to be checked now and marks them as busy. wait is the time until another check is
// due or a hold ends. Backends get requests after their hold.
func (p *Pool) duePinChecks() (due []pinCheck, wait time.Duration, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, wait := p.now(), longestPinPause
	released := false
	for _, g := range p.groups {
		for _, b := range g.backends {
			state := &b.check
			if !state.holdUntil.IsZero() {
				if left := state.holdUntil.Sub(now); left > 0 {
					wait = min(wait, left)
				} else {
					state.holdUntil, released = time.Time{}, true
				}
			}
			switch {
			case state.busy || !b.sharesAddress() || !p.isUnchecked(b):
			case now.Before(state.next):
				wait = min(wait, state.next.Sub(now))
			default:
				state.busy = true
				due = append(due, pinCheck{b.Backend, b, maps.Clone(b.pins)})
			}
		}
	}
	if released {
		p.notify()
	}
	return due, wait, p.changed
}

// isUnchecked reports whether the check of at least one route of a backend was inconclusive.
func (p *Pool) isUnchecked(b *backend) bool {
	for _, route := range pinnedRoutes {
		if !lacking[route][b.Engine] && !p.pinOf(b, route).isConclusive() {
			return true
		}
	}
	return false
}

// endPinCheck records the results of a check.
func (p *Pool) endPinCheck(b *backend, found map[string]pin) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for route, result := range found {
		if result != pinUnchecked && b.pins[route] != pinContradicted {
			b.pins[route] = result
		}
	}
	pause := min(max(2*b.check.pause, firstPinPause), longestPinPause)
	b.check = pinCheckState{next: p.now().Add(pause), pause: pause}
	p.notify()
}

// pinsOnHold reports whether a backend is on hold while it is checked. The channel is closed at the next change.
func (p *Pool) pinsOnHold() (held bool, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.groups {
		for _, b := range g.backends {
			held = held || !b.check.holdUntil.IsZero()
		}
	}
	return held, p.changed
}
