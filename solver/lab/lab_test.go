// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

func options(attention placement.Attention, ranks int) solver.Options {
	return solver.Options{
		Ranks: ranks, Attention: attention, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
	}
}

func solve(t *testing.T, tr *trace.Trace, o solver.Options) *solver.Solution {
	t.Helper()
	solution, err := solver.Solve(t.Context(), tr, o)
	if err != nil {
		t.Fatal(err)
	}
	return solution
}
