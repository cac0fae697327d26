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
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/wholefile"
)

// Fetch makes a directory hold the plan of a digest, whole and verified, or fails. Where it holds it already, nobody
// else is needed. Only one call at a time is made for a directory.
type Fetch func(ctx context.Context, digest, dir string) error

const (
	// planGrace is how long a plan stays that no backend names any more: a replica that restarts names it again, perhaps
	// while the store is away.
	planGrace = 10 * time.Minute
	// sweepPeriod is how often such plans are looked for.
	sweepPeriod = time.Minute
)

// Pool is where the plans are used.
type Pool interface {
	// AddLayout gives it a plan, DropLayout takes one away.
	AddLayout(l *Layout)
	DropLayout(digest string)
	// UseTables has requests to backends that name a plan scored with the tables of a plan, which can be the same. It fails with
	// ErrNotLoaded where either was not added, and where the tables do not fit.
	UseTables(plan, tables string) error
}

// ErrNotLoaded says that a plan is not in the pool.
var ErrNotLoaded = errors.New("not loaded yet")

// Keeper keeps the plans that backends name, on disk and in the pool, and those whose tables are used in the place of theirs. It is
// safe for concurrent use.
type Keeper struct {
	dir   string
	fetch Fetch
	pool  Pool
	// backoff paces the attempts for one plan, grace and sweep are planGrace and sweepPeriod.
	backoff      wait.Backoff
	grace, sweep time.Duration

	mu sync.Mutex
	// named holds the digests that backends name.
	named map[string]bool
	// tables says, for the digest of a plan that backends may name, of which plan the tables are to be used; told that somebody has
	// said so. using says which were used last in the place of a plan's own: they are used on while those cannot be. refused are
	// the tables that a plan cannot be used with.
	tables, using, refused map[string]string
	told                   bool
	// wanted holds the digests to keep: the zero time for those that are needed, for the others when that ended.
	wanted map[string]time.Time
	wake   chan struct{}
}

// tablesName is the file, beside the directory of the plans, that keeps what Keeper.using holds: it is absent where that is nothing.
const tablesName = "tables.json"

// NewKeeper keeps plans below a directory, which nobody else may use, and gives them to the pool.
func NewKeeper(dir string, fetch Fetch, pool Pool) *Keeper {
	return &Keeper{
		dir: dir, fetch: fetch, pool: pool,
		// A minute at most between attempts: what is missing costs locality, never an answer.
		backoff: wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 7, Cap: time.Minute},
		grace:   planGrace, sweep: sweepPeriod,
		named: map[string]bool{}, refused: map[string]string{}, wanted: map[string]time.Time{}, wake: make(chan struct{}, 1),
	}
}

// Want names the plans of the present backends.
func (k *Keeper) Want(backends []discovery.Backend) {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.named)
	for _, b := range backends {
		// A digest becomes the name of a directory. A pod with any other text in its place is served without a plan.
		if _, err := artifact.ParseDigest(b.PlanDigest); err == nil {
			k.named[b.PlanDigest] = true
		}
	}
	k.review()
}

// SetTables says, by the digests of plans, whose tables are to be used in the place of their own, once these are there and fit.
func (k *Keeper) SetTables(tables map[string]string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tables, k.told = tables, true
	clear(k.refused)
	k.review()
}

// review notes which plans are needed, and wakes Run. The lock must be held.
func (k *Keeper) review() {
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

// need is a plan to load; tablesOnly tells that no backend names it.
type need struct {
	digest     string
	tablesOnly bool
}

// due are the plans that are needed, and the digests of those whose grace is over, which it forgets.
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

// loading is the work on one plan.
type loading struct {
	need
	cancel context.CancelFunc
	done   chan struct{}
}

// end stops it, and waits until it has.
func (l *loading) end() {
	l.cancel()
	<-l.done
}

// Run fetches and loads plans as they are wanted, and drops them when they are not, until the context ends.
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
				work.end() // backends name now what was loaded for its tables
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

// adopt takes over what an earlier process has left: whole plans are kept as if they had just been named, the rest, such
// as a download that was cut off, is removed.
func (k *Keeper) adopt(log logr.Logger) {
	entries, err := os.ReadDir(k.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Error(err, "Leaving old plans on disk")
	}
	using, err := readTables(k.usingPath())
	if err != nil {
		log.Error(err, "Forgetting which tables were used")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.using = using; k.using == nil {
		k.using = map[string]string{}
	}
	if !k.told {
		k.tables = maps.Clone(k.using)
	}
	defer k.review()
	for _, entry := range entries {
		if _, err := artifact.ParseDigest(entry.Name()); err != nil {
			if err := os.RemoveAll(filepath.Join(k.dir, entry.Name())); err != nil {
				log.Error(err, "Leaving an old file on disk")
			}
			continue
		}
		if _, known := k.wanted[entry.Name()]; !known {
			k.wanted[entry.Name()] = time.Now()
		}
	}
}

// load tries until the pool has the plan or the context ends.
func (k *Keeper) load(ctx context.Context, n need, log logr.Logger) {
	log = log.WithValues("plan", artifact.Digest(n.digest).Short())
	without := "Balancing by load until the plan can be loaded"
	if n.tablesOnly {
		without = "Going on with older tables until the plan can be loaded"
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
	dir := filepath.Join(k.dir, n.digest)
	if err := k.fetch(ctx, n.digest, dir); err != nil {
		return err
	}
	layout, unusable, err := readLayout(dir, n.digest, n.tablesOnly)
	if err != nil {
		return err
	}
	if unusable != nil {
		log.Info("Tokenizing nothing here: engines are asked for the token ids of shorter texts, where they can tell", "reason", unusable.Error())
	}
	k.pool.AddLayout(layout)
	k.signal()
	log.Info("Loaded a plan", "ranks", layout.Ranks, "tablesOnly", n.tablesOnly)
	return nil
}

// apply has the plans that backends name use the tables that they are to use, as far as these are loaded and fit; while they are
// not, those that they have used.
func (k *Keeper) apply(log logr.Logger) {
	k.mu.Lock()
	defer k.mu.Unlock()
	changed := false
	for plan := range k.named {
		from, last := cmp.Or(k.tables[plan], plan), cmp.Or(k.using[plan], plan)
		err := k.pool.UseTables(plan, from)
		switch {
		case err == nil && from != last:
			log.Info("Scoring by other tables", "plan", artifact.Digest(plan).Short(), "tables", artifact.Digest(from).Short())
			if changed = true; from == plan {
				delete(k.using, plan)
			} else {
				k.using[plan] = from
			}
		case err != nil:
			if err := k.pool.UseTables(plan, last); err != nil && !errors.Is(err, ErrNotLoaded) {
				log.Error(err, "Going on with a plan's own tables", "plan", artifact.Digest(plan).Short())
			}
			if !errors.Is(err, ErrNotLoaded) && k.refused[plan] != from {
				k.refused[plan] = from
				log.Error(err, "Going on with the tables that are in use", "plan", artifact.Digest(plan).Short())
			}
		}
	}
	if changed {
		k.review()
		if err := k.saveUsing(); err != nil {
			log.Error(err, "Keeping an older record of the tables that are in use")
		}
	}
}

// forget forgets whose tables a plan was used with.
func (k *Keeper) forget(plan string, log logr.Logger) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, used := k.using[plan]; !used {
		return
	}
	delete(k.using, plan)
	if err := k.saveUsing(); err != nil {
		log.Error(err, "Keeping an older record of the tables that are in use")
	}
}

func (k *Keeper) usingPath() string { return filepath.Join(filepath.Dir(k.dir), tablesName) }

// saveUsing keeps for the next process what is used.
func (k *Keeper) saveUsing() error {
	if len(k.using) == 0 {
		return os.RemoveAll(k.usingPath())
	}
	data, err := json.Marshal(k.using)
	if err != nil {
		return err
	}
	return wholefile.WriteBytes(k.usingPath(), 0o600, data)
}

func (k *Keeper) drop(digest string, log logr.Logger) {
	k.pool.DropLayout(digest)
	k.forget(digest, log)
	if err := os.RemoveAll(filepath.Join(k.dir, digest)); err != nil {
		log.Error(err, "Leaving a plan on disk that no pod names", "plan", artifact.Digest(digest).Short())
		return
	}
	log.Info("Dropped a plan that no pod names", "plan", artifact.Digest(digest).Short())
}
