// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
)

// QueueReport is the distribution of waiting times in the queue, in requests that arrived before the dispatch.
type QueueReport struct {
	// AtOnce is the share of requests dispatched on arrival.
	AtOnce       float64 `json:"at_once"`
	Mean         float64 `json:"mean"`
	Percentile95 int     `json:"p95"`
	Max          int     `json:"max"`
}

// scheduleLate implements the policy late. The order becomes the order of dispatch.
func (r *orderRun) scheduleLate(caches *dispatch.Prefixes) error {
	size := r.options.MaxWaiting
	if size == 0 {
		size = r.placement.Ranks
	}
	line, err := dispatch.NewWaitQueue(r.scheduling(), size)
	if err != nil {
		return err
	}
	ranks := make([]dispatch.Place, r.placement.Ranks)
	places := func(request int) []dispatch.Place { return r.places(ranks, request, line.Load, caches) }
	went := make([]int, 0, len(r.order))
	send := func(must bool) {
		for sent, ok := line.Next(places, must); ok; sent, ok = line.Next(places, must) {
			r.recordDecision(sent.ID, &sent.Decision, caches)
			line.Take(&sent)
			went, r.waited = append(went, sent.ID), append(r.waited, sent.Waited)
		}
	}
	for _, request := range r.order {
		line.Arrive(request, &r.requests[request].Request)
		send(false)
	}
	send(true)
	r.order = went
	return nil
}

// queueReport returns the distribution of waiting times; nil if requests did not wait.
func queueReport(orders []*orderRun) *QueueReport {
	var waited []int
	for _, run := range orders {
		waited = append(waited, run.waited...)
	}
	if len(waited) == 0 {
		return nil
	}
	slices.Sort(waited)
	r := QueueReport{Max: waited[len(waited)-1], Percentile95: waited[len(waited)*95/100]}
	sum, atOnce := 0, 0
	for _, n := range waited {
		sum += n
		if n == 0 {
			atOnce++
		}
	}
	r.AtOnce, r.Mean = float64(atOnce)/float64(len(waited)), float64(sum)/float64(len(waited))
	return &r
}
