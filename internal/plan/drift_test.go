// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/placement"
)

// calibration returns a calibration for a number of ranks.
func calibration(ranks int) *drift.Calibration {
	cells := slices.Repeat([]float64{.25}, ranks*ranks)
	chart := drift.Chart{Reference: .05, Threshold: 2}
	return &drift.Calibration{
		Ranks: ranks, Requests: 100, FalseAlarms: 1e-7, Highest: cells, Predicted: cells, Local: cells, Slopes: drift.Slopes{Best: 1.5},
		Chance: .25, Usual: drift.Usual{Served: .2, Best: .25, Known: .9}, Residual: chart, Level: chart, Novelty: chart,
	}
}

func TestDriftIsPartOfThePlan(t *testing.T) {
	for attention, ranks := range map[placement.Attention]int{placement.DataParallel: 4, placement.TensorParallel: 1} {
		p := solved(t, attention)
		without := encode(t, p)
		if _, has := without.Files[plan.DriftFile]; has {
			t.Fatalf("attention %s: a plan without a drift test has a file for it", attention)
		}
		p.Drift = calibration(ranks)
		dir, a := written(t, p)
		if a.Digest == without.Digest {
			t.Errorf("attention %s: the digest does not cover the drift test", attention)
		}
		got, _, err := plan.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(p.Drift, got.Drift); diff != "" {
			t.Errorf("attention %s: the drift test that was read differs:\n%s", attention, diff)
		}
		if diff := cmp.Diff(p.Seen, got.Seen); diff != "" || got.Seen == nil {
			t.Errorf("attention %s: the tokens that the tables were made from differ:\n%s", attention, diff)
		}
	}
}

func TestRefusesADriftTestOfAnotherPlan(t *testing.T) {
	p := solved(t, placement.DataParallel)
	p.Drift = calibration(8)
	if _, err := plan.Encode(p); err == nil || !strings.Contains(err.Error(), "drift.json: ranks is 8") {
		t.Errorf("other number of ranks: error = %v", err)
	}
	p.Drift = calibration(4)
	p.Drift.Level.Threshold = 0
	if _, err := plan.Encode(p); err == nil || !strings.Contains(err.Error(), "drift.json: level.threshold is 0") {
		t.Errorf("no threshold: error = %v", err)
	}
	p.Drift = calibration(4)
	for name, text := range map[string]string{"no JSON": "{", "other fields": `{"when":"now"}`, "empty": "{}"} {
		a := encode(t, p)
		a.Files[plan.DriftFile] = []byte(text)
		if _, err := plan.Decode(a); !plan.IsInvalid(err) || !strings.Contains(err.Error(), plan.DriftFile) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestRefusesDamagedSetsOfTokens(t *testing.T) {
	p := solved(t, placement.DataParallel)
	p.Seen.Pairs = p.Seen.Pairs[:3]
	if _, err := plan.Decode(encode(t, p)); !plan.IsInvalid(err) || !strings.Contains(err.Error(), `"pair_seen" has shape [3]`) {
		t.Errorf("error %v", err)
	}
	p = solved(t, placement.TensorParallel)
	p.Seen.Tokens = p.Seen.Tokens[1:]
	if _, err := plan.Decode(encode(t, p)); !plan.IsInvalid(err) || !strings.Contains(err.Error(), `"token_seen" has shape [12]`) {
		t.Errorf("error %v", err)
	}
}
