// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/kvevents/kveventstest"
	"github.com/semmoe/operator/test/poll"
)

// observing returns a publisher for the ranks of a backend, to whose KV events a pool is subscribed, and a registry with
// the metrics of the subscriptions.
func observing(t *testing.T, pool *Pool, b discovery.Backend) (*kveventstest.Pod, *prometheus.Registry) {
	t.Helper()
	pod, registry := kveventstest.Start(t, b.Ranks, true), prometheus.NewRegistry()
	pool.events = kvevents.New(pod.Port, testr.New(t))
	registry.MustRegister(pool.events.Collectors()...)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		pool.events.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	pool.events.Set(eventTargets([]discovery.Backend{b}))
	for _, rank := range pod.Ranks {
		rank.AwaitSubscriptions(1)
	}
	poll.Until(t, "all subscriptions are live", func() bool {
		return len(pool.events.Cached(kvevents.Prompt{Tokens: func(int) []int32 { return nil }})) == b.Ranks
	})
	return pod, registry
}

// consecutive returns n consecutive numbers.
func consecutive[T int32 | int64](first T, n int) (all []T) {
	for i := range n {
		all = append(all, first+T(i))
	}
	return all
}

// chosen returns how many of n requests with a body go to each of two ranks.
func chosen(t *testing.T, pool *Pool, path, body string, n int) (ranks [2]int) {
	t.Helper()
	for i := range n {
		lease, ok := pool.acquire(requestOf(path, fmt.Sprint(i), []byte(body)), nil)
		if !ok {
			t.Fatal("no rank is available")
		}
		ranks[lease.Rank]++
		lease.Release()
	}
	return ranks
}

// TestPriceFollowsKVEvents checks that policy price selects the rank that has cached a prompt of token IDs by its KV
// events, and no longer after its eviction, although the router has sent the prompt to that rank.
func TestPriceFollowsKVEvents(t *testing.T) {
	pool := NewPool()
	backend := discovery.Backend{Pod: "a", Address: "127.0.0.1:1", Ranks: 2}
	pool.Set([]discovery.Backend{backend})
	pod, registry := observing(t, pool, backend)
	const n, requests = 512, 20
	ids := strings.ReplaceAll(strings.Trim(fmt.Sprint(consecutive[int32](0, n+1)), "[]"), " ", ",")
	body := fmt.Sprintf(`{"prompt":[%s],"max_tokens":1}`, ids)
	hashes := consecutive[int64](1, n/16)
	cached := func(want int) {
		t.Helper()
		poll.Until(t, "the events have arrived", func() bool {
			got := pool.events.Cached(kvevents.Prompt{Tokens: func(int) []int32 { return consecutive[int32](0, n+1) }})
			return got[kvevents.Place{Address: backend.Address, Rank: 1}] == want
		})
	}
	pod.Ranks[1].Publish(kveventstest.Batch(1, kveventstest.Stored(-1, hashes, consecutive[int32](0, n), 16)))
	cached(n)
	if got := chosen(t, pool, "/v1/completions", body, requests); got[1] != requests {
		t.Errorf("requests by rank: %v, want all on rank 1, which has cached the prompt", got)
	}
	pod.Ranks[1].Publish(kveventstest.Batch(1, kveventstest.Removed(hashes...)))
	cached(0)
	if got := chosen(t, pool, "/v1/completions", body, requests); got[0] == 0 || got[1] == 0 {
		t.Errorf("requests by rank: %v, want both: rank 1 has evicted the prompt", got)
	}
	// A chat is estimated: it stays on the rank to which it was sent.
	chat := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":1}`, strings.Repeat("one two three ", 200))
	if got := chosen(t, pool, "/v1/chat/completions", chat, requests); got[0] != requests && got[1] != requests {
		t.Errorf("chats by rank: %v, want all on one rank", got)
	}
	want := fmt.Sprintf(`
# HELP semmoe_router_kv_requests_total Requests by how the cached prefix on their rank is known: exact (KV events) or estimated (requests sent).
# TYPE semmoe_router_kv_requests_total counter
semmoe_router_kv_requests_total{prefix="estimated"} %d
semmoe_router_kv_requests_total{prefix="exact"} %d
`, requests, 2*requests)
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "semmoe_router_kv_requests_total"); err != nil {
		t.Error(err)
	}
}

// TestKVEventsOfTexts checks that a text is found by its tokens, also after a token for the beginning of a text.
func TestKVEventsOfTexts(t *testing.T) {
	p, _ := solved(t)
	special := int32(-1)
	for id := range int32(p.layout.Tokenizer.VocabSize()) {
		if p.layout.Tokenizer.IsSpecial(id) {
			special = id
			break
		}
	}
	text := strings.Repeat("func main returns the error of the name ", 400) // several times leadingBytes
	for name, start := range map[string][]int32{"no token for the beginning": nil, "a token for the beginning": {special}} {
		t.Run(name, func(t *testing.T) {
			if len(start) > 0 && special < 0 {
				t.Skip("the tokenizer of the small model has no special token")
			}
			pool := NewPool()
			backend := discovery.Backend{Pod: "a", Address: "127.0.0.1:1", Ranks: 4, PlanDigest: p.Artifact.Digest}
			pool.Set([]discovery.Backend{backend})
			pool.AddLayout(p.layout)
			pod, _ := observing(t, pool, backend)
			ids := append(start[:len(start):len(start)], p.layout.Tokenizer.Encode(text)...)
			blocks := (len(ids) - 1) / 16
			pod.Ranks[2].Publish(kveventstest.Batch(2, kveventstest.Stored(-1, consecutive[int64](1, blocks), ids[:16*blocks], 16)))
			r := requestOf("/v1/completions", "r", fmt.Appendf(nil, `{"prompt":%q,"max_tokens":1}`, text))
			r.score(p.layout)
			r.hash()
			poll.Until(t, "the text is found", func() bool {
				pool.observe(r)
				return r.observed[kvevents.Place{Address: backend.Address, Rank: 2}] == 16*blocks
			})
			if got := r.observed[kvevents.Place{Address: backend.Address, Rank: 1}]; got != 0 || len(r.observed) != 4 {
				t.Errorf("observed %v, want nothing on the other ranks", r.observed)
			}
		})
	}
}

// TestExactRequests checks for which requests the tokens that an engine computes are known.
func TestExactRequests(t *testing.T) {
	for body, want := range map[string]bool{
		`/v1/completions {"prompt":"a"}`:                                    true,
		`/v1/completions {"prompt":["a"]}`:                                  true,
		`/v1/completions {"prompt":[1,2]}`:                                  true,
		`/generate {"text":"a"}`:                                            true,
		`/generate {"input_ids":[1,2]}`:                                     true,
		`/v1/completions {"prompt":["a","b"]}`:                              false,
		`/v1/completions {"prompt":[[1,2],[3]]}`:                            false,
		`/v1/completions {"prompt":"a","cache_salt":"s"}`:                   false,
		`/v1/completions {"prompt":"a","truncate_prompt_tokens":5}`:         false,
		`/generate {"text":"a","lora_path":"l"}`:                            false,
		`/generate {"text":"a","image_data":"i"}`:                           false,
		`/v1/completions {}`:                                                false,
		`/v1/chat/completions {"messages":[{"role":"user","content":"a"}]}`: false,
		`/v1/embeddings {"input":"a"}`:                                      false,
	} {
		path, text, _ := strings.Cut(body, " ")
		if got := requestOf(path, "r", []byte(text)).exact; got != want {
			t.Errorf("%s: exact = %v, want %v", body, got, want)
		}
	}
}

// TestServesWithMalformedKVEvents checks that requests are served while events are malformed, of another model, or gone,
// and that this is counted.
func TestServesWithMalformedKVEvents(t *testing.T) {
	engine := newEngine(t, "a", 2, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	router, pool, _ := newRouter(t, time.Second, engine)
	pod, registry := observing(t, pool, engine)
	serves := func() {
		t.Helper()
		if response, _ := post(t, router.URL+"/v1/completions", `{"prompt":[1,2,3]}`); response.StatusCode != http.StatusOK {
			t.Errorf("status %d", response.StatusCode)
		}
	}
	counted := func(reason string) {
		t.Helper()
		poll.Until(t, "reason "+reason+" is counted", func() bool {
			families, err := registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			for _, family := range families {
				for _, m := range family.Metric {
					if family.GetName() == "semmoe_router_kv_event_drops_total" && m.Label[0].GetValue() == reason && m.Counter.GetValue() > 0 {
						return true
					}
				}
			}
			return false
		})
	}
	pod.Ranks[0].Publish([]byte("no batch"))
	counted("malformed")
	serves()
	pod.Ranks[1].Publish(kveventstest.Batch(0, kveventstest.Cleared()))
	counted("rank")
	serves()
	pod.Ranks[0].SendRaw([]byte("no frame"))
	counted("disconnected")
	serves()
}
