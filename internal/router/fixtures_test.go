package router

import (
	"testing"

	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// planned is a plan for the small model on four ranks, as the pool has it.
type planned struct {
	planstest.Planned
	layout *plans.Layout
}

func layoutOf(p planstest.Planned) planned {
	return planned{p, plans.New(p.Artifact.Digest, p.Plan, p.Tokenizer)}
}

// solved are two plans with different placements.
func solved(t testing.TB) (first, second planned) {
	t.Helper()
	a, b := planstest.Solved(t)
	return layoutOf(a), layoutOf(b)
}

// favouring is a plan of new tables for the layout of another one: every request belongs on one rank.
func favouring(t *testing.T, p planned, rank int) planned {
	t.Helper()
	return layoutOf(p.Favouring(t, rank))
}
