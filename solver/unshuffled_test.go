// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"math"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestUnshuffledTokens solves for an engine that leaves tokens where attention puts them: under every placement the
// local activation rate is 1/ranks, and the plan saves messages.
func TestUnshuffledTokens(t *testing.T) {
	shape := tracetest.Small
	shape.DocumentsPerDomain, shape.TokensPerRequest = 24, 100
	o := options(placement.TensorParallel, 4)
	o.Objective, o.Unshuffled = placement.RankDedup, true
	s := solve(t, tracetest.Generate(shape, 3), o)
	if s.FallBack != "" || s.Unplanned == nil {
		t.Fatalf("falls back: %s; without a plan %+v", s.FallBack, s.Unplanned)
	}
	for name, rate := range map[string]float64{"with": s.Report.LAR, "without": s.Unplanned.LAR} {
		if math.Abs(rate-0.25) > 0.02 {
			t.Errorf("%s a plan %.3f of the activations are local; tokens assigned round-robin to four ranks have a quarter", name, rate)
		}
	}
	got, plain := s.Report.RemoteRanksPerToken, s.Unplanned.RemoteRanksPerToken
	if got > 0.95*plain {
		t.Errorf("%.3f other ranks for each token; %.3f without a plan", got, plain)
	}
	t.Logf("%.3f other ranks for each token; %.3f without a plan", got, plain)
}

func TestUnshuffledRequiresMessageObjective(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for want, change := range map[string]func(*solver.Options){
		"attention is dp":      func(o *solver.Options) { o.Attention, o.Objective = placement.DataParallel, placement.RankDedup },
		"objective activation": func(*solver.Options) {},
	} {
		o := options(placement.TensorParallel, 4)
		o.Unshuffled = true
		change(&o)
		if _, err := solver.Solve(t.Context(), tr, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}
