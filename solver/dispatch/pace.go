package dispatch

import "time"

// MostHold is as long as any request may wait for a rank.
const MostHold = time.Second

// Pace tells whether waiting for a rank can pay: as many requests come within the time that one may wait as may stand in line. Where fewer
// come, ranks do not change while one waits. It is not safe for concurrent use.
type Pace struct {
	hold time.Duration
	size int
	// gap is the mean time between two requests.
	gap time.Duration
}

// NewPace returns a pace for lines of that many requests, at least 1, each of which may wait for as long as hold; none have come yet.
func NewPace(size int, hold time.Duration) Pace { return Pace{hold: hold, size: size, gap: hold} }

// Come notes that a request has come so long after the one before, and reports whether it may wait. A gap counts for no more than hold: after a
// quiet time some tens of requests tell that it is over.
func (p *Pace) Come(after time.Duration) bool {
	p.gap += (min(after, p.hold) - p.gap) / time.Duration(p.size)
	return p.gap*time.Duration(p.size) <= p.hold
}
