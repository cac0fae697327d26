package dispatch

import "time"

// MostHold is the maximum time that any request may wait for a rank.
const MostHold = time.Second

// Pace estimates the arrival rate and decides whether waiting for a rank can pay: it pays if, within the maximum wait,
// at least as many requests arrive as the wait queue holds. At lower rates, the state of the ranks does not change
// during the wait. Pace is not safe for concurrent use.
type Pace struct {
	hold time.Duration
	size int
	// gap is the moving average of the time between two requests.
	gap time.Duration
}

// NewPace returns a Pace for a wait queue of the given size, at least 1, and the maximum wait hold, before the first
// request.
func NewPace(size int, hold time.Duration) Pace { return Pace{hold: hold, size: size, gap: hold} }

// Come records an arrival and the time since the previous one, and reports whether the request may wait. A gap counts
// as hold at most, so that a few tens of requests suffice to detect the end of an idle period.
func (p *Pace) Come(after time.Duration) bool {
	p.gap += (min(after, p.hold) - p.gap) / time.Duration(p.size)
	return p.gap*time.Duration(p.size) <= p.hold
}
