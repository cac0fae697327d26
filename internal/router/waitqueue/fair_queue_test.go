// SPDX-License-Identifier: Apache-2.0

package waitqueue_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/waitqueue"
)

type waiter = waitqueue.Waiter[string]

func anyone(string) bool { return true }

// TestFairQueueOrder adds requests "client work", or "client work priority", and serves all of them.
func TestFairQueueOrder(t *testing.T) {
	for name, tc := range map[string]struct{ requests, want string }{
		"one client keeps its order":   {"a 5, a 1, a 3", "a0 a1 a2"},
		"clients take turns":           {"a 1, a 1, a 1, b 1, b 1", "a0 b3 a1 b4 a2"},
		"by work, not by requests":     {"a 3, a 3, b 1, b 1, b 1, b 1", "a0 b2 b3 b4 a1 b5"},
		"a higher priority first":      {"a 1, a 1, b 1 2, c 1 -1, a 1 2", "b2 a4 a0 a1 c3"},
		"shares by priority":           {"a 9 1, a 1, b 1", "a0 a1 b2"},
		"equal clients by arrival":     {"c 1, a 1, b 1", "c0 a1 b2"},
		"a client with an empty name":  {" 1, a 1,  1", "0 a1 2"},
		"three clients, unequal queue": {"a 1, a 1, a 1, a 1, b 1, c 1, c 1", "a0 b4 c5 a1 c6 a2 a3"},
	} {
		t.Run(name, func(t *testing.T) {
			q, now := waitqueue.NewFairQueue[string](100), time.Now()
			for i, request := range strings.Split(tc.requests, ", ") {
				fields := strings.Split(request, " ")
				var work float64
				var priority int
				fmt.Sscan(fields[1], &work) //nolint:errcheck // of the table
				if len(fields) > 2 {
					fmt.Sscan(fields[2], &priority) //nolint:errcheck // of the table
				}
				q.Add(fmt.Sprint(fields[0], i), priority, fields[0], work, now)
			}
			var order []string
			for w := q.First(anyone); w != nil; w = q.First(anyone) {
				order = append(order, w.Known)
				if waited := q.Leave(w, true, now.Add(time.Second)); waited != time.Second {
					t.Errorf("%s has waited %v", w.Known, waited)
				}
			}
			if got := strings.Join(order, " "); got != tc.want || q.Len() != 0 {
				t.Errorf("order %q, want %q; %d are left", got, tc.want, q.Len())
			}
		})
	}
}

// TestFairQueueOvertaking checks that a request that may not go does not delay the others, and that a client that comes
// back is not served for the time in which it did not wait.
func TestFairQueueOvertaking(t *testing.T) {
	q, now := waitqueue.NewFairQueue[string](100), time.Now()
	q.Add("a stored", 0, "a", 1, now)
	q.Add("a", 0, "a", 1, now)
	plain := func(known string) bool { return !strings.Contains(known, "stored") }
	first := q.First(plain)
	if first == nil || first.Known != "a" {
		t.Fatalf("%+v may go", first)
	}
	q.Leave(first, true, now)
	if q.First(plain) != nil || q.First(anyone).Known != "a stored" {
		t.Error("another request may go")
	}
	for range 10 {
		w := q.Add("a", 0, "a", 1, now)
		q.Leave(w, true, now)
	}
	q.Add("b1", 0, "b", 1, now) // b has 0 served, and starts at the 11 of a
	q.Add("b2", 0, "b", 1, now)
	if first := q.First(anyone); first.Known != "a stored" {
		t.Errorf("%q is next, although its client was not served more", first.Known)
	}
}

// TestFairQueueLimit checks which request is refused or evicted by a full queue.
func TestFairQueueLimit(t *testing.T) {
	now := time.Now()
	for name, tc := range map[string]struct {
		priority int
		client   string
		evicted  string // of a0 a1 b2 with a limit of 3; empty if the new one is refused
	}{
		"of the same client":         {0, "a", ""},
		"of a client without waiter": {0, "c", "a1"},
		"of the shorter queue":       {0, "b", "a1"},
		"of a higher priority":       {1, "a", "a1"},
		"of a lower priority":        {-1, "c", ""},
	} {
		t.Run(name, func(t *testing.T) {
			q := waitqueue.NewFairQueue[string](3)
			var all []*waiter
			for i, client := range []string{"a", "a", "b"} {
				all = append(all, q.Add(fmt.Sprint(client, i), 0, client, 2, now))
			}
			added := q.Add("new", tc.priority, tc.client, 1, now)
			if (added == nil) != (tc.evicted == "") || q.Len() != 3 {
				t.Fatalf("added %+v; %d wait", added, q.Len())
			}
			for _, w := range all {
				woken := false
				select {
				case <-w.Woken():
					woken = true
				default:
				}
				if want := w.Known == tc.evicted; w.Evicted != want || woken != want {
					t.Errorf("%s is evicted: %t, woken: %t; want %q", w.Known, w.Evicted, woken, tc.evicted)
				}
				q.Leave(w, false, now)
			}
			if added != nil {
				q.Leave(added, false, now)
			}
			if q.Len() != 0 {
				t.Errorf("%d are left", q.Len())
			}
		})
	}
}

// TestFairShares checks with random requests that clients that always wait are served the same work, up to one request,
// whatever the others do, and that the queue is bounded.
func TestFairShares(t *testing.T) {
	const size, largest = 64, 10
	random := rand.New(rand.NewPCG(7, 7))
	for range 20 {
		q, now := waitqueue.NewFairQueue[string](size), time.Now()
		served, waiting := map[string]float64{}, map[string]int{}
		work := map[*waiter]float64{}
		add := func(client string) {
			amount := 1 + float64(random.IntN(largest))
			if w := q.Add(client, 0, client, amount, now); w != nil {
				work[w] = amount
				waiting[client]++
			}
		}
		for range 2000 {
			for _, client := range []string{"a", "b"} {
				for waiting[client] < 2 {
					add(client)
				}
			}
			if random.IntN(4) == 0 {
				add("now and then")
			}
			if q.Len() > size {
				t.Fatalf("%d wait in a queue of %d", q.Len(), size)
			}
			w := q.First(anyone)
			placed := random.IntN(8) > 0 // others leave without a place
			if placed {
				served[w.Known] += work[w]
			}
			waiting[w.Known]--
			q.Leave(w, placed, now)
		}
		if difference := served["a"] - served["b"]; difference > largest || difference < -largest {
			t.Errorf("a was served %v, b %v", served["a"], served["b"])
		}
	}
}

func BenchmarkFairQueue(b *testing.B) {
	q, now := waitqueue.NewFairQueue[string](1000), time.Now()
	for i := range 1000 {
		q.Add("", 0, fmt.Sprint(i%16), 1, now)
	}
	b.ReportAllocs()
	for b.Loop() {
		w := q.First(anyone)
		q.Leave(w, true, now)
		q.Add("", 0, "3", 1, now)
	}
}
