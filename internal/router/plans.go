package router

import (
	"context"
	"errors"
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

// Plans keeps the plans that backends name, on disk and in the pool. It is safe for concurrent use.
type Plans struct {
	dir   string
	fetch FetchPlan
	pool  *Pool
	// backoff paces the attempts for one plan, grace and sweep are planGrace and sweepPeriod.
	backoff      wait.Backoff
	grace, sweep time.Duration

	mu sync.Mutex
	// wanted holds the digests to keep: the zero time for those that backends name, for the others when that ended.
	wanted map[string]time.Time
	wake   chan struct{}
}

// NewPlans keeps plans below a directory, which nobody else may use, and gives them to the pool.
func NewPlans(dir string, fetch FetchPlan, pool *Pool) *Plans {
	return &Plans{
		dir: dir, fetch: fetch, pool: pool,
		// A minute at most between attempts: what is missing costs locality, never an answer.
		backoff: wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 7, Cap: time.Minute},
		grace:   planGrace, sweep: sweepPeriod,
		wanted: map[string]time.Time{}, wake: make(chan struct{}, 1),
	}
}

// Want names the plans of the present backends.
func (p *Plans) Want(backends []Backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for digest, last := range p.wanted {
		if last.IsZero() {
			p.wanted[digest] = now
		}
	}
	for _, b := range backends {
		// A digest becomes the name of a directory. A pod with any other text in its place is served without a plan.
		if _, err := artifact.ParseDigest(b.PlanDigest); err == nil {
			p.wanted[b.PlanDigest] = time.Time{}
		}
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// due are the digests that backends name, and those whose grace is over, which it forgets.
func (p *Plans) due() (named, expired []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for digest, last := range p.wanted {
		switch {
		case last.IsZero():
			named = append(named, digest)
		case time.Since(last) >= p.grace:
			expired = append(expired, digest)
			delete(p.wanted, digest)
		}
	}
	return named, expired
}

// loading is the work on one plan.
type loading struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// Run fetches and loads plans as they are wanted, and drops them when they are not, until the context ends.
func (p *Plans) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	p.adopt(log)
	works := map[string]loading{}
	defer func() {
		for _, work := range works {
			work.cancel()
			<-work.done
		}
	}()
	tick := time.NewTicker(p.sweep)
	defer tick.Stop()
	for {
		named, expired := p.due()
		for _, digest := range expired {
			if work, running := works[digest]; running {
				work.cancel()
				<-work.done
				delete(works, digest)
			}
			p.drop(digest, log)
		}
		for _, digest := range named {
			if _, running := works[digest]; running {
				continue
			}
			loadCtx, cancel := context.WithCancel(ctx)
			work := loading{cancel, make(chan struct{})}
			works[digest] = work
			go func() {
				defer close(work.done)
				p.load(loadCtx, digest, log)
			}()
		}
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
	p.mu.Lock()
	defer p.mu.Unlock()
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
func (p *Plans) load(ctx context.Context, digest string, log logr.Logger) {
	log = log.WithValues("plan", digest[:shortDigest])
	backoff := p.backoff
	for {
		err := p.try(ctx, digest, log)
		if err == nil || ctx.Err() != nil {
			return
		}
		pause := backoff.Step()
		log.Info("Balancing by load until the plan can be loaded", "reason", err.Error(), "retryAfter", pause.String())
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

func (p *Plans) try(ctx context.Context, digest string, log logr.Logger) error {
	dir := filepath.Join(p.dir, digest)
	if err := p.fetch(ctx, digest, dir); err != nil {
		return err
	}
	layout, unusable, err := readLayout(dir, digest)
	if err != nil {
		return err
	}
	if unusable != nil {
		log.Info("Tokenizing nothing here: engines are asked for the token ids of shorter texts, where they can tell", "reason", unusable.Error())
	}
	p.pool.AddLayout(layout)
	log.Info("Loaded a plan", "ranks", layout.ranks)
	return nil
}

func (p *Plans) drop(digest string, log logr.Logger) {
	p.pool.DropLayout(digest)
	if err := os.RemoveAll(filepath.Join(p.dir, digest)); err != nil {
		log.Error(err, "Leaving a plan on disk that no pod names", "plan", digest[:shortDigest])
		return
	}
	log.Info("Dropped a plan that no pod names", "plan", digest[:shortDigest])
}
