// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/artifact/storetest"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/test/poll"
	"github.com/semmoe/operator/test/tier"
)

const storeNamespace = "team"

// environment is an API server with the objects of a store. It starts slowly, and few tests need it.
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

// storeWith runs a store with plans and the tokenizer of the small model.
func storeWith(t *testing.T, plans ...planstest.Planned) *storetest.Store {
	t.Helper()
	e, err := environment()
	tier.Require(t, err)
	store := e.Run(t)
	text, err := os.ReadFile(filepath.Join(planstest.Checkpoint, bundle.TokenizerFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plans {
		if err := bundle.Publish(t.Context(), store.Client(t), storeNamespace, p.Artifact, bytes.NewReader(text)); err != nil {
			t.Fatal(err)
		}
	}
	return store
}

// usedPlans is the plan part of a pool: the added plans and the tables that each uses.
type usedPlans struct {
	mu        sync.Mutex
	own, used map[string]*Layout
}

func (p *usedPlans) AddLayout(l *Layout) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.own[l.Digest], p.used[l.Digest] = l, l
}

func (p *usedPlans) DropLayout(digest string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.own, digest)
	delete(p.used, digest)
}

func (p *usedPlans) UseTables(plan, tables string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.own[plan] == nil || p.own[tables] == nil {
		return ErrNotLoaded
	}
	layout, err := p.own[plan].WithTables(p.own[tables])
	if err == nil {
		p.used[plan] = layout
	}
	return err
}

// of returns the plan of a digest with its current tables, nil if there is none, and the number of plans.
func (p *usedPlans) of(digest string) (*Layout, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used[digest], len(p.own)
}

// running is a running Keeper with its pool.
type running struct {
	*Keeper
	used *usedPlans
	stop func()
}

// keep runs a Keeper that retries quickly.
func keep(t *testing.T, dir string, client *access.Client, change ...func(*Keeper)) *running {
	t.Helper()
	used := &usedPlans{own: map[string]*Layout{}, used: map[string]*Layout{}}
	keeper := NewKeeper(dir, func(ctx context.Context, digest, dir string) error {
		return bundle.Fetch(ctx, client, storeNamespace, digest, dir)
	}, used)
	keeper.backoff = wait.Backoff{Duration: 5 * time.Millisecond, Factor: 1, Steps: 1}
	for _, c := range change {
		c(keeper)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- keeper.Run(ctx) }()
	k := &running{Keeper: keeper, used: used}
	k.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(k.stop)
	return k
}

// serving returns pods that serve under these plans.
func serving(digests ...string) (backends []discovery.Backend) {
	for _, digest := range digests {
		backends = append(backends, discovery.Backend{Pod: "p", Address: "p:1", Ranks: 4, PlanDigest: digest})
	}
	return backends
}

// scores reports whether texts to pods with the plan are scored.
func (k *running) scores(p planstest.Planned) bool { return k.best(p) != noRank }

const noRank = -1

// best returns the rank with most of a text's experts, by the tables in use for a plan.
func (k *running) best(p planstest.Planned) int {
	layout, _ := k.used.of(p.Artifact.Digest)
	if layout == nil {
		return noRank
	}
	scores, _, _, _ := layout.Score(&wire.Prompt{Texts: []string{"func main() {"}}, nil)
	if scores == nil {
		return noRank
	}
	return slices.Index(scores, slices.Max(scores))
}

// loaded returns the number of plans in the pool.
func (k *running) loaded() int {
	_, n := k.used.of("")
	return n
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

// TestPlansWithoutTheStore checks that pods are balanced by load while the store is unreachable, and that their plan is
// used without a restart when it is reachable again. A router that starts later needs no store.
func TestPlansWithoutTheStore(t *testing.T) {
	first, second := planstest.Solved(t)
	store := storeWith(t, first, second)
	client := store.Client(t)
	store.Stop()
	dir := filepath.Join(t.TempDir(), "plans")
	var attempts atomic.Int32
	counted := func(k *Keeper) {
		fetch := k.fetch
		k.fetch = func(ctx context.Context, digest, dir string) error {
			attempts.Add(1)
			return fetch(ctx, digest, dir)
		}
	}
	k := keep(t, dir, client, counted)
	backends := serving(first.Artifact.Digest, second.Artifact.Digest)
	k.Want(backends)
	poll.Until(t, "several attempts", func() bool { return attempts.Load() >= 6 })
	if n := k.loaded(); n != 0 {
		t.Fatalf("%d plans are loaded while the store is away", n)
	}
	store.Start(t)
	poll.Until(t, "both plans are used", func() bool { return k.scores(first) && k.scores(second) })
	if n := k.loaded(); n != 2 {
		t.Errorf("%d plans are loaded", n)
	}
	k.stop()

	store.Stop()
	attempts.Store(0)
	k = keep(t, dir, client, counted)
	k.Want(backends)
	poll.Until(t, "both plans are used again", func() bool { return k.scores(first) && k.scores(second) })
	if attempts.Load() != 2 {
		t.Errorf("%d attempts for two plans that lie on disk", attempts.Load())
	}
}

// TestDamagedPlans checks that damaged files are never used but fetched again, and that leftovers of a killed router
// are removed.
func TestDamagedPlans(t *testing.T) {
	p, _ := planstest.Solved(t)
	store := storeWith(t, p)
	client := store.Client(t)
	for _, name := range []string{plan.ManifestFile, plan.TablesFile, plan.PlacementFile, bundle.TokenizerFile, bundle.File} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "plans")
			k := keep(t, dir, client)
			k.Want(serving(p.Artifact.Digest))
			poll.Until(t, "the plan is used", func() bool { return k.scores(p) })
			k.stop()

			path := filepath.Join(dir, p.Artifact.Digest, name)
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, append(whole[:len(whole)-2:len(whole)-2], 'x'), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(dir, p.Artifact.Digest+".part"), 0o755); err != nil {
				t.Fatal(err)
			}
			k = keep(t, dir, client)
			k.Want(serving(p.Artifact.Digest))
			poll.Until(t, "the plan is used again", func() bool { return k.scores(p) })
			if again, err := os.ReadFile(path); err != nil || !bytes.Equal(again, whole) {
				t.Errorf("%s was not fetched anew: %v", name, err)
			}
			if got := entries(t, dir); len(got) != 1 {
				t.Errorf("files on disk = %v, want only the plan", got)
			}
		})
	}
}

// TestPlansComeAndGo checks that a plan that no pod names is removed from memory and disk after a while, and loaded
// again when it is named again. Invalid digests never become paths.
func TestPlansComeAndGo(t *testing.T) {
	first, second := planstest.Solved(t)
	client := storeWith(t, first, second).Client(t)
	parent := t.TempDir()
	dir := filepath.Join(parent, "plans")
	const grace = 50 * time.Millisecond
	k := keep(t, dir, client, func(k *Keeper) { k.grace, k.sweep = grace, 5*time.Millisecond })
	old, young := serving(first.Artifact.Digest), serving(second.Artifact.Digest)
	k.Want(serving(first.Artifact.Digest, second.Artifact.Digest, "../evil"))
	poll.Until(t, "both plans are used", func() bool { return k.scores(first) && k.scores(second) })
	if n := k.loaded(); n != 2 {
		t.Errorf("%d plans are loaded, want 2 and not the malformed one", n)
	}
	k.Want(young)
	poll.Until(t, "the old plan is gone from disk", func() bool { return len(entries(t, dir)) == 1 })
	poll.Until(t, "the old plan is gone from memory", func() bool { return k.loaded() == 1 })
	if !k.scores(second) {
		t.Error("the plan that is named was dropped")
	}
	k.Want(old)
	poll.Until(t, "the old plan is used again", func() bool { return k.scores(first) })
	if got := entries(t, parent); len(got) != 1 {
		t.Errorf("files next to the plans = %v", got)
	}
}

// TestRestartKeepsPlans checks that a restarted router keeps plans that it may need again, also while no pod names
// them.
func TestRestartKeepsPlans(t *testing.T) {
	p, _ := planstest.Solved(t)
	store := storeWith(t, p)
	dir := filepath.Join(t.TempDir(), "plans")
	client := store.Client(t)
	k := keep(t, dir, client)
	k.Want(serving(p.Artifact.Digest))
	poll.Until(t, "the plan is used", func() bool { return k.scores(p) })
	k.stop()
	store.Stop()

	k = keep(t, dir, client, func(k *Keeper) { k.sweep = time.Millisecond })
	k.Want(nil)
	k.Want(serving(""))
	k.Want(serving(p.Artifact.Digest))
	poll.Until(t, "the plan is used again", func() bool { return k.scores(p) })
	if got := entries(t, dir); strings.Join(got, " ") != p.Artifact.Digest {
		t.Errorf("%v lie on disk", got)
	}
}

// uses reports whether texts to pods with a plan are scored with the tables of another plan.
func (k *running) uses(p, tables planstest.Planned) bool {
	layout, _ := k.used.of(p.Artifact.Digest)
	return layout != nil && layout.Tables == tables.Artifact.Digest
}

func (k *running) use(p planstest.Planned, tables string) {
	k.SetTables(map[string]string{p.Artifact.Digest: tables})
}

// TestSwapsTables checks that tables are replaced and restored while pods stay. Tables for another layout, or that
// cannot be fetched, change nothing. A router that restarts without a store continues with its last tables.
func TestSwapsTables(t *testing.T) {
	p, other := planstest.Solved(t)
	first, second := p.Favouring(t, 1), p.Favouring(t, 2)
	absent := p.Favouring(t, 3)
	store := storeWith(t, p, other, first, second)
	dir := filepath.Join(t.TempDir(), "plans")
	k := keep(t, dir, store.Client(t), func(k *Keeper) { k.grace, k.sweep = 20*time.Millisecond, time.Millisecond })
	k.Want(serving(p.Artifact.Digest))
	poll.Until(t, "the plan is used", func() bool { return k.scores(p) && k.uses(p, p) })
	own := k.best(p)
	k.use(p, first.Artifact.Digest)
	poll.Until(t, "new tables are used", func() bool { return k.uses(p, first) })
	if got := k.best(p); got != 1 {
		t.Errorf("the best rank is %d, the tables say 1", got)
	}
	k.use(p, second.Artifact.Digest)
	poll.Until(t, "other tables are used", func() bool { return k.uses(p, second) && k.best(p) == 2 })
	poll.Until(t, "the first ones are gone", func() bool { return len(entries(t, dir)) == 2 })

	k.use(p, other.Artifact.Digest)
	poll.Until(t, "a plan of another layout is loaded", func() bool { return len(entries(t, dir)) == 3 })
	poll.Until(t, "it is refused", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.refused[p.Artifact.Digest] == other.Artifact.Digest
	})
	if !k.uses(p, second) {
		t.Error("tables for another layout are used")
	}
	k.use(p, absent.Artifact.Digest)
	poll.Until(t, "what was refused is gone", func() bool { return slices.Equal(entries(t, dir), sorted(p, second)) })
	if !k.uses(p, second) {
		t.Error("tables that cannot be fetched are used")
	}
	k.stop()
	store.Stop()

	k = keep(t, dir, store.Client(t))
	k.use(p, absent.Artifact.Digest)
	k.Want(serving(p.Artifact.Digest))
	poll.Until(t, "the tables of before are used again", func() bool { return k.uses(p, second) })
	k.stop()
	// An unreadable file changes nothing either.
	k = keep(t, dir, store.Client(t))
	k.Want(serving(p.Artifact.Digest))
	poll.Until(t, "the tables of before are used again", func() bool { return k.uses(p, second) })

	k.SetTables(nil)
	poll.Until(t, "the plan's own tables are used", func() bool { return k.uses(p, p) && k.best(p) == own })
	k.stop()
	if got := entries(t, filepath.Dir(dir)); len(got) != 1 {
		t.Errorf("%v is kept next to the plans", got)
	}
}

func sorted(plans ...planstest.Planned) (digests []string) {
	for _, p := range plans {
		digests = append(digests, p.Artifact.Digest)
	}
	slices.Sort(digests)
	return digests
}

// TestTablesBecomeALayout checks that a plan that pods name after its tables were used is loaded completely.
func TestTablesBecomeALayout(t *testing.T) {
	p, _ := planstest.Solved(t)
	tables := p.Favouring(t, 1)
	k := keep(t, filepath.Join(t.TempDir(), "plans"), storeWith(t, p, tables).Client(t))
	k.use(p, tables.Artifact.Digest)
	k.Want(serving(p.Artifact.Digest))
	poll.Until(t, "new tables are used", func() bool { return k.uses(p, tables) })
	if own, _ := k.used.of(tables.Artifact.Digest); own.Tokenizer != nil {
		t.Error("a tokenizer is kept twice")
	}
	k.Want(serving(p.Artifact.Digest, tables.Artifact.Digest))
	poll.Until(t, "both plans score texts", func() bool {
		return k.scores(tables) && k.uses(tables, tables) && k.scores(p) && k.uses(p, tables)
	})
}
