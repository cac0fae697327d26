// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/dispatch"
)

// queueOptions returns the options of a queue for the ranks and the cap.
func queueOptions(ranks int, loadCap float64) dispatch.Options {
	return dispatch.Options{Ranks: ranks, Cap: loadCap, Weights: dispatch.DefaultWeights, Costs: dispatch.Costs{Exchange: 1, Compute: 1}}
}

func newQueue(t testing.TB, o dispatch.Options, size int) *dispatch.WaitQueue {
	t.Helper()
	l, err := dispatch.NewWaitQueue(o, size)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// departure is a request that has left the queue, with its rank and the number of later arrivals.
type departure struct{ id, rank, waited int }

// runQueue sends requests through a queue in order of arrival. The places have no outstanding load.
func runQueue(l *dispatch.WaitQueue, ranks int, requests []dispatch.Request) []departure {
	places := make([]dispatch.Place, ranks)
	for rank := range places {
		places[rank].Rank = rank
	}
	var all []departure
	send := func(must bool) {
		for sent, ok := l.Next(func(int) []dispatch.Place { return places }, must); ok; sent, ok = l.Next(func(int) []dispatch.Place { return places }, must) {
			l.Take(&sent)
			all = append(all, departure{sent.ID, sent.Decision.Rank, sent.Waited})
		}
	}
	for id := range requests {
		l.Arrive(id, &requests[id])
		send(false)
	}
	send(true)
	return all
}

// clustered returns requests that each have most of their experts on one rank; some ranks are preferred more often than
// others.
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

// A queue of size 1 decides as a scheduler does.
func TestQueueOfOneDecidesAtArrival(t *testing.T) {
	random := rand.New(rand.NewPCG(4, 4))
	requests := clustered(1000, 8, random)
	o := queueOptions(8, 1.15)
	got := runQueue(newQueue(t, o, 1), 8, requests)
	o.Policy = dispatch.Price
	s := scheduled(t, o)
	for i := range requests {
		places := make([]dispatch.Place, 8)
		for rank := range places {
			places[rank].Rank = rank
		}
		d := s.Decide(&requests[i], places)
		s.Take(&requests[i], &d)
		if want := (departure{i, d.Rank, 0}); got[i] != want {
			t.Fatalf("request %d: the queue decides %+v, the scheduler %+v", i, got[i], want)
		}
	}
}

// A request waits while its best rank is above the cap, and others overtake, until the rank has room or the queue is
// full; then the first request goes.
func TestRequestsWaitForTheirBestRank(t *testing.T) {
	const size = 3
	places := []dispatch.Place{{Rank: 0}, {Rank: 1}}
	at := func(int) []dispatch.Place { return places }
	l := newQueue(t, queueOptions(2, 1.03), size)
	arrive := func(id int, scores ...float32) (sent []departure) {
		l.Arrive(id, &dispatch.Request{Scores: scores, Tokens: 100})
		for s, ok := l.Next(at, false); ok; s, ok = l.Next(at, false) {
			l.Take(&s)
			sent = append(sent, departure{s.ID, s.Decision.Rank, s.Waited})
		}
		return sent
	}
	for range dispatch.Arrivals {
		arrive(0, 1, 0)
		arrive(0, 0, 1)
	}
	// Requests for the first rank arrive until one waits.
	fill := func(id int) (sent []departure) {
		t.Helper()
		for before := l.Len(); l.Len() == before; {
			if sent = arrive(id, 1, 0); len(sent) > 1 || len(sent) == 1 && sent[0].id != id {
				return sent
			}
		}
		return nil
	}
	fill(1)
	if diff := cmp.Diff([]departure{{2, 1, 0}, {1, 0, 1}}, arrive(2, 0, 1), cmp.AllowUnexported(departure{})); diff != "" {
		t.Errorf("request for the other rank, then room again: %s", diff)
	}
	fill(3)
	fill(4)
	if diff := cmp.Diff([]departure{{3, 1, 2}, {4, 0, 1}}, fill(5), cmp.AllowUnexported(departure{})); diff != "" {
		t.Errorf("queue full, then room again: %s", diff)
	}
	if s, ok := l.Next(at, true); !ok || s.ID != 5 || l.Len() != 0 {
		t.Errorf("with must: %+v, %v; %d remain", s, ok, l.Len())
	}
}

// Every request leaves once, at most the bound overtakes a request, the cap holds as without a queue, and locality is
// higher.
func TestQueueProperties(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	for range 30 {
		ranks, size := 8+random.IntN(9), 4+random.IntN(40)
		requests := clustered(600, ranks, random)
		o := queueOptions(ranks, 1.15)
		all := runQueue(newQueue(t, o, size), ranks, requests)
		score := func(sent []departure) (local float64) {
			for _, w := range sent {
				local += float64(requests[w.id].Scores[w.rank]) * float64(requests[w.id].Tokens)
			}
			return local
		}
		if local, atOnce := score(all), score(runQueue(newQueue(t, o, 1), ranks, requests)); local <= atOnce {
			t.Errorf("%d ranks, queue of %d: local sum %v, %v when deciding at arrival", ranks, size, local, atOnce)
		}
		ids := make([]int, len(all))
		for at, w := range all {
			ids[at] = w.id
			if w.waited > dispatch.OvertakeFactor*size {
				t.Fatalf("%d ranks, queue of %d: %d requests overtake request %d", ranks, size, w.waited, w.id)
			}
		}
		slices.Sort(ids)
		for want, id := range ids {
			if id != want {
				t.Fatalf("%d ranks, line of %d: request %d is missing or left twice", ranks, size, want)
			}
		}
	}
}

// Requests without a forecast leave in order of arrival.
func TestQueueWithoutForecastKeepsOrder(t *testing.T) {
	requests := make([]dispatch.Request, 100)
	for i := range requests {
		requests[i].Tokens = 10
	}
	for at, w := range runQueue(newQueue(t, queueOptions(4, 1.15), 8), 4, requests) {
		if w.id != at {
			t.Fatalf("request %d leaves as number %d", w.id, at)
		}
	}
}

func TestNewQueueRefuses(t *testing.T) {
	if _, err := dispatch.NewWaitQueue(queueOptions(4, 1.15), 0); err == nil || !strings.Contains(err.Error(), "a wait queue of 0 requests") {
		t.Errorf("size 0: %v", err)
	}
	if _, err := dispatch.NewWaitQueue(queueOptions(0, 1.15), 1); err == nil || !strings.Contains(err.Error(), "at least 1 is needed") {
		t.Errorf("no ranks: %v", err)
	}
}

// Arrival and departure of a request allocate nothing.
func TestQueueDoesNotAllocate(t *testing.T) {
	l := newQueue(t, queueOptions(8, 1.15), 16)
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
