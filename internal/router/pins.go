// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

// pin states whether the engine reads the rank of requests to a route, for a backend with ranks that share an address.
type pin string

const (
	// pinUnchecked: no check was conclusive, for example because the engine lacks the route. Requests are pinned.
	pinUnchecked pin = "unchecked"
	// pinObeyed: the engine reads the rank.
	pinObeyed pin = "obeyed"
	// pinUnproven: the engine has answered a request for a rank that it does not have, and has rejected none on any
	// route. It may not read ranks, or not validate them. Requests are pinned.
	pinUnproven pin = "unproven"
	// pinIgnored: the engine reads the rank on other routes but not on this one. Requests are balanced by load.
	pinIgnored pin = "ignored"
	// pinByLoad: the engine ignores the rank on this route, as some of its releases do (engine.RankRoutes.Mixed). Requests
	// are balanced by load.
	pinByLoad pin = "by-load"
	// pinContradicted: a response has reported another rank than the one that the request was pinned to. Requests are
	// balanced by load until the pod is replaced.
	pinContradicted pin = "contradicted"
)

// isConclusive reports whether a route needs no further check.
func (p pin) isConclusive() bool {
	return p == pinObeyed || p == pinIgnored || p == pinByLoad || p == pinContradicted
}

var allPins = []pin{pinUnchecked, pinObeyed, pinUnproven, pinIgnored, pinByLoad, pinContradicted}

// sharesAddress reports whether the ranks of a backend share an address.
func (b *backend) sharesAddress() bool { return b.Ranks > 0 && len(b.RankAddresses) == 0 }

// pinOf returns the state of a route of a backend with ranks that share an address. Without a pinChecker, the engine is
// trusted. The lock must be held.
func (p *Pool) pinOf(b *backend, route string) pin {
	fallback := pinObeyed
	if p.checksPins {
		fallback = pinUnchecked
	}
	return cmp.Or(b.pins[route], fallback)
}

// pins reports whether a request is pinned to a rank of a backend. If not, the engine picks the rank. The lock must be
// held.
func (p *Pool) pins(b *backend, r *request) bool {
	if !b.sharesAddress() {
		return true
	}
	if r.pins != nil && !r.pins(b.Backend) {
		return false
	}
	known := p.pinOf(b, r.route)
	return known != pinIgnored && known != pinByLoad && known != pinContradicted
}

// knownRank returns the rank that serves the request of the lease. It returns NoRank if the engine picks the rank, was
// not observed to read the rank on this route, or has reported another rank.
func (l *Lease) knownRank() int {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.route == "" || l.otherRank || l.on.sharesAddress() && l.pool.pinOf(l.on, l.route) != pinObeyed {
		return discovery.NoRank
	}
	return l.Rank
}

// contradict records that the response reports another rank than the lease has. It reports true on the first call only.
func (l *Lease) contradict() bool {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.otherRank {
		return false
	}
	l.otherRank = true
	l.on.pins[l.route] = pinContradicted
	return true
}

// countPins counts the backends with ranks that share an address, by revision, route and pin state.
func (p *Pool) countPins() map[pinCount]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	counts := map[pinCount]int{}
	for _, g := range p.groups {
		for _, b := range g.backends {
			if !b.sharesAddress() {
				continue
			}
			for _, route := range pinnedRoutes {
				if lacking[route][b.Engine] {
					continue
				}
				counts[pinCount{b.Revision, route, p.pinOf(b, route)}]++
			}
		}
	}
	return counts
}

type pinCount struct {
	revision, route string
	pin             pin
}

// ignoredRanks lists the routes on which pinned requests were answered without evidence that the pinned rank served
// them, apart from those that are known to be balanced by load.
func (p *Pool) ignoredRanks() []lar.IgnoredRank {
	sums := map[lar.IgnoredRank]int{}
	for at, pods := range p.countPins() {
		if at.pin != pinObeyed && at.pin != pinUnchecked && at.pin != pinByLoad {
			sums[lar.IgnoredRank{Revision: at.revision, Route: at.route}] += pods
		}
	}
	var list []lar.IgnoredRank
	for at, pods := range sums {
		at.Pods = pods
		list = append(list, at)
	}
	slices.SortFunc(list, func(a, b lar.IgnoredRank) int {
		return cmp.Or(cmp.Compare(a.Revision, b.Revision), cmp.Compare(a.Route, b.Route))
	})
	return list
}

// pinsCollector exports the number of pods by route and pin state.
type pinsCollector struct{ pool *Pool }

var pinsMetric = prometheus.NewDesc("semmoe_router_pinned_pods",
	"Engine pods whose ranks share an address, by route and by the result of the check that the engine obeys the rank of a request: unchecked, obeyed, unproven, ignored, by-load (as releases of the engine do) or contradicted.",
	[]string{"route", "pin"}, nil)

func (c pinsCollector) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- pinsMetric }

func (c pinsCollector) Collect(metrics chan<- prometheus.Metric) {
	sums := map[pinCount]int{}
	for at, pods := range c.pool.countPins() {
		at.revision = ""
		sums[at] += pods
	}
	for _, route := range pinnedRoutes {
		for _, known := range allPins {
			metrics <- prometheus.MustNewConstMetric(pinsMetric, prometheus.GaugeValue, float64(sums[pinCount{"", route, known}]), route, string(known))
		}
	}
}

// pinCheckState is the schedule of the checks of a backend.
type pinCheckState struct {
	// holdUntil is the end of the time in which a new backend gets no request, so that the rank of its first requests
	// is known.
	holdUntil time.Time
	// busy is true while a check runs. next is the earliest time of the next check. pause is the time after the last
	// inconclusive check.
	busy  bool
	next  time.Time
	pause time.Duration
}
