// SPDX-License-Identifier: Apache-2.0

package kvevents

import "github.com/prometheus/client_golang/prometheus"

// Reasons why events were not used.
const (
	reasonDisconnected = "disconnected" // the connection broke, and all blocks were forgotten
	reasonGap          = "gap"          // messages were lost, and all blocks were forgotten
	reasonMalformed    = "malformed"
	reasonRank         = "rank"
	reasonBlockSize    = "block_size"
	reasonGroups       = "groups"
	reasonVocabulary   = "vocabulary"
)

var reasons = []string{reasonDisconnected, reasonGap, reasonMalformed, reasonRank, reasonBlockSize, reasonGroups, reasonVocabulary}

// metrics are the metrics of the subscriptions.
type metrics struct {
	events, unindexed, drops, requests *prometheus.CounterVec
}

func newMetrics() *metrics {
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	m := &metrics{
		events: counter("semmoe_router_kv_events_total", "KV events of engines, by event: stored, removed or cleared; ignored if they are not about the memory of a device.", "event"),
		unindexed: counter("semmoe_router_kv_unindexed_blocks_total",
			"Stored blocks that are not indexed, by reason: keyed (of a LoRA adapter, an image or a salt), orphan (the previous block is not known) or full (too many blocks).", "reason"),
		drops: counter("semmoe_router_kv_event_drops_total",
			"Times that KV events of a rank were not used, by reason: disconnected, gap, malformed, rank, block_size, groups or vocabulary.", "reason"),
		requests: counter("semmoe_router_kv_requests_total",
			"Requests by how the cached prefix on their rank is known: exact (KV events) or estimated (requests sent).", "prefix"),
	}
	for _, prefix := range []string{exact, estimated} {
		m.requests.WithLabelValues(prefix)
	}
	for _, event := range []string{"stored", "removed", "cleared", "ignored"} {
		m.events.WithLabelValues(event)
	}
	for _, reason := range []string{"keyed", "orphan", "full"} {
		m.unindexed.WithLabelValues(reason)
	}
	for _, reason := range reasons {
		m.drops.WithLabelValues(reason)
	}
	return m
}

// How the cached prefix of a request is known.
const exact, estimated = "exact", "estimated"

// CountRequest counts a request whose cached prefix is known by KV events, or estimated.
func (s *Subscriptions) CountRequest(known bool) {
	prefix := estimated
	if known {
		prefix = exact
	}
	s.metrics.requests.WithLabelValues(prefix).Inc()
}

// add counts what a batch did.
func (m *metrics) add(done *changes) {
	m.events.WithLabelValues("stored").Add(float64(done.stored))
	m.events.WithLabelValues("removed").Add(float64(done.removed))
	m.events.WithLabelValues("cleared").Add(float64(done.cleared))
	m.events.WithLabelValues("ignored").Add(float64(done.ignored))
	m.unindexed.WithLabelValues("keyed").Add(float64(done.keyed))
	m.unindexed.WithLabelValues("orphan").Add(float64(done.orphans))
	m.unindexed.WithLabelValues("full").Add(float64(done.full))
}

// Collectors returns the metrics of the subscriptions.
func (s *Subscriptions) Collectors() []prometheus.Collector {
	ranks := func(state string, live bool) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "semmoe_router_kv_event_ranks", Help: "Ranks whose KV events are subscribed, by state: live, or down if their prefixes are estimated.",
			ConstLabels: prometheus.Labels{"state": state},
		}, func() (n float64) {
			for _, r := range s.ranks() {
				if _, known := r.state(); known == live {
					n++
				}
			}
			return n
		})
	}
	return []prometheus.Collector{
		s.metrics.events, s.metrics.unindexed, s.metrics.drops, s.metrics.requests, ranks("live", true), ranks("down", false),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "semmoe_router_kv_blocks", Help: "Blocks of KV caches that are indexed by KV events, over all ranks."},
			func() float64 { return float64(s.total.Load()) }),
	}
}
