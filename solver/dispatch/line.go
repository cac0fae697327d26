package dispatch

import (
	"fmt"
	"slices"
)

// OvertakeFactor bounds waiting: a request goes once more than that many times the line's size have come after it, whatever it gives up.
// Half of it costs 2% of locality at 16 ranks, one and a half times as much brings half a percent.
const OvertakeFactor = 4

// Line is the policy Late (late binding, as in Sparrow, SOSP 2013). A request goes at once if it gives up nothing by going, to a rank that
// has had no more than its share of late; the others stand in line until that is so. When the line is full, the one goes that gives up
// least. A scheduler that decides at once has to send each request somewhere, and under a tight cap that is often not where its experts
// are; with a few to choose from there is nearly always one that loses little.
type Line struct {
	scheduler *Scheduler
	size      int
	standing  []standing
	arrived   int
}

// standing is a request in line, under the name that the caller has for it.
type standing struct {
	id      int
	request *Request
	// arrival is its number among all that came.
	arrival int
}

// Sent is a request that has left the line.
type Sent struct {
	ID       int
	Request  *Request
	Decision Decision
	// Waited is how many have come after it.
	Waited int
}

// NewLine returns a line that is full with that many requests; a line of one decides at once. The policy in the options is not looked at.
func NewLine(o Options, size int) (*Line, error) {
	if size < 1 {
		return nil, fmt.Errorf("a line of %d requests; at least 1 is needed", size)
	}
	o.Policy = Price
	scheduler, err := NewScheduler(o)
	return &Line{scheduler: scheduler, size: size}, err
}

// Len is the number of requests that stand in line.
func (l *Line) Len() int { return len(l.standing) }

// Load is the rank's load over the last requests that went, in tokens.
func (l *Line) Load(rank int) int { return l.scheduler.Load(rank) }

// Arrive puts a request at the end of the line. It must not change while it stands there.
func (l *Line) Arrive(id int, r *Request) {
	l.standing = append(l.standing, standing{id, r, l.arrived})
	l.arrived++
}

// Next takes the request out of the line that is to go now, and decides on its place; false where none is, which cannot be in a line with
// requests of which one must go. places tells the places as they are for a request in line, always as many; what it returns is used
// before the next call of it. The caller accounts for what was sent by Take, and asks again.
func (l *Line) Next(places func(id int) []Place, must bool) (Sent, bool) {
	if len(l.standing) == 0 {
		return Sent{}, false
	}
	next := 0
	if l.arrived-l.standing[0].arrival <= OvertakeFactor*l.size {
		best, now := l.leastGivenUp(places)
		if !now && !must && len(l.standing) < l.size {
			return Sent{}, false
		}
		next = max(best, 0) // where no request has a place below the cap, the first goes
	}
	chosen := l.standing[next]
	l.standing = slices.Delete(l.standing, next, next+1)
	d := l.scheduler.Decide(chosen.request, places(chosen.id))
	return Sent{chosen.id, chosen.request, d, l.arrived - 1 - chosen.arrival}, true
}

// Take accounts for a request at the place that was decided on.
func (l *Line) Take(sent *Sent) { l.scheduler.Take(sent.Request, &sent.Decision) }

// leastGivenUp is the index of the first request that may go at once, and true; else that of the one that loses least, of those that have a
// place below the cap, and of equals the first; -1 where none has one.
func (l *Line) leastGivenUp(places func(id int) []Place) (next int, now bool) {
	next = -1
	least := 0.0
	for i, waiting := range l.standing {
		loss, now, open := l.scheduler.Loss(waiting.request, places(waiting.id))
		switch {
		case now:
			return i, true
		case open && (next < 0 || loss < least):
			next, least = i, loss
		}
	}
	return next, false
}

// Loss is what a request gives up by going now to the best place below the cap, and not to the best of all, in weighted microseconds; open
// is false where no place is below the cap. now is true where it gives up nothing, on a rank that has had no more than its share of late:
// then there is nothing to wait for. Nothing changes by asking.
func (s *Scheduler) Loss(r *Request, places []Place) (loss float64, now, open bool) {
	first := s.first
	defer func() { s.first = first }()
	s.begin(len(places))
	c := newCrowd(places)
	best := s.compare(r, places, c)
	if best.open < 0 {
		return 0, false, false
	}
	top, there := s.weigh(r, best.any, &places[best.any], c), s.weigh(r, best.open, &places[best.open], c)
	loss = top.Value() - there.Value()
	return loss, loss <= 0 && s.recent.excess(there.Rank, s.shares[there.Rank]) <= 0, true
}
