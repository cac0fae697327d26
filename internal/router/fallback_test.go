// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/router/breaker"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// TestFallbacks checks that the fallbacks of a request depend on the active endpoints, the plan, the rank and the load.
func TestFallbacks(t *testing.T) {
	header := func(pod, plan string, ranks int) discovery.Backend {
		return discovery.Backend{Pod: pod, Address: pod, Ranks: ranks, PlanDigest: plan}
	}
	ports := func(pod, plan string, addresses ...string) discovery.Backend {
		return discovery.Backend{Pod: pod, Address: pod, Ranks: len(addresses), RankAddresses: addresses, PlanDigest: plan}
	}
	cases := map[string]struct {
		backends []discovery.Backend // the first one is chosen, on rank 1 if it has ranks
		load     map[string][]int64
		eligible func(string) bool
		ejected  string
		want     []string
	}{
		"no other":                    {backends: []discovery.Backend{header("a", "", 4)}},
		"the same rank of others":     {backends: []discovery.Backend{header("a", "", 2), header("b", "", 2), header("c", "", 2)}, load: map[string][]int64{"b": {0, 9}, "c": {9, 0}}, want: []string{"c", "b"}},
		"at most two":                 {backends: []discovery.Backend{header("a", "", 2), header("b", "", 2), header("c", "", 2), header("d", "", 2)}, load: map[string][]int64{"b": {0, 3}, "c": {0, 2}, "d": {0, 1}}, want: []string{"d", "c"}},
		"without ranks":               {backends: []discovery.Backend{header("a", "", 0), header("b", "", 0)}, want: []string{"b"}},
		"of the same plan":            {backends: []discovery.Backend{header("a", "x", 2), header("b", "y", 2), header("c", "", 2)}},
		"of as many ranks":            {backends: []discovery.Backend{header("a", "", 4), header("b", "", 2), header("c", "", 0)}},
		"not where no header reaches": {backends: []discovery.Backend{header("a", "", 2), ports("b", "", "b:0", "b:1")}},
		"not what needs a header":     {backends: []discovery.Backend{ports("a", "", "a:0", "a:1"), header("b", "", 2)}, want: []string{"a:0"}},
		"other ranks come last":       {backends: []discovery.Backend{ports("a", "", "a:0", "a:1", "a:2"), ports("b", "", "b:0", "b:1", "b:2")}, load: map[string][]int64{"b": {5, 9, 5}, "a": {7, 0, 1}}, want: []string{"b:1", "a:2"}},
		"live ranks":                  {backends: []discovery.Backend{ports("a", "", "a:0", "a:1", ""), ports("b", "", "b:0", "", "b:2")}, load: map[string][]int64{"a": {1, 0, 0}, "b": {2, 0, 3}}, want: []string{"a:0", "b:0"}},
		"eligible ranks":              {backends: []discovery.Backend{header("a", "", 2), header("b", "", 2), header("c", "", 2)}, eligible: func(e string) bool { return e != "b" }, want: []string{"c"}},
		"not what was just away":      {backends: []discovery.Backend{header("a", "", 2), header("b", "", 2), header("c", "", 2)}, ejected: "c", want: []string{"b"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			pool := newPool(tc.backends...)
			var lease *Lease
			for _, g := range pool.groups {
				for _, b := range g.backends {
					copy(b.outstanding, tc.load[b.Pod])
					if b.Pod == tc.ejected {
						b.breaker.Unreachable(&breaker.Settings{Ejection: time.Hour, MaxEjection: time.Hour}, pool.now())
					}
					if b.Pod == tc.backends[0].Pod {
						lease = &Lease{Backend: b.Backend, Rank: min(1, b.Ranks-1), on: b, pool: pool}
					}
				}
			}
			if got := pool.fallbacks(lease, &request{eligible: tc.eligible}, 2); !slices.Equal(got, tc.want) {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
}

// TestCountsTheServingEndpoint checks that the endpoint that served a request gets its load, and that observations
// contain its rank and plan.
func TestCountsTheServingEndpoint(t *testing.T) {
	p, _ := solved(t)
	planned := func(b discovery.Backend) discovery.Backend {
		b.PlanDigest, b.Shape = p.Artifact.Digest, &planstest.Shape
		return b
	}
	adapter := adapterOf(t, "SGLang")
	header := func(pod string) discovery.Backend {
		return planned(discovery.Backend{Pod: pod, Address: pod + ":1", Ranks: 4})
	}
	ports := func(pod string) discovery.Backend {
		return planned(discovery.Backend{Pod: pod, Address: pod + ":9", Ranks: 4, RankAddresses: []string{pod + ":0", pod + ":1", pod + ":2", pod + ":3"}})
	}
	cases := map[string]struct {
		backends []discovery.Backend
		served   func(endpoints []string) string
		code     int
		// Expected results: a fallback is counted, the first choice is ejected, the reported pod, and whether the
		// forecast stays valid.
		fallback bool
		ejected  bool
		pod      func(endpoint string) string
		forecast bool
		counted  bool
	}{
		"the first choice":        {backends: []discovery.Backend{header("a"), header("b")}, served: func(e []string) string { return e[0] }, pod: podOf, forecast: true, counted: true},
		"no reported endpoint":    {backends: []discovery.Backend{header("a")}, served: func([]string) string { return "" }, pod: func(string) string { return "a" }, forecast: true, counted: true},
		"the second choice":       {backends: []discovery.Backend{header("a"), header("b")}, served: func(e []string) string { return e[1] }, fallback: true, ejected: true, pod: podOf, forecast: true, counted: true},
		"a port of another pod":   {backends: []discovery.Backend{ports("a"), ports("b")}, served: func(e []string) string { return e[1] }, fallback: true, ejected: true, pod: podOf, forecast: true, counted: true},
		"another port of the pod": {backends: []discovery.Backend{ports("a")}, served: func(e []string) string { return e[1] }, fallback: true, pod: podOf, forecast: true, counted: true},
		"a pod of another plan":   {backends: []discovery.Backend{header("a")}, served: func([]string) string { return "other:1" }, fallback: true, ejected: true, pod: podOf, counted: true},
		"an unknown endpoint":     {backends: []discovery.Backend{header("a")}, served: func([]string) string { return "10.9.9.9:1" }, fallback: true, ejected: true, pod: func(string) string { return "" }, counted: true},
		"no endpoint":             {backends: []discovery.Backend{header("a")}, served: func(e []string) string { return e[0] }, code: 503, pod: podOf, forecast: true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			gatewaytest.NoLeaks(t)
			pool := newPool(tc.backends...)
			pool.AddLayout(p.layout)
			gateway, _, registry := newPicker(t, pool, ProxyOptions{RankHeader: adapter.RankHeader})
			s, endpoints, _ := begin(t, gateway, `{"prompt":[1,2,3],"max_tokens":5}`, map[string]string{"x-request-id": "an id"}, nil)
			served := tc.served(endpoints)
			pool.Set(append(tc.backends[:len(tc.backends):len(tc.backends)], discovery.Backend{Pod: "other", Address: "other:1", Ranks: 4, PlanDigest: "another"}))
			s.ResponseHeaders(max(200, tc.code), nil, false, served)
			headers := s.Answered().Set
			if pod := tc.pod(served); headers["x-semmoe-pod"] != pod {
				t.Errorf("reported pod %q, want %q", headers["x-semmoe-pod"], pod)
			}
			if named := headers["x-semmoe-plan"] != ""; named != tc.forecast {
				t.Errorf("plan %q is reported", headers["x-semmoe-plan"])
			}
			onServed := int64(0)
			pool.mu.Lock()
			for _, g := range pool.groups {
				for _, b := range g.backends {
					if ejected := b.breaker.State(pool.now()) == breaker.Open; ejected != (tc.ejected && b.Pod == podOf(endpoints[0])) {
						t.Errorf("pod %s is ejected: %v", b.Pod, ejected)
					}
					for rank, tokens := range b.outstanding {
						if tokens != 0 && (served == "" || b.Endpoint(rank) == served) && rankLabel(rank) == headers["x-semmoe-rank"] {
							onServed += tokens
						} else if tokens != 0 {
							t.Errorf("%d tokens are outstanding on rank %d of %s, reported rank is %s", tokens, rank, b.Pod, headers["x-semmoe-rank"])
						}
					}
				}
			}
			pool.mu.Unlock()
			if known := tc.pod(served) != ""; (onServed == 9) != known {
				t.Errorf("%d tokens are outstanding where it serves", onServed)
			}
			s.ResponseBody([]byte("x"), 1, true)
			s.Body(-1)
			eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
			fallbacks := 0
			if tc.fallback {
				fallbacks = 1
			}
			want := fmt.Sprintf(`# HELP semmoe_router_retries_total Retries on another pod, by reason: unreachable or unavailable; fallback if a gateway retried.
# TYPE semmoe_router_retries_total counter
semmoe_router_retries_total{reason="fallback"} %d
semmoe_router_retries_total{reason="unavailable"} 0
semmoe_router_retries_total{reason="unreachable"} 0
`, fallbacks)
			if tc.counted {
				rank := cmp.Or(headers["x-semmoe-rank"], rankLabel(discovery.NoRank))
				want += "# HELP semmoe_router_estimated_tokens_total Estimated tokens (prompt and output limit) sent to each rank, over all pods.\n" +
					"# TYPE semmoe_router_estimated_tokens_total counter\nsemmoe_router_estimated_tokens_total{rank=\"" + rank + "\"} 9\n"
			}
			if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "semmoe_router_retries_total", "semmoe_router_estimated_tokens_total"); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestGatewayLosesAPod checks that a pod that a gateway cannot reach, and that therefore has no load, gets no requests
// while other pods can take them.
func TestGatewayLosesAPod(t *testing.T) {
	gatewaytest.NoLeaks(t)
	pool := newPool(discovery.Backend{Pod: "a", Address: "a:1", Ranks: 1}, discovery.Backend{Pod: "b", Address: "b:1", Ranks: 1})
	now := time.Now()
	pool.now = func() time.Time { return now }
	gateway, _, _ := newPicker(t, pool, ProxyOptions{RankHeader: rankHeader})
	s, endpoints, _ := begin(t, gateway, `{"prompt":"x"}`, nil, nil)
	lost, other := endpoints[0], endpoints[1]
	s.ResponseHeaders(200, nil, false, other)
	s.Answered()
	for range 4 {
		if _, endpoints, _ := begin(t, gateway, `{"prompt":"x"}`, nil, nil); !slices.Equal(endpoints, []string{other}) {
			t.Errorf("endpoints %v after %s was lost", endpoints, lost)
		}
	}
	pool.mu.Lock()
	now = now.Add(breaker.Default().Ejection)
	pool.mu.Unlock()
	if _, endpoints, _ := begin(t, gateway, `{"prompt":"x"}`, nil, nil); endpoints[0] != lost {
		t.Errorf("endpoints %v once the moment is over", endpoints)
	}
}

// TestLateFallbackReport checks that a pod that has answered since a gateway skipped it is not ejected: the gateway
// reports the skip only when another pod answers, possibly minutes later.
func TestLateFallbackReport(t *testing.T) {
	for name, tc := range map[string]struct {
		code    int // of later responses of the first pod; 0 means none
		ejected bool
	}{
		"silent since":        {ejected: true},
		"answers":             {code: 200},
		"refuses":             {code: 400},
		"perhaps the gateway": {code: 504, ejected: true},
	} {
		t.Run(name, func(t *testing.T) {
			gatewaytest.NoLeaks(t)
			pool := newPool(discovery.Backend{Pod: "a", Address: "a:1", Ranks: 1}, discovery.Backend{Pod: "b", Address: "b:1", Ranks: 1})
			now := time.Now()
			pool.now = func() time.Time { return now }
			pass := func() {
				pool.mu.Lock()
				defer pool.mu.Unlock()
				now = now.Add(time.Minute)
			}
			gateway, _, _ := newPicker(t, pool, ProxyOptions{RankHeader: rankHeader})
			late, endpoints, _ := begin(t, gateway, `{"prompt":"x"}`, nil, nil)
			left, other := endpoints[0], endpoints[1]
			pass()
			for tc.code != 0 {
				s, endpoints, _ := begin(t, gateway, `{"prompt":"x"}`, nil, nil)
				if endpoints[0] == left {
					s.ResponseHeaders(tc.code, nil, false, left)
					s.Answered()
					break
				}
			}
			pass()
			late.ResponseHeaders(200, nil, false, other)
			late.Answered()
			pool.mu.Lock()
			defer pool.mu.Unlock()
			for _, b := range pool.groups[0].backends {
				if ejected := b.breaker.State(now) == breaker.Open; ejected != (tc.ejected && b.Address == left) {
					t.Errorf("pod %s is ejected: %v", b.Pod, ejected)
				}
			}
		})
	}
}
