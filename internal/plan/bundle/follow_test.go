// SPDX-License-Identifier: Apache-2.0

package bundle_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/test/poll"
)

// changed returns a plan with a change, which names another one as its layout.
func changed(t *testing.T, from *plan.Artifact, layout string, change func(*solver.Plan)) *plan.Artifact {
	t.Helper()
	p, err := plan.Decode(from)
	if err != nil {
		t.Fatal(err)
	}
	p.Layout = layout
	change(p)
	a, err := plan.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// replaceFile replaces a file as a kubelet does.
func replaceFile(t *testing.T, path, text string) {
	t.Helper()
	fresh := path + ".new"
	if err := os.WriteFile(fresh, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(fresh, path); err != nil {
		t.Fatal(err)
	}
}

// lines contains the messages of a log.
type lines struct {
	mu   sync.Mutex
	text string
}

func (l *lines) add(prefix, args string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text += prefix + args + "\n"
}

func (l *lines) contain(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text, text)
}

// TestFollower follows the tables that a file names. Tables that are absent, damaged, or for another placement or model
// are logged, and never replace those in use. A reader always finds a complete plan.
func TestFollower(t *testing.T) {
	store := environment.Run(t)
	client, dir := store.Client(t), filepath.Join(t.TempDir(), "plan")
	base := encoded(t, 1)
	fresh := func(seed uint64) *plan.Artifact {
		return changed(t, base, base.Digest, func(p *solver.Plan) { p.Seed = seed })
	}
	publish := func(a *plan.Artifact) *plan.Artifact {
		t.Helper()
		if err := bundle.Publish(t.Context(), client, "team-a", a, nil); err != nil {
			t.Fatal(err)
		}
		return a
	}
	publish(base)
	newer, damaged, absent := publish(fresh(11)), publish(fresh(12)), fresh(13)
	unrelated := publish(encoded(t, 2))
	elsewhere := publish(changed(t, base, base.Digest, func(p *solver.Plan) {
		slots := p.Placement.Layers[0].Slots
		slots[0], slots[len(slots)-1] = slots[len(slots)-1], slots[0]
	}))
	otherModel := publish(changed(t, base, base.Digest, func(p *solver.Plan) { p.ModelDigest = strings.Repeat("cd", 32) }))
	scope, err := bundle.Scope("team-a", damaged.Digest)
	if err != nil {
		t.Fatal(err)
	}
	store.Damage(t, scope, artifact.Digest(damaged.Manifest.Files[plan.TablesFile]))

	var logged lines
	ctx, stop := context.WithCancel(logr.NewContext(t.Context(), funcr.New(logged.add, funcr.Options{})))
	tables := filepath.Join(t.TempDir(), "tables.json")
	follower := bundle.Follower{
		Namespace: "team-a", PlanDigest: base.Digest, Dir: dir, Tables: tables, Period: 5 * time.Millisecond,
		Connect: func() (*access.Client, error) { return client, nil },
	}
	var running sync.WaitGroup
	running.Go(func() { follower.Run(ctx) })
	defer running.Wait()
	defer stop()
	use := func(digest string) {
		t.Helper()
		text, err := json.Marshal(map[string]string{base.Digest: digest})
		if err != nil {
			t.Fatal(err)
		}
		replaceFile(t, tables, string(text))
	}
	installed := func(a *plan.Artifact) {
		t.Helper()
		poll.Until(t, "the directory contains plan "+a.Digest, func() bool {
			_, got, err := plan.Read(dir)
			return err == nil && got.Digest == a.Digest
		})
	}
	stays := func(a *plan.Artifact, says string) {
		t.Helper()
		poll.Until(t, "the log contains "+says, func() bool { return logged.contain(says) })
		if digest, err := plan.DigestOf(dir); err != nil || digest != a.Digest {
			t.Errorf("%s: the directory contains plan %s, %v", says, digest, err)
		}
	}

	installed(base)
	running.Go(func() {
		for ctx.Err() == nil {
			if _, err := plan.DigestOf(dir); err != nil {
				t.Errorf("a reader found no plan: %v", err)
				return
			}
		}
	})
	use(newer.Digest)
	installed(newer)
	use(unrelated.Digest)
	stays(newer, "the tables are for another plan: plan "+unrelated.Digest+` is for the placement of plan \"\"`)
	use(elsewhere.Digest)
	stays(newer, "placement.json of plan "+elsewhere.Digest)
	use(otherModel.Digest)
	stays(newer, "is for the model with digest")
	use(damaged.Digest)
	stays(newer, "failed to fetch tables.safetensors of plan "+damaged.Digest[:16])
	replaceFile(t, tables, "no JSON")
	stays(newer, "tables.json: invalid character")
	use(absent.Digest)
	stays(newer, "failed to read plan "+absent.Digest[:16])
	publish(absent)
	installed(absent)
	store.Stop()
	use(base.Digest)
	stays(absent, "connection refused")
	store.Start(t)
	installed(base)
	use(newer.Digest)
	installed(newer)
	if err := os.Remove(tables); err != nil {
		t.Fatal(err)
	}
	installed(base)
	stop()
	running.Wait()
	if entries, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(entries) != 1 {
		t.Errorf("remaining files: %v, error %v", entries, err)
	}
}
