// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/balance"
	"github.com/semmoe/operator/internal/router/breaker"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/dispatch"
)

func backendsOf(plan string, pods, ranks int, name string) []discovery.Backend {
	var all []discovery.Backend
	for i := range pods {
		pod := fmt.Sprintf("%s-%d", name, i)
		all = append(all, discovery.Backend{Pod: pod, Address: pod + ":1", Ranks: ranks, PlanDigest: plan})
	}
	return all
}

// TestGroupsAreAFairSample checks that during a rollout each plan gets a share of the requests proportional to its
// ranks, and that the same share of its requests is sampled.
func TestGroupsAreAFairSample(t *testing.T) {
	const requests, percent = 40_000, 10
	pool := NewPool()
	pool.Set(append(append(backendsOf("", 2, 4, "none"), backendsOf("a", 1, 4, "a")...), backendsOf("b", 1, 8, "b")...))
	want := map[string]float64{"": 0.4, "a": 0.2, "b": 0.4}
	chosen, asked := map[string]int{}, map[string]int{}
	random := rand.New(rand.NewPCG(1, 1))
	for i := range requests {
		r := &request{id: fmt.Sprintf("request-%d", i), planRandom: random.Uint64(), tokens: 1, inference: true}
		lease, _ := pool.acquire(r, nil)
		lease.Release()
		chosen[lease.Backend.PlanDigest]++
		if sampled(random.Uint64(), percent) {
			asked[lease.Backend.PlanDigest]++
		}
		if again, _ := pool.acquire(r, nil); again.Backend.PlanDigest != lease.Backend.PlanDigest {
			t.Fatalf("%s goes to plan %q, then to %q", r.id, lease.Backend.PlanDigest, again.Backend.PlanDigest)
		} else {
			again.Release()
		}
	}
	for plan, p := range want {
		if off := float64(chosen[plan])/requests - p; math.Abs(off) > 4*math.Sqrt(p*(1-p)/requests) {
			t.Errorf("plan %q has %d of %d requests, want %.0f%%", plan, chosen[plan], requests, 100*p)
		}
		n, q := float64(chosen[plan]), float64(percent)/100
		if off := float64(asked[plan])/n - q; math.Abs(off) > 4*math.Sqrt(q*(1-q)/n) {
			t.Errorf("plan %q: %d of %d requests are sampled, want %d%%", plan, asked[plan], chosen[plan], percent)
		}
	}
}

// TestGroupsWithoutPods checks that a group is used while at least one of its pods is available, and then the next
// group.
func TestGroupsWithoutPods(t *testing.T) {
	pool := NewPool()
	now := time.Now()
	pool.now = func() time.Time { return now }
	pool.Set(append(backendsOf("a", 1, 4, "a"), backendsOf("b", 1, 4, "b")...))
	inA := 0
	for i := range 100 {
		r := &request{id: fmt.Sprint(i), planRandom: uint64(i), tokens: 1, inference: true}
		if lease, ok := pool.acquire(r, map[string]bool{"a-0:1": true}); !ok || lease.Backend.Pod != "b-0" {
			t.Fatalf("request %d goes to %+v although a-0 was tried", i, lease)
		}
		if lease, _ := pool.acquire(r, nil); lease.Backend.Pod == "a-0" {
			inA++
			lease.Eject()
			if next, _ := pool.acquire(r, nil); next.Backend.Pod != "b-0" {
				t.Fatal("a plan is used whose only pod cannot be reached")
			}
			now = now.Add(breaker.Default().Ejection)
		}
	}
	if inA == 0 {
		t.Error("no request ever goes to a: the test shows nothing")
	}
}

// samplePrompts returns distinct requests of several kinds.
func samplePrompts(n int) []*request {
	words := [][]string{
		strings.Fields("func return err if nil for range var string int package import struct := { } ( )"),
		strings.Fields("SELECT FROM WHERE name id users JOIN ON = AND OR GROUP BY ORDER LIMIT ; ( )"),
		strings.Fields("der die das und ist nicht ein Hund Haus mit auf sich werden kann ."),
		strings.Fields("the of and to in is that for it as was with his they at be this ."),
	}
	random := rand.New(rand.NewPCG(1, 2))
	var all []*request
	for i := range n {
		kind := words[random.IntN(len(words))]
		var text strings.Builder
		for range 20 + random.IntN(60) {
			text.WriteString(kind[random.IntN(len(kind))] + " ")
		}
		all = append(all, requestOf("/v1/completions", fmt.Sprintf("r%d", i), fmt.Appendf(nil, `{"prompt":%q,"max_tokens":16}`, text.String())))
	}
	return all
}

// TestChoosesByForecast checks that requests go to the ranks with their experts, evenly over the ranks and over the
// pods of a rank.
func TestChoosesByForecast(t *testing.T) {
	p, _ := solved(t)
	pool := NewPool()
	pool.Set(backendsOf(p.Artifact.Digest, 2, 4, "p"))
	pool.AddLayout(p.layout)
	var even balance.Window
	var predicted, mean, worst float64
	pods := map[string]int{}
	const requests, kept = 1000, 16
	var running []*Lease
	for i, r := range samplePrompts(requests) {
		lease, ok := pool.acquire(r, nil)
		if !ok || !lease.scored || lease.unscored != "" || lease.layout != p.layout {
			t.Fatalf("request %d: %+v", i, lease)
		}
		even.Add(balance.Arrival{Rank: lease.Rank, Ranks: 4, Tokens: lease.tokens})
		if i >= balance.Requests {
			worst = max(worst, even.Imbalance())
		}
		predicted += r.forecast.on(lease.Rank).Predicted
		for _, score := range r.forecast.scores {
			mean += float64(score) / 4
		}
		pods[lease.Backend.Pod]++
		if running = append(running, lease); len(running) > kept {
			running[0].Release()
			running = running[1:]
		}
	}
	t.Logf("predicted %.3f, at random %.3f, largest window imbalance %.3f", predicted/requests, mean/requests, worst)
	if predicted < 1.15*mean {
		t.Errorf("the predicted local activation rate is %.3f, at random it is %.3f", predicted/requests, mean/requests)
	}
	if worst > 1.3 {
		t.Errorf("a window of %d requests has imbalance %.3f", balance.Requests, worst)
	}
	if pods["p-0"] < requests*2/5 || pods["p-1"] < requests*2/5 {
		t.Errorf("pods got %v of %d requests", pods, requests)
	}
}

// TestAvoidsAStalledRank checks that a rank that has stopped responding does not collect requests. Requests that the
// scheduler assigns to it go elsewhere, and still count for their plan.
func TestAvoidsAStalledRank(t *testing.T) {
	p, _ := solved(t)
	pool := NewPool()
	pool.Set(backendsOf(p.Artifact.Digest, 1, 4, "p"))
	pool.AddLayout(p.layout)
	stalled := 0
	var largest int64
	requests := samplePrompts(400)
	for _, r := range requests {
		lease, _ := pool.acquire(r, nil)
		if !lease.scored {
			t.Fatalf("a request with scores %v is not scored", r.forecast.scores)
		}
		largest = max(largest, lease.tokens)
		if lease.Rank == 1 {
			stalled++
			continue
		}
		lease.Release()
	}
	if stalled == 0 || stalled > 3*dispatch.Slack {
		t.Errorf("a rank that never answers got %d of %d requests", stalled, len(requests))
	}
	if got := outstanding(pool); got > (dispatch.Slack+1)*largest {
		t.Errorf("%d tokens wait on it, the largest request has %d", got, largest)
	}
}

// TestSentAgain checks that a request that is sent again counts once for the balance, and keeps its rank on another pod
// of its plan.
func TestSentAgain(t *testing.T) {
	p, _ := solved(t)
	pool := NewPool()
	pool.Set(backendsOf(p.Artifact.Digest, 3, 4, "p"))
	pool.AddLayout(p.layout)
	for _, r := range samplePrompts(50) {
		tried := map[string]bool{}
		first, _ := pool.acquire(r, tried)
		first.Release()
		for range 2 {
			tried[first.Backend.Address] = true
			next, ok := pool.acquire(r, tried)
			if !ok || next.Rank != first.Rank || tried[next.Backend.Address] {
				t.Fatalf("rank %d of %s, then %d of %s", first.Rank, first.Backend.Pod, next.Rank, next.Backend.Pod)
			}
			next.Release()
			first = next
		}
	}
}

// TestQuietServiceUsesAllPods checks that the pods of a rank share its requests even if only one request is outstanding
// at a time.
func TestQuietServiceUsesAllPods(t *testing.T) {
	p, _ := solved(t)
	const pods, requests = 3, 300
	pool := NewPool()
	pool.Set(backendsOf(p.Artifact.Digest, pods, 4, "p"))
	pool.AddLayout(p.layout)
	served := map[string]int{}
	for _, r := range samplePrompts(requests) {
		lease, _ := pool.acquire(r, nil)
		if !lease.scored {
			t.Fatal("not scored")
		}
		served[lease.Backend.Pod]++
		lease.Release()
	}
	for pod, n := range served {
		if n < requests/pods/2 {
			t.Errorf("pod %s has served %d of %d requests", pod, n, requests)
		}
	}
	if len(served) != pods {
		t.Errorf("%d of %d pods have served: %v", len(served), pods, served)
	}
}

// TestUnscored checks that a request without a forecast is balanced by load, with the reason.
func TestUnscored(t *testing.T) {
	p, _ := solved(t)
	chat := func(body string) *request { return requestOf("/v1/completions", "id", []byte(body)) }
	cases := map[string]struct {
		plan     string
		ranks    int
		loaded   bool
		request  *request
		scored   bool
		unscored string
	}{
		"scored":          {p.Artifact.Digest, 4, true, chat(`{"prompt":"a"}`), true, ""},
		"no plan":         {"", 4, true, chat(`{"prompt":"a"}`), false, ""},
		"plan pending":    {p.Artifact.Digest, 4, false, chat(`{"prompt":"a"}`), false, unscoredPending},
		"no prompt":       {p.Artifact.Digest, 4, true, chat(`{}`), false, plans.NoPrompt},
		"other ranks":     {p.Artifact.Digest, 8, true, chat(`{"prompt":"a"}`), false, unscoredRanks},
		"takes no rank":   {p.Artifact.Digest, 0, true, chat(`{"prompt":"a"}`), false, unscoredRanks},
		"not inference":   {p.Artifact.Digest, 4, true, requestOf("/v1/models", "id", nil), false, ""},
		"malformed plan":  {"../../etc", 4, true, chat(`{"prompt":"a"}`), false, unscoredPending},
		"body is no JSON": {p.Artifact.Digest, 4, true, chat(`a`), false, plans.NoPrompt},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			pool := NewPool()
			pool.Set(backendsOf(tc.plan, 2, tc.ranks, "p"))
			if tc.loaded {
				pool.AddLayout(p.layout)
			}
			lease, ok := pool.acquire(tc.request, nil)
			if !ok || lease.scored != tc.scored || lease.unscored != tc.unscored {
				t.Fatalf("scored %v, unscored %q", lease.scored, lease.unscored)
			}
			second, _ := pool.acquire(tc.request, nil)
			if !tc.scored && tc.ranks > 0 && second.Backend.Pod == lease.Backend.Pod && second.Rank == lease.Rank {
				t.Error("two requests were put on one rank while others are free")
			}
			lease.Release()
			second.Release()
			if got := outstanding(pool); got != 0 {
				t.Errorf("%d tokens are outstanding after the end", got)
			}
		})
	}
}

// BenchmarkChoose measures the cost of choosing a rank: reading the request, tokenizing, scoring, scheduling.
func BenchmarkChoose(b *testing.B) {
	p, _ := solved(b)
	random := rand.New(rand.NewPCG(3, 4))
	text := func(tokens int) []byte {
		var s strings.Builder
		for range tokens {
			piece, _ := p.layout.Tokenizer.Token(int32(1 + random.IntN(4000)))
			s.WriteString(piece)
		}
		body, err := json.Marshal(map[string]string{"prompt": strings.ToValidUTF8(s.String(), "")})
		if err != nil {
			b.Fatal(err)
		}
		return body
	}
	ids := func(tokens int) []byte {
		return []byte(`{"prompt":[` + strings.TrimSuffix(strings.Repeat("1234,", tokens), ",") + `]}`)
	}
	for _, bench := range []struct {
		name string
		body []byte
	}{{"text1000", text(1000)}, {"ids1000", ids(1000)}, {"text100000", text(100_000)}, {"short", []byte(`{"prompt":"hello"}`)}} {
		b.Run(bench.name, func(b *testing.B) {
			pool := NewPool()
			pool.Set(backendsOf(p.Artifact.Digest, 16, 4, "p"))
			pool.AddLayout(p.layout)
			b.ReportAllocs()
			for b.Loop() {
				lease, _ := pool.acquire(requestOf("/v1/completions", "id", bench.body), nil)
				if !lease.scored {
					b.Fatal("not scored")
				}
				lease.Release()
			}
		})
	}
}

// TestChoosesAmongAdmittedPorts checks that ranks with their own port get no request if the port is inactive,
// ineligible or was tried, with and without a forecast. The other ranks share the load.
func TestChoosesAmongAdmittedPorts(t *testing.T) {
	p, _ := solved(t)
	addresses := []string{"a:0", "a:1", "", "a:3"}
	for name, tc := range map[string]struct {
		tried    map[string]bool
		eligible func(string) bool
		want     map[int]bool
	}{
		"live":               {nil, nil, map[int]bool{0: true, 1: true, 3: true}},
		"tried":              {map[string]bool{"a:1": true}, nil, map[int]bool{0: true, 3: true}},
		"eligible":           {nil, func(endpoint string) bool { return endpoint != "a:0" }, map[int]bool{1: true, 3: true}},
		"eligible and tried": {map[string]bool{"a:1": true}, func(endpoint string) bool { return endpoint != "a:0" }, map[int]bool{3: true}},
		"none":               {nil, func(string) bool { return false }, map[int]bool{}},
	} {
		for _, plan := range []string{"", p.Artifact.Digest} {
			pool := NewPool()
			pool.AddLayout(p.layout)
			pool.Set([]discovery.Backend{{Pod: "a", Address: "a:9", Ranks: 4, RankAddresses: addresses, PlanDigest: plan}})
			got := map[int]bool{}
			for i := range 200 {
				r := requestOf("/v1/completions", fmt.Sprint(i), fmt.Appendf(nil, `{"prompt":[%d],"max_tokens":8}`, i))
				r.eligible = tc.eligible
				lease, ok := pool.acquire(r, tc.tried)
				if !ok {
					continue
				}
				got[lease.Rank] = true
				if lease.endpoint() != addresses[lease.Rank] {
					t.Fatalf("%s: rank %d is sent to %s", name, lease.Rank, lease.endpoint())
				}
				if (lease.scored || lease.unscored != "") != (plan != "") {
					t.Fatalf("%s: under plan %q scored is %v, unscored %q", name, plan, lease.scored, lease.unscored)
				}
			}
			if !maps.Equal(got, tc.want) {
				t.Errorf("%s, plan %q: ranks %v are used, want %v", name, plan, got, tc.want)
			}
		}
	}
}

// poolWith returns a pool with changed options.
func poolWith(t *testing.T, change func(o *PoolOptions)) *Pool {
	t.Helper()
	options := DefaultPoolOptions()
	change(&options)
	pool, err := NewPoolWith(options)
	if err != nil {
		t.Fatal(err)
	}
	return pool
}

func TestPoolOptionsAreChecked(t *testing.T) {
	for want, change := range map[string]func(o *PoolOptions){
		`pendingLimitPerRank: -1 is invalid`: func(o *PoolOptions) { o.PendingLimitPerRank = -1 },
		`cacheTokensPerRank: 0 is invalid`:   func(o *PoolOptions) { o.CacheTokensPerRank = 0 },
		`queue.size: -1 is invalid`:          func(o *PoolOptions) { o.Queue.Size = -1 },
		`queue.size: 10001 is invalid`:       func(o *PoolOptions) { o.Queue.Size = MaxQueueSize + 1 },
		`queue.size: 0 is invalid`:           func(o *PoolOptions) { o.Queue.Timeout = time.Second },
		`pendingLimitPerRank: 0 is invalid`:  func(o *PoolOptions) { o.Queue = QueueOptions{Size: 1, Timeout: time.Second} },
		`queue.timeout: 0s is invalid`:       func(o *PoolOptions) { o.Queue, o.PendingLimitPerRank = QueueOptions{Size: 1}, 1 },
		`queue.timeout: 1h0m0s is invalid`: func(o *PoolOptions) {
			o.Queue, o.PendingLimitPerRank = QueueOptions{Size: 1, Timeout: time.Hour}, 1
		},
		`queue.maxPriority: 101 is invalid`: func(o *PoolOptions) {
			o.Queue, o.PendingLimitPerRank = QueueOptions{Size: 1, Timeout: 1, MaxPriority: 101}, 1
		},
		`consecutiveFailures: 0 is invalid`: func(o *PoolOptions) { o.Breaker.ConsecutiveFailures = 0 },
		`policy window decides on`:          func(o *PoolOptions) { o.Policy = dispatch.Window },
		`cap is 0.5`:                        func(o *PoolOptions) { o.Cap = .5 },
		`weight load is -1`:                 func(o *PoolOptions) { o.Weights.Load = -1 },
	} {
		options := DefaultPoolOptions()
		change(&options)
		if _, err := NewPoolWith(options); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v; want %q", err, want)
		}
	}
}

// completion returns a completion request.
func completion(id, prompt string) *request {
	return requestOf("/v1/completions", id, fmt.Appendf(nil, `{"prompt":%q,"max_tokens":16}`, prompt))
}

// conversationOf returns a text of this length that is unique for each number.
func conversationOf(number, bytes int) string {
	random := rand.New(rand.NewPCG(uint64(number), 7))
	text := make([]byte, bytes)
	for i := range text {
		text[i] = byte('a' + random.IntN(26))
	}
	return string(text)
}

// TestPrefixesWithoutAPlan checks that without a plan, and under every policy that uses prefixes, a conversation stays
// on its pod while the pod exists.
func TestPrefixesWithoutAPlan(t *testing.T) {
	for _, policy := range []dispatch.Policy{dispatch.Price, dispatch.Prefix} {
		for _, ranks := range []int{0, 4} {
			pool := poolWith(t, func(o *PoolOptions) { o.Policy, o.Cap = policy, 4 })
			backends := backendsOf("", 3, ranks, "p")
			pool.Set(backends)
			began := map[int]*Lease{}
			for n := range 12 {
				lease, _ := pool.acquire(completion(fmt.Sprint(n), conversationOf(n, 3000)), nil)
				lease.Release()
				began[n] = lease
			}
			for n := range 12 {
				again, _ := pool.acquire(completion(fmt.Sprint("again-", n), conversationOf(n, 3000)+" and then?"), nil)
				if again.Backend.Pod != began[n].Backend.Pod || again.Rank != began[n].Rank {
					t.Errorf("%s, %d ranks: a conversation went from rank %d of %s to rank %d of %s",
						policy, ranks, began[n].Rank, began[n].Backend.Pod, again.Rank, again.Backend.Pod)
				}
				if want := int64(len(conversationOf(n, 3000)) / wire.BytesPerToken / 2); again.tokens > want {
					t.Errorf("%s: a request of which most is cached counts %d tokens", policy, again.tokens)
				}
				again.Release()
			}
			if spent := pool.DecisionSums(); spent.Cached == 0 || spent.Prefix == 0 && policy == dispatch.Price {
				t.Errorf("%s: decisions sum up to %+v", policy, spent)
			}
			// A pod that was removed and added again has an empty cache, and the caches of other pods are kept.
			pool.Set(backends[1:])
			pool.Set(backends)
			for n, first := range began {
				if lease, _ := pool.acquire(completion(fmt.Sprint("later-", n), conversationOf(n, 3000)), nil); first.Backend.Pod == "p-0" {
					if lease.Backend.Pod == "p-0" && lease.tokens < 700 {
						t.Errorf("%s: %d tokens are to be computed on a new pod", policy, lease.tokens)
					}
				} else if lease.Backend.Pod != first.Backend.Pod {
					t.Errorf("%s: a conversation moved from %s to %s", policy, first.Backend.Pod, lease.Backend.Pod)
				}
			}
		}
	}
}

// TestPrefixesWithAPlan checks that with a plan, a conversation stays on a pod of its rank.
func TestPrefixesWithAPlan(t *testing.T) {
	p, _ := solved(t)
	pool := poolWith(t, func(o *PoolOptions) { o.Cap = 4 })
	pool.Set(backendsOf(p.Artifact.Digest, 3, 4, "p"))
	pool.AddLayout(p.layout)
	moved := 0
	requests := samplePrompts(40)
	for _, r := range requests {
		text := strings.Repeat(r.prompt.Texts[0], 8)
		first, _ := pool.acquire(completion(r.id, text), nil)
		first.Release()
		again, _ := pool.acquire(completion(r.id+"again", text+" more"), nil)
		again.Release()
		if !again.scored || again.Backend.Pod != first.Backend.Pod || again.Rank != first.Rank {
			moved++
		}
	}
	if moved > len(requests)/10 {
		t.Errorf("%d of %d conversations moved", moved, len(requests))
	}
	if spent := pool.DecisionSums(); spent.Cached < spent.Tokens/4 {
		t.Errorf("%.0f of %.0f tokens were cached", spent.Cached, spent.Tokens)
	}
}

// TestPendingLimit checks that a rank takes no more requests than its limit. If all ranks are full, the pool reports so
// immediately, and takes a request again when one has ended.
func TestPendingLimit(t *testing.T) {
	p, _ := solved(t)
	for name, digest := range map[string]string{"no plan": "", "plan": p.Artifact.Digest} {
		t.Run(name, func(t *testing.T) {
			const pods, ranks, limit = 2, 4, 3
			pool := poolWith(t, func(o *PoolOptions) { o.PendingLimitPerRank = limit })
			pool.Set(backendsOf(digest, pods, ranks, "p"))
			pool.AddLayout(p.layout)
			count := map[string]int{}
			var leases []*Lease
			for i, r := range samplePrompts(pods * ranks * limit) {
				lease, ok := pool.acquire(r, nil)
				if !ok {
					t.Fatalf("request %d was refused: %v", i, r.refused)
				}
				at := fmt.Sprint(lease.Backend.Pod, lease.Rank)
				if count[at]++; count[at] > limit {
					t.Fatalf("%s has %d requests", at, count[at])
				}
				leases = append(leases, lease)
			}
			late := completion("late", "one more")
			if _, ok := pool.wait(t.Context(), late, nil); ok || late.refused != errAllFull {
				t.Fatalf("a request more: %v, refused with %v", ok, late.refused)
			}
			if _, ok := pool.acquire(requestOf("/v1/tokenize", "t", nil), nil); !ok {
				t.Error("a request that generates nothing was refused")
			}
			leases[5].Release()
			leases[5].Release()
			lease, ok := pool.acquire(late, nil)
			if !ok || late.refused != nil || lease.Backend.Pod != leases[5].Backend.Pod || lease.Rank != leases[5].Rank {
				t.Errorf("after one has ended: %v, %v", lease, late.refused)
			}
			if _, ok := pool.acquire(completion("none", "x"), map[string]bool{"p-0:1": true, "p-1:1": true}); ok {
				t.Error("a pod was taken that had been tried")
			}
		})
	}
}

// TestPendingLimitByGroup checks that requests go to pods of another plan while all pods of one plan are full.
func TestPendingLimitByGroup(t *testing.T) {
	pool := poolWith(t, func(o *PoolOptions) { o.PendingLimitPerRank = 1 })
	pool.Set(append(backendsOf("a", 1, 2, "a"), backendsOf("b", 1, 4, "b")...))
	seen := map[string]int{}
	for i := range 6 {
		lease, ok := pool.acquire(completion(fmt.Sprint(i), "x"), nil)
		if !ok {
			t.Fatalf("request %d of 6 was refused", i)
		}
		seen[lease.Backend.Pod]++
	}
	if seen["a-0"] != 2 || seen["b-0"] != 4 {
		t.Errorf("pods have %v requests", seen)
	}
}

// TestSentAgainCountsOnce checks that sending a request again changes neither the balance of its plan nor the sums of
// the decisions.
func TestSentAgainCountsOnce(t *testing.T) {
	p, _ := solved(t)
	for name, digest := range map[string]string{"no plan": "", "plan": p.Artifact.Digest} {
		pool := NewPool()
		pool.Set(backendsOf(digest, 3, 4, "p"))
		pool.AddLayout(p.layout)
		r := completion("r", "some text")
		first, _ := pool.acquire(r, nil)
		spent := pool.DecisionSums()
		load := r.scheduler.Load(first.Rank)
		first.Release()
		again, _ := pool.acquire(r, map[string]bool{first.Backend.Address: true})
		if again.Rank != first.Rank || pool.DecisionSums() != spent || r.scheduler.Load(first.Rank) != load {
			t.Errorf("%s: from rank %d to %d, load %d and then %d, %+v and then %+v",
				name, first.Rank, again.Rank, load, r.scheduler.Load(first.Rank), spent, pool.DecisionSums())
		}
	}
}

// TestHashesPrefixesForPoliciesThatReadThem checks that prefixes are neither hashed nor recorded for other policies.
func TestHashesPrefixesForPoliciesThatReadThem(t *testing.T) {
	p, _ := solved(t)
	for _, policy := range []dispatch.Policy{dispatch.Price, dispatch.Prefix, dispatch.LeastLoaded, dispatch.RoundRobin, dispatch.Masked} {
		for _, digest := range []string{"", p.Artifact.Digest} {
			pool := poolWith(t, func(o *PoolOptions) { o.Policy = policy })
			pool.Set(backendsOf(digest, 1, 4, "p"))
			pool.AddLayout(p.layout)
			r := completion("a", conversationOf(1, 3000))
			lease, _ := pool.acquire(r, nil)
			lease.Release()
			if reads := policy != dispatch.RoundRobin && policy != dispatch.Masked; r.hashed != reads || (len(lease.given) > 0) != reads || lease.scored != (digest != "") {
				t.Errorf("%s, plan %q: hashed %t, recorded %d blocks, scored %t", policy, digest, r.hashed, len(lease.given), lease.scored)
			}
		}
	}
}

// TestPolicies checks that every policy serves with and without a plan.
func TestPolicies(t *testing.T) {
	p, _ := solved(t)
	for _, policy := range dispatch.Policies {
		if !policy.AtOnce() {
			continue
		}
		for _, digest := range []string{"", p.Artifact.Digest} {
			pool := poolWith(t, func(o *PoolOptions) { o.Policy = policy })
			pool.Set(backendsOf(digest, 2, 4, "p"))
			pool.AddLayout(p.layout)
			ranks := map[int]int{}
			for _, r := range samplePrompts(200) {
				lease, ok := pool.acquire(r, nil)
				if !ok || lease.scored != (digest != "") {
					t.Fatalf("%s: %+v", policy, lease)
				}
				ranks[lease.Rank]++
				lease.Release()
			}
			if len(ranks) != 4 {
				t.Errorf("%s, plan %q: ranks had %v requests", policy, digest, ranks)
			}
		}
	}
}
