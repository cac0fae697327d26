package router

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/affinity"
)

// favouring is a plan of new tables for the layout of another one: every request belongs on one rank.
func favouring(t *testing.T, p planned, rank int) planned {
	t.Helper()
	changed := *p.plan
	changed.Ranks = &affinity.RankTable{Ranks: p.plan.Ranks.Ranks, Score: make([]uint16, len(p.plan.Ranks.Score))}
	for at := rank; at < len(changed.Ranks.Score); at += changed.Ranks.Ranks {
		changed.Ranks.Score[at] = affinity.ScoreScale / 2
	}
	if err := plan.OnLayoutOf(&changed, p.artifact); err != nil {
		t.Fatal(err)
	}
	encoded, err := plan.Encode(&changed)
	if err != nil {
		t.Fatal(err)
	}
	return planned{&changed, encoded, newLayout(encoded.Digest, &changed, p.layout.tokenizer)}
}

func TestReadTables(t *testing.T) {
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		text string
		want map[string]string
		says string // empty where it is in order
	}{
		"none":            {"{}", map[string]string{}, ""},
		"one":             {`{"` + a + `":"` + b + `"}`, map[string]string{a: b}, ""},
		"no JSON":         {`{`, nil, "tables.json: unexpected end"},
		"no object":       {`["` + a + `"]`, nil, "tables.json: json: cannot unmarshal array"},
		"no digest":       {`{"` + a + `":"../` + b[3:] + `"}`, nil, "tables.json: tables of plan " + a + `: digest "../`},
		"a short digest":  {`{"` + a[:16] + `":"` + b + `"}`, nil, `tables.json: plan: digest "` + a[:16]},
		"another version": {`{"` + a + `":{"tables":"` + b + `"}}`, nil, "cannot unmarshal object"},
	} {
		path := filepath.Join(dir, "tables.json")
		if err := os.WriteFile(path, []byte(tc.text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := readTables(path)
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if tc.says == "" && err != nil || tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)) {
			t.Errorf("%s: error %v, want one that says %q", name, err, tc.says)
		}
	}
	if got, err := readTables(filepath.Join(dir, "absent")); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
}

// What the file says is passed on once, also that it is gone; while it cannot be read, what it said last holds.
func TestWatchTables(t *testing.T) {
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	path := filepath.Join(t.TempDir(), "tables.json")
	write := func(text string) {
		fresh := path + ".new"
		if err := os.WriteFile(fresh, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(fresh, path); err != nil {
			t.Fatal(err)
		}
	}
	set := make(chan map[string]string, 100)
	ctx, stop := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	write("{")
	ended.Go(func() { watchTables(ctx, path, time.Millisecond, func(tables map[string]string) { set <- tables }) })
	next := func(what string, want map[string]string) {
		t.Helper()
		select {
		case got := <-set:
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: nothing is said", what)
		}
	}
	one, other := map[string]string{a: b}, map[string]string{b: a}
	write(`{"` + a + `":"` + b + `"}`)
	next("one", one)
	write(` {"` + a + `": "` + b + `"}`) // the same
	write("damaged")
	write(`{"` + b + `":"` + a + `"}`)
	next("another", other)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	next("none", nil)
	stop()
	ended.Wait()
	if len(set) > 0 {
		t.Errorf("besides %v is said", <-set)
	}
}

// uses tells whether requests to pods with a plan are scored by another's tables.
func (k *keeper) uses(p, tables planned) bool {
	return k.pool.Tables()[p.artifact.Digest] == tables.artifact.Digest
}

func (k *keeper) use(p planned, tables string) {
	k.SetTables(map[string]string{p.artifact.Digest: tables})
}

// Tables are swapped in and out while pods stay as they are. Tables for another layout, or that cannot be fetched, change
// nothing, and a router that is restarted without a store goes on with those that it had.
func TestSwapsTables(t *testing.T) {
	p, other := plans(t)
	first, second := favouring(t, p, 1), favouring(t, p, 2)
	absent := favouring(t, p, 3)
	store := storeWith(t, p, other, first, second)
	dir := filepath.Join(t.TempDir(), "plans")
	k := keep(t, dir, store.Client(t), func(plans *Plans) { plans.grace, plans.sweep = 20*time.Millisecond, time.Millisecond })
	k.set(backendsOf(p.artifact.Digest, 2, 4, "p"))
	best := func() int {
		t.Helper()
		r := newRequest("/v1/completions", "id", []byte(`{"prompt":"func main() {"}`))
		lease, ok := k.pool.acquire(r, nil)
		if !ok || !lease.scored || lease.Backend.PlanDigest != p.artifact.Digest || lease.layout.digest != p.artifact.Digest {
			t.Fatalf("lease %+v", lease)
		}
		defer lease.Release()
		told := r.forecast.on(lease.Rank)
		if told.Tables != k.pool.Tables()[p.artifact.Digest] {
			t.Errorf("scored by the tables of %s, in use are %v", told.Tables, k.pool.Tables())
		}
		return told.Best
	}
	eventually(t, "the plan is used", func() bool { return k.scores(p) && k.uses(p, p) })
	own := best()
	k.use(p, first.artifact.Digest)
	eventually(t, "new tables are used", func() bool { return k.uses(p, first) })
	if got := best(); got != 1 {
		t.Errorf("the best rank is %d, the tables say 1", got)
	}
	k.use(p, second.artifact.Digest)
	eventually(t, "other tables are used", func() bool { return k.uses(p, second) && best() == 2 })
	eventually(t, "the first ones are gone", func() bool { return len(entries(t, dir)) == 2 })

	k.use(p, other.artifact.Digest)
	eventually(t, "a plan of another layout is loaded", func() bool { return len(entries(t, dir)) == 3 })
	eventually(t, "it is refused", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.refused[p.artifact.Digest] == other.artifact.Digest
	})
	if !k.uses(p, second) {
		t.Error("tables for another layout are used")
	}
	k.use(p, absent.artifact.Digest)
	eventually(t, "what was refused is gone", func() bool { return slices.Equal(entries(t, dir), sorted(p, second)) })
	if !k.uses(p, second) {
		t.Error("tables that cannot be fetched are used")
	}
	k.stop()
	store.Stop()

	k = keep(t, dir, store.Client(t))
	k.use(p, absent.artifact.Digest)
	k.set(backendsOf(p.artifact.Digest, 2, 4, "p"))
	eventually(t, "the tables of before are used again", func() bool { return k.uses(p, second) })
	k.stop()
	// A file that cannot be read changes as little.
	k = keep(t, dir, store.Client(t))
	k.set(backendsOf(p.artifact.Digest, 2, 4, "p"))
	eventually(t, "the tables of before are used again", func() bool { return k.uses(p, second) })

	k.SetTables(nil)
	eventually(t, "the plan's own tables are used", func() bool { return k.uses(p, p) && best() == own })
	k.stop()
	if got := entries(t, filepath.Dir(dir)); len(got) != 1 {
		t.Errorf("%v is kept beside the plans", got)
	}
}

func sorted(plans ...planned) (digests []string) {
	for _, p := range plans {
		digests = append(digests, p.artifact.Digest)
	}
	slices.Sort(digests)
	return digests
}

// Plans that pods come to name after their tables were used are loaded whole.
func TestTablesBecomeALayout(t *testing.T) {
	p, _ := plans(t)
	tables := favouring(t, p, 1)
	k := keep(t, filepath.Join(t.TempDir(), "plans"), storeWith(t, p, tables).Client(t))
	old := backendsOf(p.artifact.Digest, 1, 4, "old")
	k.use(p, tables.artifact.Digest)
	k.set(old)
	eventually(t, "new tables are used", func() bool { return k.uses(p, tables) })
	k.pool.mu.Lock()
	if k.pool.plans[tables.artifact.Digest].own.tokenizer != nil {
		t.Error("a tokenizer is kept twice")
	}
	k.pool.mu.Unlock()
	k.set(append(old, backendsOf(tables.artifact.Digest, 1, 4, "new")...))
	eventually(t, "both plans score texts", func() bool {
		return k.scores(tables) && k.uses(tables, tables) && k.scores(p) && k.uses(p, tables)
	})
}

// While tables are swapped no request is lost, and each is scored by one plan's tables, those that its sample names.
func TestSwapsTablesUnderLoad(t *testing.T) {
	p, _ := plans(t)
	tables := favouring(t, p, 1)
	adapter := adapterOf(t, "SGLang")
	address := startReferenceEngine(t, string(p.artifact.Files["engine/sglang.json"]))
	pool := newPool(Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", PlanDigest: p.artifact.Digest, Shape: &tinyShape})
	pool.AddLayout(p.layout)
	pool.AddLayout(tables.layout)
	url, observations := proxyServer(t, pool, ProxyOptions{
		RankHeader: adapter.RankHeader, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
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
				if named := response.Header.Get(HeaderPlan); response.StatusCode != http.StatusOK || named != p.short() && named != tables.short() {
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
		if err := pool.UseTables(p.artifact.Digest, []planned{tables, p}[swaps%2].artifact.Digest); err != nil {
			t.Fatal(err)
		}
		eventually(t, "requests go on", func() bool { return sent.Load() > before+3 || sent.Load() >= requests })
	}
	clients.Wait()
	by := map[string]int{}
	eventually(t, "all requests are observed", func() bool { return len(observations.recent()) == requests })
	for _, o := range observations.recent() {
		if o.Plan != p.artifact.Digest || o.Forecast == nil {
			t.Fatalf("%+v", o)
		}
		by[o.Forecast.Tables]++
		if swapped := o.Forecast.Highest == share(float64(affinity.ScoreScale/2)/affinity.ScoreScale) && o.Forecast.Best == 1; swapped != (o.Forecast.Tables == tables.artifact.Digest) {
			t.Errorf("forecast %+v is not by these tables", o.Forecast)
		}
	}
	if by[p.artifact.Digest] < requests/8 || by[tables.artifact.Digest] < requests/8 || len(by) != 2 {
		t.Errorf("requests by tables: %v in %d swaps", by, swaps)
	}
	if total := servedBy(t, observations)["r"]; total.Requests != requests || total.Failures != 0 {
		t.Errorf("%+v", total)
	}
	if got := reported(t, observations).Tables; len(got) != 1 || got[p.artifact.Digest] == "" {
		t.Errorf("tables in use: %v", got)
	}
}

// Whoever sends a request on after tables were swapped has it counted by those that have scored it.
func TestSwapBeforeAMove(t *testing.T) {
	p, _ := plans(t)
	tables := favouring(t, p, 1)
	pool := newPool(backendsOf(p.artifact.Digest, 2, 4, "p")...)
	pool.AddLayout(p.layout)
	pool.AddLayout(tables.layout)
	r := completion("r", "func main() {")
	lease, _ := pool.acquire(r, nil)
	if err := pool.UseTables(p.artifact.Digest, tables.artifact.Digest); err != nil {
		t.Fatal(err)
	}
	lease.move(pool.fallbacks(lease, r, 1)[0])
	if told := r.forecast.on(lease.Rank); !lease.scored || told.Tables != p.artifact.Digest {
		t.Errorf("scored %v, forecast %+v", lease.scored, told)
	}
	lease.Release()
}

func TestTablesMetric(t *testing.T) {
	p, _ := plans(t)
	tables := favouring(t, p, 1)
	pool := newPool(append(backendsOf(p.artifact.Digest, 2, 4, "p"), backendsOf("", 1, 4, "unplanned")...)...)
	registry := prometheus.NewRegistry()
	newMetrics(registry, pool)
	want := func(from string) string {
		return "# HELP semmoe_router_tables_info 1 for each plan that engine pods name and that is loaded, with the plan whose tables score its requests: its own, or one with newer tables for the same layout.\n" +
			"# TYPE semmoe_router_tables_info gauge\nsemmoe_router_tables_info{plan=\"" + p.short() + "\",tables=\"" + from + "\"} 1\n"
	}
	if err := testutil.GatherAndCompare(registry, strings.NewReader(""), "semmoe_router_tables_info"); err != nil {
		t.Error(err)
	}
	pool.AddLayout(p.layout)
	pool.AddLayout(tables.layout)
	for _, from := range []planned{p, tables} {
		if err := pool.UseTables(p.artifact.Digest, from.artifact.Digest); err != nil {
			t.Fatal(err)
		}
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want(from.short())), "semmoe_router_tables_info"); err != nil {
			t.Error(err)
		}
	}
}

// A router that starts while API server and artifact store are away scores by the tables that its file names.
func TestStartsWithSwappedTables(t *testing.T) {
	p, _ := plans(t)
	tables := favouring(t, p, 1)
	engine := newEngine(t, "a", 4, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") })
	engine.PlanDigest = p.artifact.Digest
	dir := t.TempDir()
	if err := SaveSnapshot(dir, []Backend{engine}); err != nil {
		t.Fatal(err)
	}
	for _, kept := range []planned{p, tables} {
		if err := plan.Write(filepath.Join(dir, plansName, kept.artifact.Digest), kept.artifact, []byte("{}")); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(map[string]string{p.artifact.Digest: tables.artifact.Digest})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "tables.json")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	clients, err := kubernetes.NewForConfig(&rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", freePort(t))})
	if err != nil {
		t.Fatal(err)
	}
	options := Options{
		ProxyOptions: ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20, EndpointWait: time.Second},
		Pool:         DefaultPoolOptions(), Namespace: "ns", Selector: "a=b", SnapshotDir: dir, TablesFile: file,
		FetchPlan: func(_ context.Context, _, dir string) error { _, _, err := plan.Read(dir); return err },
		Host:      "127.0.0.1", Port: freePort(t), MetricsPort: freePort(t), DrainTimeout: time.Minute,
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
	eventually(t, "requests are scored by the other tables", func() bool { return named() == tables.short() })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
