// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
)

// TestNamesThePlan checks that a response names exactly the plan that selected the rank.
func TestNamesThePlan(t *testing.T) {
	p, _ := solved(t)
	engine := newEngine(t, "a", 4, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set(HeaderPlan, "the engine's own") })
	engine.PlanDigest = p.Artifact.Digest
	router, pool, registry := newRouter(t, time.Second, engine)
	send := func(path, body string) string {
		response, _ := post(t, router.URL+path, body)
		return response.Header.Get(HeaderPlan)
	}
	if got := send("/v1/completions", `{"prompt":"x"}`); got != "" {
		t.Errorf("plan %q is named before it is loaded", got)
	}
	pool.AddLayout(p.layout)
	for name, tc := range map[string]struct{ path, body, want string }{
		"scored":       {"/v1/completions", `{"prompt":"x"}`, p.Short()},
		"no prompt":    {"/v1/completions", `{}`, ""},
		"no inference": {"/v1/tokenize", `{"prompt":"x"}`, ""},
	} {
		if got := send(tc.path, tc.body); got != tc.want {
			t.Errorf("%s: plan %q, want %q", name, got, tc.want)
		}
	}
	want := `
# HELP semmoe_router_plans Plans that engine pods name, by state: loaded, or pending if they cannot be read.
# TYPE semmoe_router_plans gauge
semmoe_router_plans{state="loaded"} 1
semmoe_router_plans{state="pending"} 0
# HELP semmoe_router_unscored_requests_total Inference requests to pods with a plan that were balanced only by load, by reason: plan_pending, no_table, no_prompt, no_tokenizer, ranks_differ or not_pinned.
# TYPE semmoe_router_unscored_requests_total counter
semmoe_router_unscored_requests_total{reason="no_prompt"} 1
semmoe_router_unscored_requests_total{reason="plan_pending"} 1
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "semmoe_router_plans", "semmoe_router_unscored_requests_total"); err != nil {
		t.Error(err)
	}
}

// TestPlansChangeUnderLoad checks that no request is lost while pods and plans change, and that each is scored with the
// table of its pod's plan.
func TestPlansChangeUnderLoad(t *testing.T) {
	for _, hold := range []time.Duration{0, 200 * time.Millisecond} {
		t.Run(fmt.Sprint("hold ", hold), func(t *testing.T) { plansChangeUnderLoad(t, hold) })
	}
}

func plansChangeUnderLoad(t *testing.T, hold time.Duration) {
	first, second := solved(t)
	var busy atomic.Int32
	engine := func(name, planDigest string) discovery.Backend {
		b := newEngine(t, name, 4, func(w http.ResponseWriter, r *http.Request) {
			// Some pods occasionally reject requests, which then move to another pod, possibly of another plan.
			if busy.Add(1)%7 == 0 && name != "old-0" {
				http.Error(w, "draining", http.StatusServiceUnavailable)
				return
			}
			io.Copy(w, r.Body) //nolint:errcheck // the client verifies the body
		})
		b.PlanDigest = planDigest
		return b
	}
	none := []discovery.Backend{engine("none-0", "")}
	old := []discovery.Backend{engine("old-0", first.Artifact.Digest), engine("old-1", first.Artifact.Digest)}
	young := []discovery.Backend{engine("young-0", second.Artifact.Digest), engine("young-1", second.Artifact.Digest)}
	want := map[string]string{"none": "", "old": first.Short(), "young": second.Short()}
	stages := [][]discovery.Backend{none, append(none[:1:1], old...), old, append(old[:1:1], young...), append(old[:2:2], young...)}
	pool := poolWith(t, func(o *PoolOptions) { o.Hold, o.Cap = hold, 1.03 })
	router, _ := routerOn(t, pool, 10*time.Second, none...)

	stop := make(chan struct{})
	var changes sync.WaitGroup
	changes.Go(func() {
		random := rand.New(rand.NewPCG(1, 1))
		for next := int32(0); ; {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			if busy.Load() < next { // on a slow machine, the same number of requests runs between two changes
				continue
			}
			next = busy.Load() + 10
			pool.Set(stages[random.IntN(len(stages))])
			p := []planned{first, second}[random.IntN(2)]
			if random.IntN(3) == 0 {
				pool.DropLayout(p.Artifact.Digest)
			} else {
				pool.AddLayout(plans.New(p.Artifact.Digest, p.Plan, p.layout.Tokenizer))
			}
		}
	})
	var scored, unscored atomic.Int32
	var clients sync.WaitGroup
	for client := range 8 {
		clients.Go(func() {
			for i := range 150 {
				body := fmt.Sprintf(`{"prompt":"request %d of client %d: func main() {"}`, i, client)
				response, err := http.Post(router.URL+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				got, err := io.ReadAll(response.Body)
				response.Body.Close()
				if err != nil || response.StatusCode != http.StatusOK || string(got) != body {
					t.Errorf("request %d of client %d: %s, %v, %q", i, client, response.Status, err, got)
				}
				kind, _, _ := strings.Cut(response.Header.Get(HeaderPod), "-")
				switch plan := response.Header.Get(HeaderPlan); plan {
				case "":
					unscored.Add(1)
				case want[kind]:
					scored.Add(1)
				default:
					t.Errorf("pod %s got a request by the forecast of plan %s", response.Header.Get(HeaderPod), plan)
				}
			}
		})
	}
	clients.Wait()
	close(stop)
	changes.Wait()
	if scored.Load() == 0 || unscored.Load() == 0 {
		t.Errorf("%d requests were scored, %d not: the test shows nothing", scored.Load(), unscored.Load())
	}
	eventually(t, "no token is outstanding", func() bool { return outstanding(pool) == 0 })
	if held := pool.DecisionSums().Waits; held > 0 != (hold > 0) {
		t.Errorf("%v requests waited for a rank", held)
	}
}

// TestForecastIsOfThePodsPlan checks that the forecast of a lease equals a forecast that is computed from the table of
// its pod's plan.
func TestForecastIsOfThePodsPlan(t *testing.T) {
	first, second := solved(t)
	byDigest := map[string]planned{first.Artifact.Digest: first, second.Artifact.Digest: second}
	pool := NewPool()
	pool.AddLayout(first.layout)
	pool.AddLayout(second.layout)
	pool.Set(append(backendsOf(first.Artifact.Digest, 2, 4, "first"), backendsOf(second.Artifact.Digest, 2, 4, "second")...))
	seen := map[string]int{}
	for i, r := range samplePrompts(300) {
		r.sampled = i%2 == 0
		tried := map[string]bool{}
		for {
			lease, ok := pool.acquire(r, tried)
			if !ok {
				break
			}
			p := byDigest[lease.Backend.PlanDigest]
			scores := make([]float32, 4)
			ids := p.layout.Tokenizer.Encode(r.prompt.Texts[0])
			p.Plan.Ranks.ScoreTokens(scores, ids)
			got := r.forecast.on(lease.Rank)
			want := &lar.Forecast{Tables: lease.Backend.PlanDigest, Best: got.Best, Highest: share(float64(slices.Max(scores))), Predicted: share(float64(scores[lease.Rank]))}
			if r.sampled {
				known, pairs := p.Plan.Seen.Shares(ids)
				want.Known, want.Pairs = share(known), share(pairs)
			}
			if !lease.scored || lease.layout != p.layout || scores[got.Best] != slices.Max(scores) || *got != *want {
				t.Fatalf("%s on rank %d: forecast %+v, the forecast of its plan is %+v from %v", lease.Backend.Pod, lease.Rank, got, want, scores)
			}
			lease.Release()
			seen[lease.Backend.Pod]++
			tried[lease.Backend.Address] = true
		}
	}
	if len(seen) != 4 {
		t.Errorf("pods %v were used", seen)
	}
}
