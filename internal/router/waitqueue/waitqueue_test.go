// SPDX-License-Identifier: Apache-2.0

package waitqueue_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/waitqueue"
	"github.com/semmoe/operator/solver/dispatch"
)

type entry = waitqueue.Entry[string]

// isWoken reports whether a request was woken since the last call.
func isWoken(s *entry) bool {
	select {
	case <-s.Woken():
		return true
	default:
		return false
	}
}

// TestFullQueue checks that the first entry is woken when the queue is full, and again if another request arrives
// before it has left.
func TestFullQueue(t *testing.T) {
	now := time.Now()
	l := waitqueue.New[string](3, time.Second)
	a, b, c := &entry{}, &entry{}, &entry{}
	for _, s := range []*entry{a, b, b} {
		l.Enqueue(s, now)
	}
	if l.Len() != 2 || isWoken(a) || a.MustGo {
		t.Fatalf("%d queued; the first must go: %t", l.Len(), a.MustGo)
	}
	l.Enqueue(c, now)
	if !isWoken(a) || !a.MustGo || isWoken(b) || b.MustGo || isWoken(c) || c.MustGo {
		t.Errorf("in a full queue %t, %t and %t must go", a.MustGo, b.MustGo, c.MustGo)
	}
	if waited := a.Leave(now.Add(time.Second)); waited != time.Second || l.Len() != 2 {
		t.Errorf("waited %v; %d are left", waited, l.Len())
	}
	a.Leave(now) // an entry that has left is not in the queue
	other := waitqueue.New[string](3, time.Second)
	if other.Enqueue(b, now.Add(time.Minute)); l.Len() != 1 || other.Len() != 1 {
		t.Errorf("%d and %d entries; a request is in one queue only", l.Len(), other.Len())
	}
	if waited := b.Leave(now.Add(time.Hour)); waited != time.Hour {
		t.Errorf("waited %v; all of the time counts", waited)
	}
}

// TestBurst checks a burst of arrivals before the first entry has left: the excess entries are then woken one
// after another.
func TestBurst(t *testing.T) {
	now := time.Now()
	l := waitqueue.New[string](3, time.Second)
	all := make([]*entry, 6)
	for i := range all {
		all[i] = &entry{}
		l.Enqueue(all[i], now)
	}
	for i, s := range all {
		if want := i < 4; isWoken(s) != want || s.MustGo != want {
			t.Errorf("request %d of 6 must go from a queue of 3: %t, want %t", i, s.MustGo, want)
		}
		if s.MustGo {
			s.Leave(now)
		}
	}
}

// TestWakeNext checks that the first entry that may go is woken, and that the next call continues with the entries that
// were not evaluated.
func TestWakeNext(t *testing.T) {
	now := time.Now()
	l := waitqueue.New[string](10, time.Second)
	l.WakeNext(3, func(string) bool { t.Error("the queue is empty"); return true })
	var all []*entry
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		s := &entry{Known: name}
		all = append(all, s)
		l.Enqueue(s, now)
	}
	look := func(most int, may string) (looked string) {
		l.WakeNext(most, func(name string) bool {
			looked += name
			return name == may
		})
		return looked
	}
	for _, step := range []struct {
		most              int
		may, looked, call string
	}{
		{5, "c", "abc", "c"}, {9, "", "abcde", ""}, {2, "e", "ab", ""}, {2, "e", "cd", ""}, {2, "e", "e", "e"}, {5, "a", "a", "a"},
	} {
		if looked := look(step.most, step.may); looked != step.looked {
			t.Errorf("at most %d: looked at %q, want %q", step.most, looked, step.looked)
		}
		for _, s := range all {
			if got := isWoken(s); got != (s.Known == step.call) {
				t.Errorf("at most %d, %q may go: %q is called: %t", step.most, step.may, s.Known, got)
			}
		}
	}
}

// TestArrive checks that the time since the previous arrival determines whether a request may wait.
func TestArrive(t *testing.T) {
	now := time.Now()
	l := waitqueue.New[string](4, 100*time.Millisecond)
	for range 20 { // the mean converges
		now = now.Add(20 * time.Millisecond)
		l.Arrive(now)
	}
	if !l.Arrive(now.Add(20*time.Millisecond)) || l.Arrive(now.Add(time.Hour)) {
		t.Error("five requests come in the time, then none")
	}
}

// TestBoundsOvertaking checks that at most dispatch.OvertakeFactor times the size requests arrive after a waiting
// request, in any order of events.
func TestBoundsOvertaking(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	for range 200 {
		size := 1 + random.IntN(6)
		l := waitqueue.New[string](size, time.Second)
		came := map[*entry]int{}
		var waiting []*entry
		now, goes, most := time.Now(), random.Float64(), 0
		for arrived := 1; arrived <= 300; arrived++ {
			now = now.Add(time.Duration(random.IntN(20)) * time.Millisecond)
			l.Arrive(now)
			if random.IntN(3) > 0 { // other requests go immediately
				s := &entry{}
				came[s] = arrived
				waiting = append(waiting, s)
				l.Enqueue(s, now)
			}
			// A random entry other than the first finds its rank free.
			if len(waiting) > 1 && random.Float64() < goes {
				i := 1 + random.IntN(len(waiting)-1)
				waiting[i].Leave(now)
				waiting = slices.Delete(waiting, i, i+1)
			}
			for len(waiting) > 0 && waiting[0].MustGo {
				most = max(most, arrived-came[waiting[0]])
				waiting[0].Leave(now)
				waiting = waiting[1:]
			}
			for _, s := range waiting {
				most = max(most, arrived-came[s])
			}
			if len(waiting) >= size {
				t.Fatalf("%d wait in a queue of %d", len(waiting), size)
			}
		}
		if most > dispatch.OvertakeFactor*size {
			t.Errorf("%d requests arrived after a waiting request in a queue of %d", most, size)
		}
	}
}
