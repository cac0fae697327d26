package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/storetest"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
)

const storeNamespace = "team"

// environment is an API server with what a store needs. It is slow to start, and few tests need it.
var environment = sync.OnceValues(func() (*storetest.Environment, error) {
	e, err := storetest.Start(context.Background())
	if err == nil {
		stopEnvironment = e.Stop
	}
	return e, err
})

var stopEnvironment = func() error { return nil }

func TestMain(m *testing.M) {
	code := m.Run()
	if err := stopEnvironment(); err != nil {
		fmt.Fprintln(os.Stderr, "stop the API server:", err)
	}
	os.Exit(code)
}

// storeWith runs a store that holds plans, and the small model's tokenizer.
func storeWith(t *testing.T, plans ...planned) *storetest.Store {
	t.Helper()
	e, err := environment()
	if err != nil {
		t.Fatal(err)
	}
	store := e.Run(t)
	text, err := os.ReadFile(filepath.Join(tinyCheckpoint, bundle.TokenizerFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plans {
		if err := bundle.Publish(t.Context(), store.Client(t), storeNamespace, p.artifact, bytes.NewReader(text)); err != nil {
			t.Fatal(err)
		}
	}
	return store
}

// keeper is a Plans that runs, with the pool that it serves.
type keeper struct {
	*Plans
	pool *Pool
	dir  string
	stop func()
}

// keep runs a Plans that retries quickly.
func keep(t *testing.T, dir string, client *artifact.Client, change ...func(*Plans)) *keeper {
	t.Helper()
	pool := NewPool()
	plans := NewPlans(dir, func(ctx context.Context, digest, dir string) error {
		return bundle.Fetch(ctx, client, storeNamespace, digest, dir)
	}, pool)
	plans.backoff = wait.Backoff{Duration: 5 * time.Millisecond, Factor: 1, Steps: 1}
	for _, c := range change {
		c(plans)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- plans.Run(ctx) }()
	k := &keeper{Plans: plans, pool: pool, dir: dir}
	k.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(k.stop)
	return k
}

func (k *keeper) set(backends []Backend) {
	k.pool.Set(backends)
	k.Want(backends)
}

// scores tells whether requests to pods with the plan are scored by it.
func (k *keeper) scores(p planned) bool {
	tried := map[string]bool{}
	for {
		lease, ok := k.pool.acquire(newRequest("/v1/completions", "id", []byte(`{"prompt":"func main() {"}`)), tried)
		if !ok {
			return false
		}
		lease.Release()
		if lease.Backend.PlanDigest == p.artifact.Digest {
			return lease.scored && lease.layout.digest == p.artifact.Digest
		}
		tried[lease.Backend.Address] = true
	}
}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		names = append(names, file.Name())
	}
	return names
}

// While the store is away pods with a plan are served by load; when it is back their plan is used, without a restart; a
// router that starts later needs no store at all.
func TestPlansWithoutTheStore(t *testing.T) {
	first, second := plans(t)
	store := storeWith(t, first, second)
	client := store.Client(t)
	store.Stop()
	dir := filepath.Join(t.TempDir(), "plans")
	var attempts atomic.Int32
	counted := func(p *Plans) {
		fetch := p.fetch
		p.fetch = func(ctx context.Context, digest, dir string) error {
			attempts.Add(1)
			return fetch(ctx, digest, dir)
		}
	}
	k := keep(t, dir, client, counted)
	backends := append(backendsOf(first.artifact.Digest, 1, 4, "first"), backendsOf(second.artifact.Digest, 1, 4, "second")...)
	k.set(backends)
	eventually(t, "several attempts", func() bool { return attempts.Load() >= 6 })
	if loaded, pending := k.pool.Plans(); loaded != 0 || pending != 2 || k.scores(first) {
		t.Fatalf("%d plans are loaded and %d pending while the store is away", loaded, pending)
	}
	store.Start(t)
	eventually(t, "both plans are used", func() bool { return k.scores(first) && k.scores(second) })
	if loaded, pending := k.pool.Plans(); loaded != 2 || pending != 0 {
		t.Errorf("%d plans are loaded and %d pending", loaded, pending)
	}
	k.stop()

	store.Stop()
	attempts.Store(0)
	k = keep(t, dir, client, counted)
	k.set(backends)
	eventually(t, "both plans are used again", func() bool { return k.scores(first) && k.scores(second) })
	if attempts.Load() != 2 {
		t.Errorf("%d attempts for two plans that lie on disk", attempts.Load())
	}
}

// What is damaged on disk is never used, and fetched anew; what a killed router has left is removed.
func TestDamagedPlans(t *testing.T) {
	p, _ := plans(t)
	store := storeWith(t, p)
	client := store.Client(t)
	for _, name := range []string{plan.ManifestFile, plan.TablesFile, plan.PlacementFile, bundle.TokenizerFile, bundle.File} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "plans")
			k := keep(t, dir, client)
			k.set(backendsOf(p.artifact.Digest, 1, 4, "p"))
			eventually(t, "the plan is used", func() bool { return k.scores(p) })
			k.stop()

			path := filepath.Join(dir, p.artifact.Digest, name)
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, append(whole[:len(whole)-2:len(whole)-2], 'x'), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(dir, p.artifact.Digest+".part"), 0o755); err != nil {
				t.Fatal(err)
			}
			k = keep(t, dir, client)
			k.set(backendsOf(p.artifact.Digest, 1, 4, "p"))
			eventually(t, "the plan is used again", func() bool { return k.scores(p) })
			if again, err := os.ReadFile(path); err != nil || !bytes.Equal(again, whole) {
				t.Errorf("%s was not fetched anew: %v", name, err)
			}
			if got := entries(t, dir); len(got) != 1 {
				t.Errorf("%v lie on disk, want the plan alone", got)
			}
		})
	}
}

// A plan that nobody names goes from memory and disk after a while, and comes back when it is named again. Names that are
// no digests never become paths.
func TestPlansComeAndGo(t *testing.T) {
	first, second := plans(t)
	client := storeWith(t, first, second).Client(t)
	parent := t.TempDir()
	dir := filepath.Join(parent, "plans")
	const grace = 50 * time.Millisecond
	k := keep(t, dir, client, func(p *Plans) { p.grace, p.sweep = grace, 5*time.Millisecond })
	old, young := backendsOf(first.artifact.Digest, 1, 4, "old"), backendsOf(second.artifact.Digest, 1, 4, "young")
	k.set(append(append(old, young...), backendsOf("../evil", 1, 4, "evil")...))
	eventually(t, "both plans are used", func() bool { return k.scores(first) && k.scores(second) })
	if loaded, pending := k.pool.Plans(); loaded != 2 || pending != 1 {
		t.Errorf("%d plans are loaded and %d pending, want 2 and the malformed one", loaded, pending)
	}
	k.set(young)
	eventually(t, "the old plan is gone from disk", func() bool { return len(entries(t, dir)) == 1 })
	eventually(t, "the old plan is gone from memory", func() bool {
		k.pool.mu.Lock()
		defer k.pool.mu.Unlock()
		return len(k.pool.plans) == 1
	})
	if !k.scores(second) {
		t.Error("the plan that is named was dropped")
	}
	k.set(old)
	eventually(t, "the old plan is used again", func() bool { return k.scores(first) })
	if got := entries(t, parent); len(got) != 1 {
		t.Errorf("%v lie beside the plans", got)
	}
}

// A router that is restarted leaves alone what it may need again, also while nobody names it.
func TestRestartKeepsPlans(t *testing.T) {
	p, _ := plans(t)
	store := storeWith(t, p)
	dir := filepath.Join(t.TempDir(), "plans")
	client := store.Client(t)
	k := keep(t, dir, client)
	k.set(backendsOf(p.artifact.Digest, 1, 4, "p"))
	eventually(t, "the plan is used", func() bool { return k.scores(p) })
	k.stop()
	store.Stop()

	k = keep(t, dir, client, func(p *Plans) { p.sweep = time.Millisecond })
	k.set(nil)
	k.set(backendsOf("", 1, 4, "unplanned"))
	k.set(backendsOf(p.artifact.Digest, 1, 4, "p"))
	eventually(t, "the plan is used again", func() bool { return k.scores(p) })
	if got := entries(t, dir); strings.Join(got, " ") != p.artifact.Digest {
		t.Errorf("%v lie on disk", got)
	}
}
