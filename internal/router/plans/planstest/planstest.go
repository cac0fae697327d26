// SPDX-License-Identifier: Apache-2.0

// Package planstest provides plans for tests: two plans that are solved from the routing trace of a small model.
package planstest

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Trace and Checkpoint are the routing trace and the checkpoint of the small model.
var (
	Trace      = inModule("solver/testdata/tiny-32e-top4.safetensors.zst")
	Checkpoint = inModule("internal/refengine/testdata/tiny-qwen3moe")
)

// Shape is the shape of the small model.
var Shape = lar.Shape{Layers: 4, MoELayers: []int{0, 1, 2, 3}, Experts: 32, ExpertsPerToken: 4}

// inModule returns a path below the root of the module, regardless of the working directory of the test.
func inModule(path string) string {
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil || dir == filepath.Dir(dir) {
			return filepath.Join(dir, path)
		}
	}
	return path
}

// Planned is a plan for the small model on four ranks, and the model's tokenizer.
type Planned struct {
	Plan      *solver.Plan
	Artifact  *plan.Artifact
	Tokenizer *tokenizer.Tokenizer
}

// Short returns the digest in the format of headers.
func (p Planned) Short() string { return p.Artifact.Digest[:16] }

var solved = sync.OnceValues(func() ([]Planned, error) {
	recorded, err := trace.Open(context.Background(), Trace)
	if err != nil {
		return nil, err
	}
	tokens, err := tokenizer.Load(filepath.Join(Checkpoint, bundle.TokenizerFile))
	if err != nil {
		return nil, err
	}
	var all []Planned
	for _, algorithm := range []placement.Algorithm{placement.Auto, placement.RoundRobinAlgorithm} {
		solution, err := solver.Solve(context.Background(), recorded, solver.Options{
			Ranks: 4, Attention: placement.DataParallel, Algorithm: algorithm, Forecast: solver.Table, TrainPercent: 80, Seed: 1,
		})
		if err != nil {
			return nil, err
		}
		encoded, err := plan.Encode(solution.Plan)
		if err != nil {
			return nil, err
		}
		all = append(all, Planned{solution.Plan, encoded, tokens})
	}
	return all, nil
})

// Solved returns two plans with different placements.
func Solved(t testing.TB) (first, second Planned) {
	t.Helper()
	all, err := solved()
	if err != nil {
		t.Fatal(err)
	}
	return all[0], all[1]
}

// Favouring returns a plan with new tables for the layout of p. The tables score rank highest for every request.
func (p Planned) Favouring(t testing.TB, rank int) Planned {
	t.Helper()
	changed := *p.Plan
	changed.Ranks = &affinity.RankTable{Ranks: p.Plan.Ranks.Ranks, Score: make([]uint16, len(p.Plan.Ranks.Score))}
	for at := rank; at < len(changed.Ranks.Score); at += changed.Ranks.Ranks {
		changed.Ranks.Score[at] = affinity.ScoreScale / 2
	}
	if err := plan.OnLayoutOf(&changed, p.Artifact); err != nil {
		t.Fatal(err)
	}
	encoded, err := plan.Encode(&changed)
	if err != nil {
		t.Fatal(err)
	}
	return Planned{&changed, encoded, p.Tokenizer}
}
