// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/test/ports"
)

// TestSwapsTablesUnderLoad checks that no request is lost while tables are replaced, and that each is scored with the
// tables that its sample names.
func TestSwapsTablesUnderLoad(t *testing.T) {
	p, _ := solved(t)
	tables := favouring(t, p, 1)
	adapter := adapterOf(t, "SGLang")
	address := startReferenceEngine(t, string(p.Artifact.Files["engine/sglang.json"]))
	pool := newPool(discovery.Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", PlanDigest: p.Artifact.Digest, Shape: &planstest.Shape})
	pool.AddLayout(p.layout)
	pool.AddLayout(tables.layout)
	url, observations := proxyServer(t, pool, ProxyOptions{
		RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
	})
	const requests = 160
	var sent atomic.Int32
	var clients sync.WaitGroup
	var mu sync.Mutex
	answers := map[string]string{}
	for client := range 4 {
		clients.Go(func() {
			for sent.Add(1) <= requests {
				body := fmt.Sprintf(`{"text":"func main%d() {","sampling_params":{"temperature":0,"max_new_tokens":3}}`, client)
				response, text := post(t, url+"/generate", body)
				if named := response.Header.Get(HeaderPlan); response.StatusCode != http.StatusOK || named != p.Short() && named != tables.Short() {
					t.Errorf("%s, by plan %q: %s", response.Status, named, text)
				}
				mu.Lock()
				if before, known := answers[body]; known && before != steady(text) {
					t.Errorf("the answer differs:\n%s\n%s", before, steady(text))
				}
				answers[body] = steady(text)
				mu.Unlock()
			}
		})
	}
	swaps := 0
	for ; sent.Load() < requests; swaps++ {
		before := sent.Load()
		if err := pool.UseTables(p.Artifact.Digest, []planned{tables, p}[swaps%2].Artifact.Digest); err != nil {
			t.Fatal(err)
		}
		eventually(t, "requests go on", func() bool { return sent.Load() > before+3 || sent.Load() >= requests })
	}
	clients.Wait()
	by := map[string]int{}
	eventually(t, "all requests are observed", func() bool { return len(observations.recent()) == requests })
	for _, o := range observations.recent() {
		if o.Plan != p.Artifact.Digest || o.Forecast == nil {
			t.Fatalf("%+v", o)
		}
		by[o.Forecast.Tables]++
		if swapped := o.Forecast.Highest == share(float64(affinity.ScoreScale/2)/affinity.ScoreScale) && o.Forecast.Best == 1; swapped != (o.Forecast.Tables == tables.Artifact.Digest) {
			t.Errorf("forecast %+v is not by these tables", o.Forecast)
		}
	}
	if by[p.Artifact.Digest] < requests/8 || by[tables.Artifact.Digest] < requests/8 || len(by) != 2 {
		t.Errorf("requests by tables: %v in %d swaps", by, swaps)
	}
	if total := servedBy(t, observations)["r"]; total.Requests != requests || total.Failures != 0 {
		t.Errorf("%+v", total)
	}
	if got := reported(t, observations).Tables; len(got) != 1 || got[p.Artifact.Digest] == "" {
		t.Errorf("tables in use: %v", got)
	}
}

// TestSwapBeforeAMove checks that a request that moves to another pod after tables were replaced is counted for the
// tables that scored it.
func TestSwapBeforeAMove(t *testing.T) {
	p, _ := solved(t)
	tables := favouring(t, p, 1)
	pool := newPool(backendsOf(p.Artifact.Digest, 2, 4, "p")...)
	pool.AddLayout(p.layout)
	pool.AddLayout(tables.layout)
	r := completion("r", "func main() {")
	lease, _ := pool.acquire(r, nil)
	if err := pool.UseTables(p.Artifact.Digest, tables.Artifact.Digest); err != nil {
		t.Fatal(err)
	}
	lease.move(pool.fallbacks(lease, r, 1)[0])
	if f := r.forecast.on(lease.Rank); !lease.scored || f.Tables != p.Artifact.Digest {
		t.Errorf("scored %v, forecast %+v", lease.scored, f)
	}
	lease.Release()
}

func TestTablesMetric(t *testing.T) {
	p, _ := solved(t)
	tables := favouring(t, p, 1)
	pool := newPool(append(backendsOf(p.Artifact.Digest, 2, 4, "p"), backendsOf("", 1, 4, "unplanned")...)...)
	registry := prometheus.NewRegistry()
	newMetrics(registry, pool)
	want := func(from string) string {
		return "# HELP semmoe_router_tables_info 1 for each loaded plan that engine pods name, with the plan whose tables score its requests: the same plan, or one with newer tables for the same layout.\n" +
			"# TYPE semmoe_router_tables_info gauge\nsemmoe_router_tables_info{plan=\"" + p.Short() + "\",tables=\"" + from + "\"} 1\n"
	}
	if err := testutil.GatherAndCompare(registry, strings.NewReader(""), "semmoe_router_tables_info"); err != nil {
		t.Error(err)
	}
	pool.AddLayout(p.layout)
	pool.AddLayout(tables.layout)
	for _, from := range []planned{p, tables} {
		if err := pool.UseTables(p.Artifact.Digest, from.Artifact.Digest); err != nil {
			t.Fatal(err)
		}
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want(from.Short())), "semmoe_router_tables_info"); err != nil {
			t.Error(err)
		}
	}
}

// TestStartsWithSwappedTables checks that a router that starts without API server and artifact store scores with the
// tables that its file names.
func TestStartsWithSwappedTables(t *testing.T) {
	p, _ := solved(t)
	tables := favouring(t, p, 1)
	engine := newEngine(t, "a", 4, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") })
	engine.PlanDigest = p.Artifact.Digest
	dir := t.TempDir()
	if err := discovery.SaveSnapshot(dir, []discovery.Backend{engine}); err != nil {
		t.Fatal(err)
	}
	for _, kept := range []planned{p, tables} {
		if err := plan.Write(filepath.Join(dir, plansName, kept.Artifact.Digest), kept.Artifact, []byte("{}")); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(map[string]string{p.Artifact.Digest: tables.Artifact.Digest})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "tables.json")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	clients, err := kubernetes.NewForConfig(&rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", ports.Reserve(t))})
	if err != nil {
		t.Fatal(err)
	}
	options := Options{
		ProxyOptions: ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20, EndpointWait: time.Second},
		Pool:         DefaultPoolOptions(), Namespace: "ns", Selector: "a=b", SnapshotDir: dir, TablesFile: file,
		FetchPlan: func(_ context.Context, _, dir string) error { _, _, err := plan.Read(dir); return err },
		Host:      "127.0.0.1", Port: ports.Reserve(t), MetricsPort: ports.Reserve(t), DrainTimeout: time.Minute,
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, clients, options) }()
	named := func() string {
		response, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/v1/completions", options.Port), "application/json", strings.NewReader(`{"prompt":[1,2,3]}`))
		if err != nil {
			return ""
		}
		response.Body.Close()
		return response.Header.Get(HeaderPlan)
	}
	eventually(t, "requests are scored by the other tables", func() bool { return named() == tables.Short() })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
