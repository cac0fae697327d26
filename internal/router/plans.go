package router

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/semmoe/operator/internal/artifact"
)

// FetchPlan makes a directory hold the plan of a digest, whole and verified, or fails. Where it holds it already, nobody
// else is needed. Only one call at a time is made for a directory.
type FetchPlan func(ctx context.Context, digest, dir string) error

const (
	// planGrace is how long a plan stays that no backend names any more: a replica that restarts names it again, perhaps
	// while the store is away.
	planGrace = 10 * time.Minute
	// sweepPeriod is how often such plans are looked for.
	sweepPeriod = time.Minute
)

// Plans keeps the plans that backends name, on disk and in the pool, and those whose tables are used in the place of theirs. It is
// safe for concurrent use.
type Plans struct {
	dir   string
	fetch FetchPlan
	pool  *Pool
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

// tablesName is the file, beside the directory of the plans, that keeps what Plans.using holds: it is absent where that is nothing.
const tablesName = "tables.json"

// NewPlans keeps plans below a directory, which nobody else may use, and gives them to the pool.
func NewPlans(dir string, fetch FetchPlan, pool *Pool) *Plans {
	return &Plans{
		dir: dir, fetch: fetch, pool: pool,
		// A minute at most between attempts: what is missing costs locality, never an answer.
		backoff: wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 7, Cap: time.Minute},
		grace:   planGrace, sweep: sweepPeriod,
		named: map[string]bool{}, refused: map[string]string{}, wanted: map[string]time.Time{}, wake: make(chan struct{}, 1),
	}
}

// Want names the plans of the present backends.
func (p *Plans) Want(backends []Backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.named)
	for _, b := range backends {
		// A digest becomes the name of a directory. A pod with any other text in its place is served without a plan.
		if _, err := artifact.ParseDigest(b.PlanDigest); err == nil {
			p.named[b.PlanDigest] = true
		}
	}
	p.review()
}

// SetTables says, by the digests of plans, whose tables are to be used in the place of their own, once these are there and fit.
func (p *Plans) SetTables(tables map[string]string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tables, p.told = tables, true
	clear(p.refused)
	p.review()
}

// review notes which plans are needed, and wakes Run. The lock must be held.
func (p *Plans) review() {
	needed := map[string]bool{}
	for digest := range p.named {
		needed[digest] = true
		for _, from := range []string{p.tables[digest], p.using[digest]} {
			if from != "" {
				needed[from] = true
			}
		}
	}
	now := time.Now()
	for digest, last := range p.wanted {
		if last.IsZero() && !needed[digest] {
			p.wanted[digest] = now
		}
	}
	for digest := range needed {
		p.wanted[digest] = time.Time{}
	}
	p.signal()
}

// signal wakes Run.
func (p *Plans) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// need is a plan to load; tablesOnly tells that no backend names it.
type need struct {
	digest     string
	tablesOnly bool
}

// due are the plans that are needed, and the digests of those whose grace is over, which it forgets.
func (p *Plans) due() (needs []need, expired []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for digest, last := range p.wanted {
		switch {
		case last.IsZero():
			needs = append(needs, need{digest, !p.named[digest]})
		case time.Since(last) >= p.grace:
			expired = append(expired, digest)
			delete(p.wanted, digest)
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
func (p *Plans) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	p.adopt(log)
	works := map[string]loading{}
	defer func() {
		for _, work := range works {
			work.end()
		}
	}()
	tick := time.NewTicker(p.sweep)
	defer tick.Stop()
	for {
		needs, expired := p.due()
		for _, digest := range expired {
			if work, running := works[digest]; running {
				work.end()
				delete(works, digest)
			}
			p.drop(digest, log)
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
				p.load(loadCtx, n, log)
			}()
		}
		p.apply(log)
		select {
		case <-ctx.Done():
			return nil
		case <-p.wake:
		case <-tick.C:
		}
	}
}

// adopt takes over what an earlier process has left: whole plans are kept as if they had just been named, the rest, such
// as a download that was cut off, is removed.
func (p *Plans) adopt(log logr.Logger) {
	entries, err := os.ReadDir(p.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Error(err, "Leaving old plans on disk")
	}
	using, err := readTables(p.usingPath())
	if err != nil {
		log.Error(err, "Forgetting which tables were used")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.using = using; p.using == nil {
		p.using = map[string]string{}
	}
	if !p.told {
		p.tables = maps.Clone(p.using)
	}
	defer p.review()
	for _, entry := range entries {
		if _, err := artifact.ParseDigest(entry.Name()); err != nil {
			if err := os.RemoveAll(filepath.Join(p.dir, entry.Name())); err != nil {
				log.Error(err, "Leaving an old file on disk")
			}
			continue
		}
		if _, known := p.wanted[entry.Name()]; !known {
			p.wanted[entry.Name()] = time.Now()
		}
	}
}

// load tries until the pool has the plan or the context ends.
func (p *Plans) load(ctx context.Context, n need, log logr.Logger) {
	log = log.WithValues("plan", n.digest[:shortDigest])
	without := "Balancing by load until the plan can be loaded"
	if n.tablesOnly {
		without = "Going on with older tables until the plan can be loaded"
	}
	backoff := p.backoff
	for {
		err := p.try(ctx, n, log)
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

func (p *Plans) try(ctx context.Context, n need, log logr.Logger) error {
	dir := filepath.Join(p.dir, n.digest)
	if err := p.fetch(ctx, n.digest, dir); err != nil {
		return err
	}
	layout, unusable, err := readLayout(dir, n.digest, n.tablesOnly)
	if err != nil {
		return err
	}
	if unusable != nil {
		log.Info("Tokenizing nothing here: engines are asked for the token ids of shorter texts, where they can tell", "reason", unusable.Error())
	}
	p.pool.AddLayout(layout)
	p.signal()
	log.Info("Loaded a plan", "ranks", layout.ranks, "tablesOnly", n.tablesOnly)
	return nil
}

// apply has the plans that backends name use the tables that they are to use, as far as these are loaded and fit; while they are
// not, those that they have used.
func (p *Plans) apply(log logr.Logger) {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed := false
	for plan := range p.named {
		from, last := cmp.Or(p.tables[plan], plan), cmp.Or(p.using[plan], plan)
		err := p.pool.UseTables(plan, from)
		switch {
		case err == nil && from != last:
			log.Info("Scoring by other tables", "plan", plan[:shortDigest], "tables", from[:shortDigest])
			if changed = true; from == plan {
				delete(p.using, plan)
			} else {
				p.using[plan] = from
			}
		case err != nil:
			if err := p.pool.UseTables(plan, last); err != nil && !errors.Is(err, errNotLoaded) {
				log.Error(err, "Going on with a plan's own tables", "plan", plan[:shortDigest])
			}
			if !errors.Is(err, errNotLoaded) && p.refused[plan] != from {
				p.refused[plan] = from
				log.Error(err, "Going on with the tables that are in use", "plan", plan[:shortDigest])
			}
		}
	}
	if changed {
		p.review()
		if err := p.saveUsing(); err != nil {
			log.Error(err, "Keeping an older record of the tables that are in use")
		}
	}
}

// forget forgets whose tables a plan was used with.
func (p *Plans) forget(plan string, log logr.Logger) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, used := p.using[plan]; !used {
		return
	}
	delete(p.using, plan)
	if err := p.saveUsing(); err != nil {
		log.Error(err, "Keeping an older record of the tables that are in use")
	}
}

func (p *Plans) usingPath() string { return filepath.Join(filepath.Dir(p.dir), tablesName) }

// saveUsing keeps for the next process what is used.
func (p *Plans) saveUsing() error {
	if len(p.using) == 0 {
		return os.RemoveAll(p.usingPath())
	}
	return saveJSON(p.usingPath(), p.using)
}

func (p *Plans) drop(digest string, log logr.Logger) {
	p.pool.DropLayout(digest)
	p.forget(digest, log)
	if err := os.RemoveAll(filepath.Join(p.dir, digest)); err != nil {
		log.Error(err, "Leaving a plan on disk that no pod names", "plan", digest[:shortDigest])
		return
	}
	log.Info("Dropped a plan that no pod names", "plan", digest[:shortDigest])
}
