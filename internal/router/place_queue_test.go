// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/router/clientauth"
	"github.com/semmoe/operator/internal/router/discovery"
)

// queueingPool returns a pool whose requests wait in a queue.
func queueingPool(t *testing.T, pods, ranks, limit int, queue QueueOptions) *Pool {
	t.Helper()
	pool := poolWith(t, func(o *PoolOptions) { o.PendingLimitPerRank, o.Queue = limit, queue })
	pool.Set(backendsOf("", pods, ranks, "p"))
	return pool
}

// queueClient sends requests to a pool, each from its goroutine.
type queueClient struct {
	pool *Pool
	mu   sync.Mutex
	// order contains the requests in the order of their places, leases the places that are not released, and errs the
	// errors of the others.
	order  []string
	leases []*Lease
	errs   map[string]error
}

// send starts a request "client/number" and waits until it has a place, an error, or waits.
func (c *queueClient) send(ctx context.Context, id string, priority int) {
	r := completion(id, "x")
	r.client, _, _ = strings.Cut(id, "/")
	r.priority = priority
	go func() {
		lease, err := c.pool.reserve(ctx, time.Now().Add(time.Second), r, newTries())
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			c.errs[id] = err
			return
		}
		c.order, c.leases = append(c.order, id), append(c.leases, lease)
	}()
	synctest.Wait()
}

// release releases the oldest place.
func (c *queueClient) release() {
	c.mu.Lock()
	lease := c.leases[0]
	c.leases = c.leases[1:]
	c.mu.Unlock()
	lease.Release()
	synctest.Wait()
}

// TestQueueOrder checks the order of the requests that wait for one place, and which ones a full queue rejects.
func TestQueueOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &queueClient{pool: queueingPool(t, 1, 1, 1, QueueOptions{Size: 4, Timeout: time.Minute}), errs: map[string]error{}}
		for _, id := range []string{"a/0", "a/1", "a/2", "a/3", "b/0"} { // one is served, four wait
			c.send(t.Context(), id, 0)
		}
		c.send(t.Context(), "a/4", 0)  // the last one of the client with the most work
		c.send(t.Context(), "b/1", 0)  // evicts a/3
		c.send(t.Context(), "c/0", -1) // the lowest priority
		c.send(t.Context(), "a/5", 1)  // evicts a/2
		if c.pool.waitingForPlace() != 4 {
			t.Errorf("%d wait", c.pool.waitingForPlace())
		}
		for len(c.leases) > 0 {
			c.release()
		}
		if got, want := strings.Join(c.order, " "), "a/0 a/5 a/1 b/0 b/1"; got != want {
			t.Errorf("served %s, want %s", got, want)
		}
		for _, id := range []string{"a/2", "a/3", "a/4", "c/0"} {
			if !errors.Is(c.errs[id], errNoRoomToWait) {
				t.Errorf("%s: error %v", id, c.errs[id])
			}
		}
		if outstanding(c.pool) != 0 || c.pool.waitingForPlace() != 0 {
			t.Error("the pool is not empty")
		}
	})
}

// TestQueueEnds checks that a request stops waiting when its time is over or its client disconnects, that its place in
// the queue is free then, and that the next request is woken.
func TestQueueEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &queueClient{pool: queueingPool(t, 1, 1, 1, QueueOptions{Size: 2, Timeout: time.Minute}), errs: map[string]error{}}
		ctx, disconnect := context.WithCancel(t.Context())
		c.send(t.Context(), "a/0", 0)
		c.send(ctx, "b/0", 0)
		time.Sleep(30 * time.Second)
		c.send(t.Context(), "c/0", 0)
		disconnect()
		synctest.Wait()
		if c.errs["b/0"] == nil || c.pool.waitingForPlace() != 1 {
			t.Errorf("error %v; %d wait", c.errs["b/0"], c.pool.waitingForPlace())
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !errors.Is(c.errs["c/0"], errWaitedLong) || c.pool.waitingForPlace() != 0 {
			t.Errorf("error %v; %d wait", c.errs["c/0"], c.pool.waitingForPlace())
		}
		c.send(t.Context(), "d/0", 0)
		c.pool.Set(backendsOf("", 2, 1, "p")) // a second pod
		synctest.Wait()
		if got := strings.Join(c.order, " "); got != "a/0 d/0" {
			t.Errorf("served %s: a new pod does not serve the request that waits", got)
		}
		c.pool.Set(nil)
		c.release()
		c.send(t.Context(), "e/0", 0)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !errors.Is(c.errs["e/0"], errNoBackend) {
			t.Errorf("without pods: %v", c.errs["e/0"])
		}
		c.release()
	})
}

// TestQueueKeepsPlacesBusy checks with random requests, some of which leave or may go only to one pod, that no wake-up is
// lost: every other request is served before its time is over, and no rank exceeds its limit.
func TestQueueKeepsPlacesBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pods, ranks, limit, requests = 2, 2, 2, 600
		pool := queueingPool(t, pods, ranks, limit, QueueOptions{Size: requests, Timeout: MaxQueueTimeout, MaxPriority: 2})
		random := rand.New(rand.NewPCG(3, 3))
		var all sync.WaitGroup
		var mu sync.Mutex
		served, left := 0, 0
		for i := range requests {
			r := completion(fmt.Sprint(i), strings.Repeat("x", random.IntN(400)))
			r.client, r.priority = fmt.Sprint(random.IntN(5)), random.IntN(4)-2
			if random.IntN(5) == 0 {
				only := fmt.Sprintf("p-%d:1", random.IntN(pods))
				r.eligible = func(endpoint string) bool { return endpoint == only }
			}
			wait, serve, leaves := time.Duration(random.IntN(1000))*time.Millisecond, time.Duration(random.IntN(100))*time.Millisecond, random.IntN(6) == 0
			all.Go(func() {
				time.Sleep(wait)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if leaves {
					time.AfterFunc(serve, cancel)
				}
				lease, err := pool.reserve(ctx, time.Now().Add(time.Second), r, newTries())
				if err != nil {
					if !leaves {
						t.Errorf("request %s: %v", r.id, err)
					}
					mu.Lock()
					left++
					mu.Unlock()
					return
				}
				pool.mu.Lock()
				pending := lease.on.pending[lease.place]
				pool.mu.Unlock()
				if pending > limit {
					t.Errorf("%d requests on a rank", pending)
				}
				mu.Lock()
				served++
				mu.Unlock()
				time.Sleep(serve)
				lease.Release()
			})
		}
		all.Wait()
		if left == 0 || served+left != requests || pool.waitingForPlace() != 0 || outstanding(pool) != 0 {
			t.Errorf("%d served, %d left, %d wait", served, left, pool.waitingForPlace())
		}
	})
}

// TestQueueOverHTTP checks the queue with clients of a proxy: the fair order, priorities, responses and metrics.
func TestQueueOverHTTP(t *testing.T) {
	next := make(chan struct{})
	var mu sync.Mutex
	var order []string
	engine := newEngine(t, "a", 1, func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		order = append(order, r.Header.Get(HeaderRequestID))
		mu.Unlock()
		<-next
	})
	dir := t.TempDir()
	for _, name := range []string{"alice", "bob"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name+"-0123456789abcdef"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	keys, err := clientauth.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	pool := poolWith(t, func(o *PoolOptions) {
		o.PendingLimitPerRank, o.Queue = 1, QueueOptions{Size: 4, Timeout: time.Minute, MaxPriority: 5}
	})
	pool.Set([]discovery.Backend{engine})
	registry := prometheus.NewRegistry()
	url, _ := proxyServerOn(t, registry, pool, ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 10, EndpointWait: time.Minute, Keys: keys})
	var all sync.WaitGroup
	codes := map[string]int{}
	send := func(client, id, priority string) (code int, body string, header http.Header) {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"x"}`))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Authorization", "Bearer "+client+"-0123456789abcdef")
		request.Header.Set(HeaderRequestID, id)
		if priority != "" {
			request.Header.Set(HeaderPriority, priority)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Error(err)
			return 0, "", nil
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body) // the test compares it
		return response.StatusCode, string(text), response.Header
	}
	start := func(client, id, priority string, waiting int) {
		all.Go(func() {
			code, _, _ := send(client, id, priority)
			mu.Lock()
			defer mu.Unlock()
			codes[id] = code
		})
		eventually(t, id+" arrives", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(order) == 1 && pool.waitingForPlace() == waiting
		})
	}
	start("alice", "a0", "", 0)
	start("alice", "a1", "", 1)
	start("alice", "a2", "", 2)
	start("bob", "b0", "0", 3)
	start("bob", "b1", "100", 4) // as 5
	code, body, header := send("alice", "a3", "-1")
	if code != http.StatusTooManyRequests || header.Get("Retry-After") != "1" || !strings.Contains(body, "the queue of the router is full") {
		t.Errorf("a full queue: status %d, headers %v: %s", code, header, body)
	}
	for _, invalid := range []string{"high", "101", "-101", "1.5"} {
		if code, body, _ := send("bob", "b2", invalid); code != http.StatusBadRequest || !strings.Contains(body, "an integer from -100 to 100 is allowed") {
			t.Errorf("priority %q: status %d: %s", invalid, code, body)
		}
	}
	for range 5 {
		next <- struct{}{}
	}
	all.Wait()
	if got, want := strings.Join(order, " "), "a0 b1 a1 b0 a2"; got != want {
		t.Errorf("served %s, want %s", got, want)
	}
	for id, code := range codes {
		if code != http.StatusOK {
			t.Errorf("%s: status %d", id, code)
		}
	}
	if n := testutil.CollectAndCount(pool.queueSeconds); n != 4 {
		t.Errorf("%d outcomes have a series, want 4", n)
	}
	if err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP semmoe_router_queued_requests Requests that wait in the queue of the router because all ranks are at their limit.
# TYPE semmoe_router_queued_requests gauge
semmoe_router_queued_requests 0
`), "semmoe_router_queued_requests"); err != nil {
		t.Error(err)
	}
}

// TestPriorityWithoutQueue checks that a router without a queue ignores the priority. No engine gets the header.
func TestPriorityWithoutQueue(t *testing.T) {
	engine := newEngine(t, "a", 1, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Got", r.Header.Get(HeaderPriority))
	})
	router, _ := limitedRouter(t, ProxyOptions{EndpointWait: time.Second}, engine)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, router.URL+"/v1/completions", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(HeaderPriority, "high")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK || response.Header.Get("X-Got") != "" {
		t.Errorf("%s, headers %v", response.Status, response.Header)
	}
}
