package simulate

import (
	"math"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
)

// holder lets requests wait for the rank of their experts, as a request router does.
type holder struct {
	engine *engine
	line   *dispatch.Line
	pace   dispatch.Pace
	// hold is in microseconds, last is when the latest request came.
	hold, last float64
	// waiting are those in line, by number; came counts all.
	waiting map[int]*served
	came    int
}

func newHolder(e *engine, o dispatch.Options) (*holder, error) {
	line, err := dispatch.NewLine(o, o.Ranks)
	return &holder{
		engine: e, line: line, pace: dispatch.NewPace(o.Ranks, e.options.Hold), hold: float64(e.options.Hold.Nanoseconds()) / 1e3,
		last: math.Inf(-1), waiting: map[int]*served{},
	}, err
}

// arrive sends a request, or has it stand in line where that can pay.
func (h *holder) arrive(s *served) {
	h.release(s.arrival)
	asked := h.engine.ask(s, make([]float32, len(h.engine.lanes)))
	after := min(1e3*(s.arrival-h.last), float64(math.MaxInt64/2))
	h.last = s.arrival
	if !h.pace.Come(time.Duration(after)) {
		d := h.line.Pass(&asked, h.engine.look())
		h.engine.give(s, d.Rank)
	} else {
		h.waiting[h.came] = s
		h.line.Arrive(h.came, &asked)
		h.came++
	}
	h.send(false)
}

// ends is when the patience of the first in line ends; infinite where nobody stands there.
func (h *holder) ends() float64 {
	if h.line.Len() == 0 {
		return math.Inf(1)
	}
	return h.waiting[h.line.First()].arrival + h.hold
}

// release sends all whose patience ends by a time.
func (h *holder) release(by float64) {
	for h.ends() <= by {
		h.send(true)
	}
}

// send sends those in line that may go, and at least one if one must.
func (h *holder) send(must bool) {
	places := func(int) []dispatch.Place { return h.engine.look() }
	for sent, ok := h.line.Next(places, must); ok; sent, ok = h.line.Next(places, false) {
		h.line.Take(&sent)
		h.engine.give(h.waiting[sent.ID], sent.Decision.Rank)
		delete(h.waiting, sent.ID)
	}
}
