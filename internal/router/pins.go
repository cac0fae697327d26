package router

import (
	"cmp"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

// pin is what is known of the rank of requests to a route of a backend whose ranks share an address.
type pin string

const (
	// pinUnchecked: no check has had a conclusive answer, as on a route that the engine does not have. Requests are sent to a rank.
	pinUnchecked pin = "unchecked"
	// pinObeyed: the engine reads the rank.
	pinObeyed pin = "obeyed"
	// pinUnproven: the engine has answered a request for a rank that it does not have, and has refused none on any route. It may read no
	// rank, or check none. Requests are sent to a rank.
	pinUnproven pin = "unproven"
	// pinIgnored: the engine does not read the rank, as it does on other routes. Requests are balanced by load.
	pinIgnored pin = "ignored"
	// pinContradicted: an answer has reported another rank than the request was sent to. Requests are balanced by load until the pod is
	// replaced.
	pinContradicted pin = "contradicted"
)

var allPins = []pin{pinUnchecked, pinObeyed, pinUnproven, pinIgnored, pinContradicted}

// sharesAddress reports whether the ranks of a backend share an address.
func (b *backend) sharesAddress() bool { return b.Ranks > 0 && len(b.RankAddresses) == 0 }

// pinOf returns what is known of a route of a backend whose ranks share an address. Without a pinChecker the engine is trusted. The lock
// must be held.
func (p *Pool) pinOf(b *backend, route string) pin {
	fallback := pinObeyed
	if p.checksPins {
		fallback = pinUnchecked
	}
	return cmp.Or(b.pins[route], fallback)
}

// pins reports whether a request is sent to a rank of a backend. Otherwise the engine picks the rank. The lock must be held.
func (p *Pool) pins(b *backend, r *request) bool {
	if !b.sharesAddress() {
		return true
	}
	if r.pins != nil && !r.pins(b.Backend) {
		return false
	}
	known := p.pinOf(b, r.route)
	return known != pinIgnored && known != pinContradicted
}

// knownRank returns the rank that serves the lease's request. It returns NoRank where the rank is not known: the engine picks it, or has not
// been seen to read it on the request's route, or has reported another one.
func (l *Lease) knownRank() int {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.route == "" || l.otherRank || l.on.sharesAddress() && l.pool.pinOf(l.on, l.route) != pinObeyed {
		return discovery.NoRank
	}
	return l.Rank
}

// contradict notes that the answer reports another rank than the lease's. It reports whether that is news: further calls do nothing.
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

// countPins counts the backends whose ranks share an address, by revision, route and what is known.
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

// ignoredRanks lists the routes on which backends answer requests for a rank without any sign that they serve them there.
func (p *Pool) ignoredRanks() []lar.IgnoredRank {
	sums := map[lar.IgnoredRank]int{}
	for at, pods := range p.countPins() {
		if at.pin != pinObeyed && at.pin != pinUnchecked {
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

// pinsCollector counts pods by what is known of their ranks.
type pinsCollector struct{ pool *Pool }

var pinsMetric = prometheus.NewDesc("semmoe_router_pinned_pods",
	"Engine pods whose ranks share an address, by route and by what is known of the rank of requests: unchecked, obeyed, unproven, ignored or contradicted.",
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

// pinCheckState is when a backend is checked.
type pinCheckState struct {
	// holdUntil is the end of the time in which a new backend gets no request, so that its first requests have a known rank.
	holdUntil time.Time
	// busy is true while a check runs, next is when another one may begin, and pause the time after a check that was not conclusive.
	busy  bool
	next  time.Time
	pause time.Duration
}
