// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

// TestAutoForecast checks that the comparison is reproducible, that the choice is not slower than the token table, and
// that the plan is the plan of the chosen forecast. Where forecasts cannot be compared, the reason is given.
func TestAutoForecast(t *testing.T) {
	tr := recorded(t)
	options := solver.Options{
		Ranks: 4, Attention: placement.TensorParallel, Algorithm: placement.ContiguousAlgorithm, Forecast: solver.AutoForecast, TrainPercent: 60, Seed: 1,
		BatchTokens: []int{65536},
	}
	solve := func(change func(*solver.Options)) *solver.Solution {
		t.Helper()
		o := options
		if change != nil {
			change(&o)
		}
		s, err := solver.Solve(t.Context(), tr, o)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first, second := solve(nil), solve(nil)
	c := first.Forecasts
	if !reflect.DeepEqual(c, second.Forecasts) {
		t.Errorf("%+v, and in another run %+v", c, second.Forecasts)
	}
	if len(c.Candidates) != 3 || c.Candidates[0].Forecast != solver.Table || len(c.Skipped) != 1 || !strings.Contains(c.Skipped[0], "no look-ahead") {
		t.Fatalf("%+v", c)
	}
	for _, candidate := range c.Candidates {
		if candidate.LayerUS <= 0 || candidate.LAR < 0.25 || candidate.TableBytes <= 0 {
			t.Errorf("%+v", candidate)
		}
		if candidate.Forecast == c.Chosen && candidate.LayerUS+candidate.AssignmentUS > c.Candidates[0].LayerUS {
			t.Errorf("%+v is slower than the token table %+v", candidate, c.Candidates[0])
		}
	}
	named := solve(func(o *solver.Options) { o.Forecast = c.Chosen })
	if first.Plan.Forecast != c.Chosen || named.Forecasts != nil || !reflect.DeepEqual(first.Plan, named.Plan) {
		t.Errorf("the plan of forecast %s differs from that of %s", first.Plan.Forecast, c.Chosen)
	}

	if s := solve(func(o *solver.Options) { o.Attention = placement.DataParallel }); s.Plan.Forecast != solver.Table || s.Forecasts != nil {
		t.Errorf("with attention dp: %s, %+v", s.Plan.Forecast, s.Forecasts)
	}
	messages := solve(func(o *solver.Options) { o.Objective = placement.RankDedup })
	if messages.Plan.Forecast != solver.Table || len(messages.Forecasts.Candidates) != 0 || !strings.Contains(messages.Forecasts.Text(), "objective rank-dedup") {
		t.Errorf("%s, %+v", messages.Plan.Forecast, messages.Forecasts)
	}
	tr.Model.HiddenSize = 0
	if s := solve(nil); s.Plan.Forecast != solver.Table || !strings.Contains(s.Forecasts.Text(), "lacks the sizes") {
		t.Errorf("without sizes: %s, %+v", s.Plan.Forecast, s.Forecasts)
	}
}
