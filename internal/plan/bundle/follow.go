// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/plan"
)

// ErrOtherPlan is returned for tables of another placement or another model.
var ErrOtherPlan = errors.New("the tables are for another plan")

const (
	// followPeriod is the time between two checks of the tables to use. It is a fraction of the time that a ConfigMap
	// takes to reach a pod.
	followPeriod = 2 * time.Second
	// maxFollowPause is the maximum time between two attempts to fetch tables.
	maxFollowPause = time.Minute
	// maxFetchTime bounds an attempt: one gigabyte takes ten minutes at 1.8 MB/s.
	maxFetchTime = 10 * time.Minute
)

// Follower keeps the plan in a directory at the tables that are in use with the placement of a pod. A plan that cannot
// be fetched, or that is for another placement, leaves the directory as it is.
type Follower struct {
	// Namespace contains the plans. PlanDigest is the digest of the plan that the pod serves under.
	Namespace, PlanDigest string
	// Dir is the directory of the plan, which only the follower may change. Tables is the file for ReadTables.
	Dir, Tables string
	// Connect connects to the store.
	Connect func() (*access.Client, error)
	// Period is the time between two checks; followPeriod if it is 0.
	Period time.Duration

	installed, refused string
	// failed is the last reported error. due is the time of the next attempt after an error for tables attempted.
	failed, attempted string
	due               time.Time
	backoff           wait.Backoff
}

// Wanted returns the digest of the plan whose tables the file names for a plan: by default the plan itself.
func Wanted(tables, planDigest string) (string, error) {
	named, err := ReadTables(tables)
	if err != nil {
		return "", err
	}
	return cmp.Or(named[planDigest], planDigest), nil
}

// Run follows the tables until the context ends.
func (f *Follower) Run(ctx context.Context) {
	ticker := time.NewTicker(cmp.Or(f.Period, followPeriod))
	defer ticker.Stop()
	for {
		f.poll(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// poll fetches the tables in use if the directory has others.
func (f *Follower) poll(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	wanted, err := Wanted(f.Tables, f.PlanDigest)
	switch {
	case err != nil:
		f.report(log, err)
		return
	case wanted == f.installed || wanted == f.refused:
		return
	case wanted == f.attempted && time.Now().Before(f.due):
		return
	}
	if wanted != f.attempted {
		f.attempted, f.refused, f.backoff = wanted, "", wait.Backoff{Duration: cmp.Or(f.Period, followPeriod), Factor: 2, Jitter: 0.2, Steps: 16, Cap: maxFollowPause}
	}
	err = f.install(ctx, wanted)
	switch {
	case ctx.Err() != nil:
	case err == nil:
		f.installed, f.failed, f.attempted = wanted, "", ""
		log.Info("The plan has the tables in use", "plan", artifact.Digest(f.PlanDigest).Short(), "tables", artifact.Digest(wanted).Short())
		debug.FreeOSMemory() // the next tables may be days away
	default:
		if errors.Is(err, ErrOtherPlan) || errors.Is(err, errTooLarge) || plan.IsInvalid(err) {
			f.refused = wanted
		}
		f.due = time.Now().Add(f.backoff.Step())
		f.report(log, err)
	}
}

// report logs an error once.
func (f *Follower) report(log logr.Logger, err error) {
	if text := err.Error(); text != f.failed {
		f.failed = text
		log.Error(err, "Failed to follow the tables; the plan in the directory stays", "plan", artifact.Digest(f.PlanDigest).Short())
	}
}

// install replaces the plan in the directory.
func (f *Follower) install(ctx context.Context, digest string) error {
	if IsComplete(f.Dir, digest) {
		return nil
	}
	client, err := f.Connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, maxFetchTime)
	defer cancel()
	return FetchTables(ctx, client, f.Namespace, f.PlanDigest, digest, f.Dir)
}

// FetchTables is Fetch for a pod that serves under planDigest: the plan must be this one, or contain new tables for its
// placement. The error for any other plan is ErrOtherPlan.
func FetchTables(ctx context.Context, client *access.Client, namespace, planDigest, tables, dir string) error {
	present, known := manifestIn(dir)
	return fetch(ctx, client, namespace, tables, dir, func(a *plan.Artifact) error {
		switch {
		case a.Digest == planDigest:
			return nil
		case a.Manifest.Layout != planDigest:
			return fmt.Errorf("%w: plan %s is for the placement of plan %q, not of plan %s", ErrOtherPlan, a.Digest, a.Manifest.Layout, planDigest)
		case known && a.Manifest.LayoutDigest != present.LayoutDigest:
			return fmt.Errorf("%w: %s of plan %s is not that of the plan in use", ErrOtherPlan, plan.PlacementFile, a.Digest)
		case known && a.Manifest.ModelDigest != present.ModelDigest:
			return fmt.Errorf("%w: plan %s is for the model with digest %q, not %q", ErrOtherPlan, a.Digest, a.Manifest.ModelDigest, present.ModelDigest)
		}
		return nil
	})
}

// manifestIn returns the manifest of the plan in a directory, if there is one.
func manifestIn(dir string) (m plan.Manifest, known bool) {
	content, err := regularfile.Read(filepath.Join(dir, plan.ManifestFile), plan.MaxBytes(plan.ManifestFile))
	return m, err == nil && json.Unmarshal(content, &m) == nil && m.LayoutDigest != ""
}
