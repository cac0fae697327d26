package dispatch_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/dispatch"
)

// lineOptions are those of a line over ranks under a cap.
func lineOptions(ranks int, loadCap float64) dispatch.Options {
	return dispatch.Options{Ranks: ranks, Cap: loadCap, Weights: dispatch.DefaultWeights, Costs: dispatch.Costs{Exchange: 1, Compute: 1}}
}

func newLine(t testing.TB, o dispatch.Options, size int) *dispatch.Line {
	t.Helper()
	l, err := dispatch.NewLine(o, size)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// went is a request that a line has sent, where, and how many came before that.
type went struct{ id, rank, waited int }

// runLine sends requests through a line, at whose places nothing is outstanding, in the order in which they come.
func runLine(l *dispatch.Line, ranks int, requests []dispatch.Request) []went {
	places := make([]dispatch.Place, ranks)
	for rank := range places {
		places[rank].Rank = rank
	}
	var all []went
	send := func(must bool) {
		for sent, ok := l.Next(func(int) []dispatch.Place { return places }, must); ok; sent, ok = l.Next(func(int) []dispatch.Place { return places }, must) {
			l.Take(&sent)
			all = append(all, went{sent.ID, sent.Decision.Rank, sent.Waited})
		}
	}
	for id := range requests {
		l.Arrive(id, &requests[id])
		send(false)
	}
	send(true)
	return all
}

// clustered are requests that each have most of their experts on one rank; some ranks are wanted more often than others.
func clustered(n, ranks int, random *rand.Rand) []dispatch.Request {
	requests := make([]dispatch.Request, n)
	for i := range requests {
		scores := make([]float32, ranks)
		for rank := range scores {
			scores[rank] = 0.1 * random.Float32()
		}
		scores[min(random.IntN(ranks), random.IntN(ranks))] += 0.2
		requests[i] = dispatch.Request{Scores: scores, Tokens: 1 + random.IntN(800)}
	}
	return requests
}

// A line in which nobody stands but who has just come decides as a scheduler does.
func TestLineOfOneDecidesAtOnce(t *testing.T) {
	random := rand.New(rand.NewPCG(4, 4))
	requests := clustered(1000, 8, random)
	o := lineOptions(8, 1.15)
	got := runLine(newLine(t, o, 1), 8, requests)
	o.Policy = dispatch.Price
	s := scheduled(t, o)
	for i := range requests {
		places := make([]dispatch.Place, 8)
		for rank := range places {
			places[rank].Rank = rank
		}
		d := s.Decide(&requests[i], places)
		s.Take(&requests[i], &d)
		if want := (went{i, d.Rank, 0}); got[i] != want {
			t.Fatalf("request %d: the line decides %+v, the scheduler %+v", i, got[i], want)
		}
	}
}

// A request whose best rank has no room stands in line while others pass, until there is room, or the line is full: then the first goes.
func TestLineKeepsWhoGivesSomethingUp(t *testing.T) {
	const size = 3
	places := []dispatch.Place{{Rank: 0}, {Rank: 1}}
	at := func(int) []dispatch.Place { return places }
	l := newLine(t, lineOptions(2, 1.03), size)
	arrive := func(id int, scores ...float32) (sent []went) {
		l.Arrive(id, &dispatch.Request{Scores: scores, Tokens: 100})
		for s, ok := l.Next(at, false); ok; s, ok = l.Next(at, false) {
			l.Take(&s)
			sent = append(sent, went{s.ID, s.Decision.Rank, s.Waited})
		}
		return sent
	}
	for range dispatch.Arrivals {
		arrive(0, 1, 0)
		arrive(0, 0, 1)
	}
	// The first rank is wanted until a request stands in line.
	fill := func(id int) (sent []went) {
		t.Helper()
		for before := l.Len(); l.Len() == before; {
			if sent = arrive(id, 1, 0); len(sent) > 1 || len(sent) == 1 && sent[0].id != id {
				return sent
			}
		}
		return nil
	}
	fill(1)
	if diff := cmp.Diff([]went{{2, 1, 0}, {1, 0, 1}}, arrive(2, 0, 1), cmp.AllowUnexported(went{})); diff != "" {
		t.Errorf("the other rank is wanted, then there is room again: %s", diff)
	}
	fill(3)
	fill(4)
	if diff := cmp.Diff([]went{{3, 1, 2}, {4, 0, 1}}, fill(5), cmp.AllowUnexported(went{})); diff != "" {
		t.Errorf("the line is full, then there is room again: %s", diff)
	}
	if s, ok := l.Next(at, true); !ok || s.ID != 5 || l.Len() != 0 {
		t.Errorf("where one must go: %+v, %v, and %d are left", s, ok, l.Len())
	}
}

// Every request goes once, none is passed by more than the bound, the cap holds as without a line, and more is local.
func TestLineProperties(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	for range 30 {
		ranks, size := 8+random.IntN(9), 4+random.IntN(40)
		requests := clustered(600, ranks, random)
		o := lineOptions(ranks, 1.15)
		all := runLine(newLine(t, o, size), ranks, requests)
		score := func(sent []went) (local float64) {
			for _, w := range sent {
				local += float64(requests[w.id].Scores[w.rank]) * float64(requests[w.id].Tokens)
			}
			return local
		}
		if least, atOnce := score(all), score(runLine(newLine(t, o, 1), ranks, requests)); least <= atOnce {
			t.Errorf("%d ranks, line of %d: %v is local, %v where each is sent at once", ranks, size, least, atOnce)
		}
		ids := make([]int, len(all))
		for at, w := range all {
			ids[at] = w.id
			if w.waited > dispatch.OvertakeFactor*size {
				t.Fatalf("%d ranks, line of %d: %d come after request %d before it goes", ranks, size, w.waited, w.id)
			}
		}
		slices.Sort(ids)
		for want, id := range ids {
			if id != want {
				t.Fatalf("%d ranks, line of %d: request %d is missing or went twice", ranks, size, want)
			}
		}
	}
}

// Where nothing tells requests apart they go as they came.
func TestLineWithoutForecastKeepsOrder(t *testing.T) {
	requests := make([]dispatch.Request, 100)
	for i := range requests {
		requests[i].Tokens = 10
	}
	for at, w := range runLine(newLine(t, lineOptions(4, 1.15), 8), 4, requests) {
		if w.id != at {
			t.Fatalf("request %d goes as number %d", w.id, at)
		}
	}
}

func TestNewLineRefuses(t *testing.T) {
	if _, err := dispatch.NewLine(lineOptions(4, 1.15), 0); err == nil || !strings.Contains(err.Error(), "a line of 0 requests") {
		t.Errorf("a line of none: %v", err)
	}
	if _, err := dispatch.NewLine(lineOptions(0, 1.15), 1); err == nil || !strings.Contains(err.Error(), "at least 1 is needed") {
		t.Errorf("no ranks: %v", err)
	}
}

// A request that comes and one that goes allocate nothing.
func TestLineDoesNotAllocate(t *testing.T) {
	l := newLine(t, lineOptions(8, 1.15), 16)
	places := somePlaces(1, 8)
	r := dispatch.Request{Scores: make([]float32, 8), Tokens: 100}
	at := func(int) []dispatch.Place { return places }
	if n := testing.AllocsPerRun(500, func() {
		l.Arrive(0, &r)
		for sent, ok := l.Next(at, false); ok; sent, ok = l.Next(at, false) {
			l.Take(&sent)
		}
	}); n != 0 {
		t.Errorf("%v allocations per request", n)
	}
}
