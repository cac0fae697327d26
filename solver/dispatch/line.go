package dispatch

import (
	"fmt"
	"slices"
)

// OvertakeFactor bounds waiting: a request goes once that many times the queue's size have come after it, whatever it gives up.
// Half of it costs 2% of locality at 16 ranks; half as much again brings half a percent.
const OvertakeFactor = 4

// MustGo is the rule that bounds waiting, in evaluation and router alike: it reports whether the first of the waiting requests goes,
// whatever it gives up, when so many requests have come after it. So OvertakeFactor times the size requests pass a request at most.
func MustGo(waiting, after, size int) bool {
	return waiting >= size || waiting > 0 && after >= OvertakeFactor*size
}

// patience is how much of what the cap allows a rank beyond its share the rank may have had of late when a request goes there at once. With
// nothing, requests wait twice as long at 8 ranks, and a quarter longer at 16, for windows that are a little more even; with all of it
// windows are a little less even.
const patience = 1. / 3

// Line is the policy Late (late binding, as in Sparrow, SOSP 2013). A request goes at once if it gives up nothing by going, to a rank that
// has not had much of late; the others stand in line until that is so. When the line is full, the first one goes. A
// scheduler that decides at once has to send each request somewhere, and under a tight cap that is often not where its experts are; with
// a few to choose from there is nearly always one that loses nothing.
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
	o.Policy, o.Patient = Price, size > 1
	scheduler, err := NewScheduler(o)
	return &Line{scheduler: scheduler, size: size}, err
}

// Len is the number of requests that stand in line.
func (l *Line) Len() int { return len(l.standing) }

// First is the request that has stood longest; there must be one.
func (l *Line) First() int { return l.standing[0].id }

// Load is the rank's load over the last requests that went, in tokens.
func (l *Line) Load(rank int) int { return l.scheduler.Load(rank) }

// Arrive puts a request at the end of the line. It must not change while it stands there.
func (l *Line) Arrive(id int, r *Request) {
	l.standing = append(l.standing, standing{id, r, l.arrived})
	l.arrived++
}

// Pass decides on a request that does not stand in line, and accounts for it.
func (l *Line) Pass(r *Request, places []Place) Decision {
	d := l.scheduler.Decide(r, places)
	l.scheduler.Take(r, &d)
	return d
}

// Next takes the request out of the line that is to go now, and decides on its place; false where none is, which cannot be in a line with
// requests of which one must go. places tells the places as they are for a request in line, always as many; what it returns is used
// before the next call of it. The caller accounts for what was sent by Take, and asks again.
func (l *Line) Next(places func(id int) []Place, must bool) (Sent, bool) {
	if len(l.standing) == 0 {
		return Sent{}, false
	}
	next := slices.IndexFunc(l.standing, func(waiting standing) bool { return l.scheduler.MayGo(waiting.request, places(waiting.id)) })
	if next < 0 {
		if !must && !MustGo(len(l.standing), l.arrived-1-l.standing[0].arrival, l.size) {
			return Sent{}, false
		}
		next = 0
	}
	chosen := l.standing[next]
	l.standing = slices.Delete(l.standing, next, next+1)
	d := l.scheduler.Decide(chosen.request, places(chosen.id))
	return Sent{chosen.id, chosen.request, d, l.arrived - 1 - chosen.arrival}, true
}

// Take accounts for a request at the place that was decided on.
func (l *Line) Take(sent *Sent) { l.scheduler.Take(sent.Request, &sent.Decision) }

// MayGo reports whether a request gives up nothing by going now: the place of its highest value is below the cap, on a rank that has had
// little more than its share of late. Nothing changes by asking.
func (s *Scheduler) MayGo(r *Request, places []Place) bool {
	first := s.first
	defer func() { s.first = first }()
	s.begin(len(places))
	c := newCrowd(places)
	best := s.compare(r, places, c)
	if best.open < 0 {
		return false
	}
	top, there := s.weigh(r, best.any, &places[best.any], c), s.weigh(r, best.open, &places[best.open], c)
	return top.Value() <= there.Value() && s.recent.excess(there.Rank, s.shares[there.Rank]) <= patience*(s.cap-1)
}
