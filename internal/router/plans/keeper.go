// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router/discovery"
)

// Fetch downloads the plan of a digest to a directory and verifies it. If the directory contains the plan already,
// Fetch needs no network. Calls for one directory do not overlap.
type Fetch func(ctx context.Context, digest, dir string) error

const (
	// planGrace is the time for which a plan is kept after the last backend that named it is gone. A restarted replica
	// names its plan again, possibly while the store is down.
	planGrace = 10 * time.Minute
	// sweepPeriod is the time between two checks for expired plans.
	sweepPeriod = time.Minute
)

// Pool uses the plans.
type Pool interface {
	// AddLayout adds a plan, DropLayout removes one.
	AddLayout(l *Layout)
	DropLayout(digest string)
	// UseTables scores requests to backends of plan with the tables of another plan, or of plan itself. It returns
	// ErrNotLoaded if one of them was not added, and an error if the tables do not fit.
	UseTables(plan, tables string) error
}

// ErrNotLoaded is returned if a plan is not in the pool.
var ErrNotLoaded = errors.New("not loaded yet")

// Keeper keeps the plans that backends name on disk and in the pool, and the plans that provide replacement tables. It
// is safe for concurrent use.
type Keeper struct {
	// Local returns the directory that contains the plan of a digest without a download, or an empty string. Nil means
	// that there is none.
	Local func(digest string) string

	dir   string
	fetch Fetch
	pool  Pool
	// backoff is the backoff of the attempts for one plan. grace and sweep are planGrace and sweepPeriod.
	backoff      wait.Backoff
	grace, sweep time.Duration

	mu sync.Mutex
	// named contains the digests that backends name.
	named map[string]bool
	// tables maps the digest of a plan to the plan that provides its tables; tablesSet is true once SetTables was
	// called. using contains the replacement tables that were used last, which stay in use until the desired tables are
	// usable. refused contains the tables that do not fit a plan.
	tables, using, refused map[string]string
	tablesSet              bool
	// wanted contains the digests to keep, with the time at which they became unneeded; the zero time if they are
	// needed.
	wanted map[string]time.Time
	wake   chan struct{}
}

// tablesName is the file next to the directory of the plans that stores Keeper.using. It is absent if using is empty.
const tablesName = "tables.json"

// NewKeeper returns a keeper of plans in a directory, which it must use exclusively. Without a directory, it only uses
// the plans of Local, and fetch is not called.
func NewKeeper(dir string, fetch Fetch, pool Pool) *Keeper {
	return &Keeper{
		dir: dir, fetch: fetch, pool: pool,
		// At most one minute between attempts: a missing plan reduces locality but causes no failed request.
		backoff: wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 7, Cap: time.Minute},
		grace:   planGrace, sweep: sweepPeriod,
		named: map[string]bool{}, refused: map[string]string{}, wanted: map[string]time.Time{}, wake: make(chan struct{}, 1),
	}
}

// Want sets the backends that need plans.
func (k *Keeper) Want(backends []discovery.Backend) {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.named)
	for _, b := range backends {
		// A digest becomes a directory name. A pod with an invalid digest is served without a plan.
		if _, err := artifact.ParseDigest(b.PlanDigest); err == nil {
			k.named[b.PlanDigest] = true
		}
	}
	k.updateWanted()
}

// SetTables sets, by plan digest, the plans that provide replacement tables, which are used once they are loaded and
// fit.
func (k *Keeper) SetTables(tables map[string]string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tables, k.tablesSet = tables, true
	clear(k.refused)
	k.updateWanted()
}

// updateWanted updates the set of needed plans and wakes Run. The lock must be held.
func (k *Keeper) updateWanted() {
	needed := map[string]bool{}
	for digest := range k.named {
		needed[digest] = true
		for _, from := range []string{k.tables[digest], k.using[digest]} {
			if from != "" {
				needed[from] = true
			}
		}
	}
	now := time.Now()
	for digest, last := range k.wanted {
		if last.IsZero() && !needed[digest] {
			k.wanted[digest] = now
		}
	}
	for digest := range needed {
		k.wanted[digest] = time.Time{}
	}
	k.signal()
}

// signal wakes Run.
func (k *Keeper) signal() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// need is a plan to load. tablesOnly is true if no backend names it.
type need struct {
	digest     string
	tablesOnly bool
}

// due returns the needed plans and the digests with an expired grace period. It forgets the expired digests.
func (k *Keeper) due() (needs []need, expired []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for digest, last := range k.wanted {
		switch {
		case last.IsZero():
			needs = append(needs, need{digest, !k.named[digest]})
		case time.Since(last) >= k.grace:
			expired = append(expired, digest)
			delete(k.wanted, digest)
		}
	}
	return needs, expired
}

// loading is a goroutine that loads one plan.
type loading struct {
	need
	cancel context.CancelFunc
	done   chan struct{}
}

// end stops the goroutine and waits for its end.
func (l *loading) end() {
	l.cancel()
	<-l.done
}

// Run loads needed plans and drops unneeded ones until the context ends.
func (k *Keeper) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	k.adopt(log)
	works := map[string]loading{}
	defer func() {
		for _, work := range works {
			work.end()
		}
	}()
	tick := time.NewTicker(k.sweep)
	defer tick.Stop()
	for {
		needs, expired := k.due()
		for _, digest := range expired {
			if work, running := works[digest]; running {
				work.end()
				delete(works, digest)
			}
			k.drop(digest, log)
		}
		for _, n := range needs {
			if work, running := works[n.digest]; running {
				if n.tablesOnly || !work.tablesOnly {
					continue
				}
				work.end() // backends now name a plan that was loaded for its tables only
			}
			loadCtx, cancel := context.WithCancel(ctx)
			work := loading{n, cancel, make(chan struct{})}
			works[n.digest] = work
			go func() {
				defer close(work.done)
				k.load(loadCtx, n, log)
			}()
		}
		k.apply(log)
		select {
		case <-ctx.Done():
			return nil
		case <-k.wake:
		case <-tick.C:
		}
	}
}

// adopt takes over the files of an earlier process. It keeps complete plans as if they had just been named, and removes
// everything else, such as incomplete downloads.
func (k *Keeper) adopt(log logr.Logger) {
	if k.dir == "" {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.using = map[string]string{}
		return
	}
	entries, err := os.ReadDir(k.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Error(err, "Failed to list the plans on disk; old plans are not removed")
	}
	using, err := bundle.ReadTables(k.usingPath())
	if err != nil {
		log.Error(err, "Failed to read which tables were used; starting with each plan's own tables")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.using = using; k.using == nil {
		k.using = map[string]string{}
	}
	if !k.tablesSet {
		k.tables = maps.Clone(k.using)
	}
	defer k.updateWanted()
	for _, entry := range entries {
		if _, err := artifact.ParseDigest(entry.Name()); err != nil {
			if err := os.RemoveAll(filepath.Join(k.dir, entry.Name())); err != nil {
				log.Error(err, "Failed to remove an old file")
			}
			continue
		}
		if _, known := k.wanted[entry.Name()]; !known {
			k.wanted[entry.Name()] = time.Now()
		}
	}
}

// load retries until the pool has the plan or the context ends.
func (k *Keeper) load(ctx context.Context, n need, log logr.Logger) {
	log = log.WithValues("plan", artifact.Digest(n.digest).Short())
	without := "Balancing by load until the plan can be loaded"
	if n.tablesOnly {
		without = "Using older tables until the plan can be loaded"
	}
	backoff := k.backoff
	for {
		err := k.try(ctx, n, log)
		if err == nil || ctx.Err() != nil {
			return
		}
		pause := backoff.Step()
		log.Info(without, "reason", err.Error(), "retryAfter", pause.String())
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

func (k *Keeper) try(ctx context.Context, n need, log logr.Logger) error {
	dir, err := k.find(ctx, n.digest)
	if err != nil {
		return err
	}
	layout, unusable, err := readLayout(dir, n.digest, n.tablesOnly)
	if err != nil {
		return err
	}
	if unusable != nil {
		log.Info("Tokenizer of the plan is unusable; requesting token ids of shorter texts from engines", "reason", unusable.Error())
	}
	k.pool.AddLayout(layout)
	k.signal()
	log.Info("Loaded a plan", "ranks", layout.Ranks, "tablesOnly", n.tablesOnly)
	return nil
}

// find returns the directory with a plan, which it fetches if necessary.
func (k *Keeper) find(ctx context.Context, digest string) (string, error) {
	if k.Local != nil {
		if dir := k.Local(digest); dir != "" {
			return dir, nil
		}
	}
	if k.dir == "" {
		return "", errors.New("no directory contains the plan")
	}
	dir := filepath.Join(k.dir, digest)
	return dir, k.fetch(ctx, digest, dir)
}

// apply switches the named plans to their desired tables if these are loaded and fit. Until then, plans keep the tables
// that they used last.
func (k *Keeper) apply(log logr.Logger) {
	k.mu.Lock()
	defer k.mu.Unlock()
	changed := false
	for plan := range k.named {
		from, last := cmp.Or(k.tables[plan], plan), cmp.Or(k.using[plan], plan)
		err := k.pool.UseTables(plan, from)
		switch {
		case err == nil && from != last:
			log.Info("Switched tables of a plan", "plan", artifact.Digest(plan).Short(), "tables", artifact.Digest(from).Short())
			if changed = true; from == plan {
				delete(k.using, plan)
			} else {
				k.using[plan] = from
			}
		case err != nil:
			if err := k.pool.UseTables(plan, last); err != nil && !errors.Is(err, ErrNotLoaded) {
				log.Error(err, "Failed to restore the last tables; using the plan's own tables", "plan", artifact.Digest(plan).Short())
			}
			if !errors.Is(err, ErrNotLoaded) && k.refused[plan] != from {
				k.refused[plan] = from
				log.Error(err, "Failed to switch tables; keeping the tables in use", "plan", artifact.Digest(plan).Short())
			}
		}
	}
	if changed {
		k.updateWanted()
		if err := k.saveUsing(); err != nil {
			log.Error(err, "Failed to save which tables are in use")
		}
	}
}

// forget forgets the tables that a plan used last.
func (k *Keeper) forget(plan string, log logr.Logger) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, used := k.using[plan]; !used {
		return
	}
	delete(k.using, plan)
	if err := k.saveUsing(); err != nil {
		log.Error(err, "Failed to save which tables are in use")
	}
}

func (k *Keeper) usingPath() string { return filepath.Join(filepath.Dir(k.dir), tablesName) }

// saveUsing stores using for the next process.
func (k *Keeper) saveUsing() error {
	if len(k.using) == 0 {
		return os.RemoveAll(k.usingPath())
	}
	data, err := json.Marshal(k.using)
	if err != nil {
		return err
	}
	return atomicfile.WriteBytes(k.usingPath(), 0o600, data)
}

func (k *Keeper) drop(digest string, log logr.Logger) {
	k.pool.DropLayout(digest)
	k.forget(digest, log)
	if k.dir == "" {
		log.Info("Dropped a plan that no backend names", "plan", artifact.Digest(digest).Short())
		return
	}
	if err := os.RemoveAll(filepath.Join(k.dir, digest)); err != nil {
		log.Error(err, "Failed to remove a plan that no pod names", "plan", artifact.Digest(digest).Short())
		return
	}
	log.Info("Dropped a plan that no pod names", "plan", artifact.Digest(digest).Short())
}
