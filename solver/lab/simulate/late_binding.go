// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// holder lets requests wait for the rank of their experts (late binding), as the request router does.
type holder struct {
	engine *engine
	queue  *dispatch.WaitQueue
	pace   dispatch.ArrivalRate
	// hold is the maximum wait in microseconds, last the arrival time of the latest request.
	hold, last float64
	// waiting are the queued requests by number; queued is the number of all requests that have waited.
	waiting map[int]*served
	queued  int
}

func newHolder(e *engine, o dispatch.Options) (*holder, error) {
	queue, err := dispatch.NewWaitQueue(o, o.Ranks)
	return &holder{
		engine: e, queue: queue, pace: dispatch.NewArrivalRate(o.Ranks, e.options.Hold), hold: float64(e.options.Hold.Nanoseconds()) / 1e3,
		last: math.Inf(-1), waiting: map[int]*served{},
	}, err
}

// arrive dispatches a request, or queues it if waiting can pay.
func (h *holder) arrive(s *served) {
	h.release(s.arrival)
	request := h.engine.dispatchRequest(s, make([]float32, len(h.engine.lanes)))
	after := min(1e3*(s.arrival-h.last), float64(math.MaxInt64/2))
	h.last = s.arrival
	if !h.pace.Arrive(time.Duration(after)) {
		d := h.queue.Bypass(&request, h.engine.currentPlaces())
		h.engine.enqueue(s, d.Rank)
	} else {
		h.waiting[h.queued] = s
		h.queue.Arrive(h.queued, &request)
		h.queued++
	}
	h.send(false)
}

// ends returns the time at which the first queued request must go, or infinity for an empty queue.
func (h *holder) ends() float64 {
	if h.queue.Len() == 0 {
		return math.Inf(1)
	}
	return h.waiting[h.queue.First()].arrival + h.hold
}

// release dispatches all requests that reach their maximum wait by a time.
func (h *holder) release(by float64) {
	for h.ends() <= by {
		h.send(true)
	}
}

// send dispatches the queued requests that may go, and at least one if must is set.
func (h *holder) send(must bool) {
	places := func(int) []dispatch.Place { return h.engine.currentPlaces() }
	for sent, ok := h.queue.Next(places, must); ok; sent, ok = h.queue.Next(places, false) {
		h.queue.Take(&sent)
		h.engine.enqueue(h.waiting[sent.ID], sent.Decision.Rank)
		delete(h.waiting, sent.ID)
	}
}
