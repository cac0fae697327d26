// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/solver/dispatch"
)

// TestPool checks that backends keep their load while others change, and that an ejected backend is used if there is no
// other.
func TestPool(t *testing.T) {
	a, b := discovery.Backend{Pod: "a", Address: "a:1", Ranks: 1}, discovery.Backend{Pod: "b", Address: "b:1", Ranks: 1}
	pool := NewPool()
	pool.Set([]discovery.Backend{a})
	acquire := func(tokens int64, tried ...string) (*Lease, bool) {
		all := map[string]bool{}
		for _, address := range tried {
			all[address] = true
		}
		return pool.acquire(&request{tokens: tokens}, all)
	}
	first, _ := acquire(100)
	pool.Set([]discovery.Backend{a, b})
	if lease, ok := acquire(1); !ok || lease.Backend.Pod != "b" {
		t.Errorf("got %+v: the load of a was forgotten", lease)
	}
	first.Release()
	first.Release()
	if got := outstanding(pool); got != 1 {
		t.Errorf("%d tokens outstanding after a double release, want 1", got)
	}
	first.Eject()
	if lease, _ := acquire(10); lease.Backend.Pod != "b" {
		t.Error("an ejected backend was preferred")
	}
	if lease, ok := acquire(1, "b:1"); !ok || lease.Backend.Pod != "a" {
		t.Error("an ejected backend is not used where there is no other")
	}
	if _, ok := acquire(1, "a:1", "b:1"); ok {
		t.Error("a backend that was tried is used again")
	}
}

// TestPendingLimitWithAnEjectedPod checks that a request goes to an ejected pod if all others are full, and is rejected
// if that pod is full too.
func TestPendingLimitWithAnEjectedPod(t *testing.T) {
	pool := poolWith(t, func(o *PoolOptions) { o.PendingLimitPerRank = 1 })
	pool.Set(backendsOf("", 2, 1, "p"))
	first, ok := pool.acquire(completion("first", "x"), nil)
	if !ok {
		t.Fatal("no pod is taken")
	}
	first.Eject()
	first.Release()
	var pods []string
	for i := range 2 {
		r := completion(fmt.Sprint(i), "x")
		lease, ok := pool.acquire(r, nil)
		if !ok {
			t.Fatalf("request %d was refused: %v", i, r.refused)
		}
		pods = append(pods, lease.Backend.Pod)
	}
	if pods[0] == first.Backend.Pod || pods[1] != first.Backend.Pod {
		t.Errorf("pods %v are taken, and %s was ejected", pods, first.Backend.Pod)
	}
	late := completion("late", "x")
	if _, ok := pool.acquire(late, nil); ok || late.refused != errAllFull {
		t.Errorf("a request more: %v, refused with %v", ok, late.refused)
	}
}

// TestPodsWithoutRanksGetTheirShare checks that pods without ranks get as many requests as pods with ranks and as many
// devices. Without this rule, while one engine replaces another, the last pods of the old one or the first pods of the
// new one would get most requests.
func TestPodsWithoutRanksGetTheirShare(t *testing.T) {
	for _, plan := range []string{"", "p"} {
		pool := NewPool()
		backends := backendsOf(plan, 1, 4, "ranks")
		for _, pod := range []string{"a", "b", "c"} {
			backends = append(backends, discovery.Backend{Pod: pod, Address: pod + ":1", Width: 4})
		}
		pool.Set(backends)
		got := map[string]int{}
		const requests = 2000
		for i := range requests {
			lease, ok := pool.acquire(completion(fmt.Sprint(i), "x"), nil)
			if !ok {
				t.Fatal("no pod is taken")
			}
			got[lease.Backend.Pod]++
		}
		for pod, n := range got {
			if n < requests/4*85/100 || n > requests/4*115/100 || len(got) != 4 {
				t.Errorf("plan %q: of %d requests pod %s gets %d: %v", plan, requests, pod, n, got)
			}
		}
	}
}

// TestReturningBackendKeepsItsLoad checks that a backend that disappears briefly returns with the load of its requests
// and its recorded cache. Once its requests have ended, an absent backend is forgotten.
func TestReturningBackendKeepsItsLoad(t *testing.T) {
	a := discovery.Backend{Pod: "a", Address: "a:1", Ranks: 2, RankAddresses: []string{"a:1", "a:2"}}
	pool := poolWith(t, func(o *PoolOptions) { o.PendingLimitPerRank = 1 })
	body := []byte(`{"prompt":"` + strings.Repeat("a long prompt ", 100) + `","max_tokens":1}`)
	acquire := func() (*Lease, *request) {
		r := requestOf("/v1/completions", "x", body)
		lease, _ := pool.acquire(r, nil)
		return lease, r
	}
	pool.Set([]discovery.Backend{a})
	first, _ := acquire()
	held := first.tokens
	pool.Set(nil)
	if lease, _ := acquire(); lease != nil {
		t.Fatal("a backend that has gone gets a request")
	}
	one := a
	one.RankAddresses = []string{"", "a:2"}
	if first.Rank == 1 {
		one.RankAddresses = []string{"a:1", ""}
	}
	for _, back := range []discovery.Backend{a, one} { // the second case while it stays
		pool.Set([]discovery.Backend{back})
		if got := outstanding(pool); got != held {
			t.Fatalf("%d tokens are outstanding, want %d", got, held)
		}
	}
	pool.Set([]discovery.Backend{a})
	second, _ := acquire()
	if second == nil || second.Rank == first.Rank {
		t.Fatalf("the second request: %+v", second)
	}
	if third, r := acquire(); third != nil || r.refused == nil {
		t.Error("the limit of pending requests is passed")
	}
	second.Release()
	if third, _ := acquire(); third == nil || third.Rank == first.Rank {
		t.Errorf("the third request: %+v", third)
	} else {
		third.Release()
	}
	first.Release()
	if got := outstanding(pool); got != 0 || len(pool.departed) != 0 {
		t.Errorf("%d tokens are outstanding, %d backends departed", got, len(pool.departed))
	}

	// Its last request ends while the backend is absent.
	last, _ := acquire()
	pool.Set(nil)
	if len(pool.departed) != 1 {
		t.Error("the busy backend is forgotten")
	}
	last.Release()
	if len(pool.departed) != 0 {
		t.Error("the idle backend is kept")
	}
	// Another pod at the same address, and the same pod with another number of ranks, inherit nothing.
	for _, other := range []discovery.Backend{{Pod: "b", Address: "a:1", Ranks: 2}, {Pod: "a", Address: "a:1", Ranks: 3}} {
		pool.Set([]discovery.Backend{a})
		last, _ = acquire()
		pool.Set(nil)
		pool.Set([]discovery.Backend{other})
		if got := outstanding(pool); got != 0 {
			t.Errorf("%+v has %d tokens outstanding", other, got)
		}
		last.Release()
		pool.Set(nil)
		if len(pool.departed) != 0 {
			t.Errorf("%d backends departed", len(pool.departed))
		}
	}
}

// TestBackendsThatComeAndGo checks that no load and no state remain after requests and backends have come and gone
// concurrently.
func TestBackendsThatComeAndGo(t *testing.T) {
	pool := poolWith(t, func(o *PoolOptions) { o.PendingLimitPerRank = 2 })
	a, b := discovery.Backend{Pod: "a", Address: "a:1", Ranks: 2}, discovery.Backend{Pod: "b", Address: "b:1", Ranks: 2}
	pool.Set([]discovery.Backend{a, b})
	var clients sync.WaitGroup
	for client := range 4 {
		clients.Go(func() {
			for i := range 300 {
				r := requestOf("/v1/completions", fmt.Sprint(client, i), []byte(`{"prompt":"x"}`))
				if lease, ok := pool.acquire(r, nil); ok {
					if i%3 == 0 {
						lease.move("b:1")
					}
					lease.Answered()
					runtime.Gosched()
					lease.Release()
				}
			}
		})
	}
	for i := range 200 {
		pool.Set([][]discovery.Backend{{a, b}, {b}, nil, {a}}[i%4])
		runtime.Gosched()
	}
	clients.Wait()
	pool.Set([]discovery.Backend{a, b})
	if got, next := loads(pool); got != 0 || next != 0 || len(pool.departed) != 0 {
		t.Errorf("%d tokens are outstanding, %d next; %d backends departed", got, next, len(pool.departed))
	}
}

// TestBackendThatFails checks that a backend with consecutive failures is ejected, for longer each time, and that a
// success ends the sequence. Requests that were in flight at the ejection, or were sent during it, do not extend it.
func TestBackendThatFails(t *testing.T) {
	now := time.Now()
	pool := NewPool()
	pool.now = func() time.Time { return now }
	pool.Set([]discovery.Backend{{Pod: "a", Address: "a:1", Ranks: 1}})
	recordOutcome := func(took time.Duration, serves bool) *backend {
		now = now.Add(-took)
		lease, _ := pool.acquire(completion("x", "x"), nil)
		defer lease.Release()
		now = now.Add(took)
		lease.recordOutcome(serves)
		return lease.on
	}
	for i, step := range []struct {
		after, took time.Duration // since the previous step, and since the request was sent
		serves      bool
		pause       time.Duration // the remaining ejection
	}{
		{0, 0, false, 0}, {0, 0, true, 0}, {0, 0, false, 0},
		{0, 0, false, time.Second},
		{time.Second / 4, time.Second / 2, false, 3 * time.Second / 4}, // sent before the ejection
		{time.Second / 4, 0, false, time.Second / 2},                   // there was no other backend
		{time.Second, 2 * time.Second, false, 0}, {0, 3 * time.Second / 4, false, 0},
		{0, time.Second / 4, false, 2 * time.Second},
		{2 * time.Second, 0, false, 4 * time.Second},
		{4 * time.Second, 0, false, 8 * time.Second},
		{time.Minute, 2 * time.Minute, false, 0},
		{0, 0, false, 8 * time.Second},
		{time.Second, 2 * time.Second, true, 7 * time.Second},
		{7 * time.Second, 0, false, 0}, {0, 0, false, time.Second},
	} {
		now = now.Add(step.after)
		if got := max(0, recordOutcome(step.took, step.serves).breaker.Until().Sub(now)); got != step.pause {
			t.Errorf("step %d: it is kept away from for %v, want %v", i, got, step.pause)
		}
	}
	now = now.Add(time.Hour)
	on := recordOutcome(0, true)
	for range 20 {
		recordOutcome(0, false)
		now = now.Add(time.Minute)
	}
	recordOutcome(0, false)
	lease, _ := pool.acquire(completion("x", "x"), nil)
	lease.Eject()
	if got := on.breaker.Until().Sub(now); got != 8*time.Second {
		t.Errorf("after many it is kept away from for %v", got)
	}
}

// cachedBlocks returns how many blocks of a text are recorded as cached on the first rank of a pod.
func cachedBlocks(pool *Pool, pod int, text string) int {
	r := completion("look", text)
	r.hash()
	pool.mu.Lock()
	defer pool.mu.Unlock()
	pool.prefixes.Match(r.prefixes)
	return pool.prefixes.Hit(pool.groups[0].backends[pod].caches[0]).Tokens / dispatch.PrefixBlock
}

// TestCachesWhatIsServed checks that a place is recorded as caching the requests that it served and not those that it
// failed, also if a gateway used a fallback.
func TestCachesWhatIsServed(t *testing.T) {
	const short, long = 20, 40 // in blocks of text
	text := strings.Repeat("0123456789abcdef", long*16)
	cached := func(pool *Pool, pod int) int { return cachedBlocks(pool, pod, text) }
	for name, tc := range map[string]struct {
		then   func(*Pool, *Lease)
		of, by int // expected cached blocks of a and b at the end
	}{
		"served":                        {func(_ *Pool, l *Lease) { l.recordOutcome(true) }, long, 0},
		"failed":                        {func(_ *Pool, l *Lease) { l.Unserved(); l.Unserved() }, short, 0},
		"served by another":             {func(_ *Pool, l *Lease) { l.Unserved(); l.move("b:1") }, short, long},
		"failed by another":             {func(_ *Pool, l *Lease) { l.Unserved(); l.move("b:1"); l.Unserved() }, short, 0},
		"served by an unknown endpoint": {func(_ *Pool, l *Lease) { l.Unserved(); l.move("c:1"); l.Unserved() }, short, 0},
		"its pod is another": {func(p *Pool, l *Lease) {
			p.Set([]discovery.Backend{{Pod: "a", Address: "a:1", Ranks: 2}, {Pod: "b", Address: "b:1", Ranks: 1}})
			l.Unserved()
		}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			pool := NewPool()
			pool.Set([]discovery.Backend{{Pod: "a", Address: "a:1", Ranks: 1}, {Pod: "b", Address: "b:1", Ranks: 1}})
			for _, blocks := range []int{short, long} {
				lease, _ := pool.acquire(completion("x", text[:blocks*256]), map[string]bool{"b:1": true})
				if blocks == long {
					tc.then(pool, lease)
				}
				lease.Release()
			}
			if of, by := cached(pool, 0), cached(pool, 1); of != tc.of || by != tc.by {
				t.Errorf("a is thought to hold %d blocks and b %d, want %d and %d", of, by, tc.of, tc.by)
			}
		})
	}
}

// TestManyPlaces checks that a pool with many places assigns a request to one of them.
func TestManyPlaces(t *testing.T) {
	pool := newPool(backendsOf("", 1000, 64, "p")...)
	for i := range 4 {
		lease, ok := pool.acquire(completion(fmt.Sprint(i), "some text"), nil)
		if !ok || lease.Rank < 0 || lease.Rank >= 64 {
			t.Fatalf("request %d: %+v", i, lease)
		}
		lease.Release()
	}
	pool.Set(backendsOf("", 500, 64, "p"))
	if pool.prefixes == nil || pool.Len() != 500 {
		t.Errorf("%d pods", pool.Len())
	}
}
