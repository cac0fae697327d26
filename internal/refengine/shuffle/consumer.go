// SPDX-License-Identifier: Apache-2.0

package shuffle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/model"
)

// Reasons for which a consumer does not use the files of a plan.
const (
	ReasonAbsent              = "Absent"
	ReasonUnreadable          = "Unreadable"
	ReasonDamaged             = "Damaged"
	ReasonOtherPlan           = "OtherPlan"
	ReasonOtherModel          = "OtherModel"
	ReasonOtherParallelism    = "OtherParallelism"
	ReasonOtherPlacement      = "OtherPlacement"
	ReasonUnsupportedForecast = "UnsupportedForecast"
)

// Refusal is why the files of a plan are not used.
type Refusal struct{ Reason, Message string }

func (r *Refusal) Error() string { return r.Message }

func refuse(reason, format string, args ...any) *Refusal {
	return &Refusal{reason, fmt.Sprintf(format, args...)}
}

// pollPeriod is the time between two checks of the manifest.
const pollPeriod = time.Second

// Engine is the engine that a plan must fit.
type Engine struct {
	Model   *model.Model
	Experts *locality.Map
	Ranks   int
	// ModelDigest is the digest of the checkpoint.
	ModelDigest string
}

// Consumer reads the plan that the environment names, and again whenever its manifest changes. It is safe for concurrent
// use.
type Consumer struct {
	engine            Engine
	tables, placement string
	// digest is the digest of the plan that the engine serves under; empty for any plan.
	digest string

	mu      sync.Mutex
	read    string // the digest of the manifest that was last read
	state   State
	current *Shuffle
}

// State is the state of a consumer.
type State struct {
	// Plan is the digest of the plan whose tables are used; empty if tokens are not shuffled.
	Plan string
	// Refused is why the present files are not used; nil if they are.
	Refused *Refusal
}

// FromEnvironment returns the consumer of the plan that the variables name; nil if they name none.
func FromEnvironment(getenv func(string) string, e Engine) *Consumer {
	c := &Consumer{engine: e, tables: getenv(semmoev1.TablesVariable), placement: getenv(semmoev1.PlacementVariable), digest: getenv(semmoev1.PlanDigestVariable)}
	if c.tables == "" || c.placement == "" {
		return nil
	}
	return c
}

// Run polls the files until the context ends.
func (c *Consumer) Run(ctx context.Context) {
	ticker := time.NewTicker(pollPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			c.Poll(logr.FromContextOrDiscard(ctx))
		}
	}
}

// Current returns the shuffle by the tables in use; nil if tokens are not shuffled. Only one goroutine may use it.
func (c *Consumer) Current() *Shuffle {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current
}

// State returns the state.
func (c *Consumer) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// Width returns the number of experts of each look-ahead that the tables in use need; 0 for none.
func (c *Consumer) Width() int {
	if s := c.Current(); s != nil {
		return s.width
	}
	return 0
}

// Poll reads the plan if its manifest has changed. A plan that cannot be used is logged once, and leaves the tables in
// use as they are.
func (c *Consumer) Poll(log logr.Logger) {
	manifest, err := c.manifest()
	c.mu.Lock()
	// A file that is absent or unreadable may follow. A damaged plan stays damaged: it is replaced as a whole.
	incomplete := c.state.Refused != nil && (c.state.Refused.Reason == ReasonAbsent || c.state.Refused.Reason == ReasonUnreadable)
	same := err == nil && manifest == c.read && !incomplete
	c.mu.Unlock()
	if same {
		return
	}
	var s *Shuffle
	digest := ""
	if err == nil {
		s, digest, err = c.load()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = manifest
	if err == nil {
		c.current, c.state = s, State{Plan: digest}
		log.Info("Shuffling tokens by the tables of a plan", "planDigest", digest, "forecast", s.plan.Forecast)
		return
	}
	refusal := asRefusal(err)
	if c.state.Refused == nil || *c.state.Refused != *refusal {
		log.Info("Not using the tables of a plan", "reason", refusal.Reason, "message", refusal.Message, "planDigestInUse", c.state.Plan)
	}
	c.state.Refused = refusal
}

// manifest returns the digest of the manifest.
func (c *Consumer) manifest() (string, error) {
	content, err := c.file(plan.ManifestFile)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:]), nil
}

// load reads and checks the plan.
func (c *Consumer) load() (*Shuffle, string, error) {
	p, a, err := plan.ReadFiles(c.file)
	switch {
	case err != nil:
		return nil, "", err
	case c.digest != "" && a.Digest != c.digest && a.Manifest.Layout != c.digest:
		return nil, "", refuse(ReasonOtherPlan, "manifest.json has the digest %s; the engine serves under plan %s", a.Digest, c.digest)
	case p.ModelDigest != "" && p.ModelDigest != c.engine.ModelDigest:
		return nil, "", refuse(ReasonOtherModel, "the plan is for the model with digest %s; the engine serves %s", p.ModelDigest, c.engine.ModelDigest)
	}
	s, err := New(p, c.engine.Model, c.engine.Experts, c.engine.Ranks)
	return s, a.Digest, err
}

// file reads a file of the plan. The files that have no variable are in the directory of the tables.
func (c *Consumer) file(name string) ([]byte, error) {
	path := filepath.Join(filepath.Dir(c.tables), name)
	switch name {
	case plan.TablesFile:
		path = c.tables
	case plan.PlacementFile:
		path = c.placement
	}
	return regularfile.Read(path, plan.MaxBytes(name))
}

// asRefusal classifies an error of reading a plan.
func asRefusal(err error) *Refusal {
	var refusal *Refusal
	switch {
	case errors.As(err, &refusal):
		return refusal
	case errors.Is(err, fs.ErrNotExist):
		return refuse(ReasonAbsent, "%v", err)
	case plan.IsInvalid(err) || errors.Is(err, regularfile.ErrTooLarge):
		return refuse(ReasonDamaged, "%v", err)
	}
	return refuse(ReasonUnreadable, "%v", err)
}
