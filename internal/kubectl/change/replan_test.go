// SPDX-License-Identifier: Apache-2.0

package change

import (
	"errors"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// TestReplanPriorAndTarget verifies that a plan is compared with the plan in service as the operator does it: with the
// profile that has most information, and with the promise of the tables in use.
func TestReplanPriorAndTarget(t *testing.T) {
	const traced, counts = 200, 0
	of := func(name string, promised int32) *semmoev1.PlacementPlan {
		plan := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ProfileRef: semmoev1.ProfileReference{Name: name}}}
		if promised > 0 {
			plan.Status.Forecast = &semmoev1.PlanForecast{LARMilli: promised}
		}
		return plan
	}
	serving := InService{Plan: of("layout", 400), TablesDigest: "ab", Tables: of("tables", 500), Reported: of("reported", 600)}
	for name, test := range map[string]struct {
		serving  InService
		profiles map[string]int64
		prior    string
		target   int32
	}{
		"profile of the tables":         {serving, map[string]int64{"tables": traced, "layout": traced, "reported": traced}, "tables", 450},
		"tables of counts":              {InService{Plan: serving.Plan, TablesDigest: "ab", Tables: of("tables", 0)}, map[string]int64{"tables": counts, "layout": traced}, "layout", 360},
		"deleted plan of the tables":    {InService{Plan: serving.Plan, TablesDigest: "ab"}, map[string]int64{"layout": traced}, "layout", 360},
		"deleted profile of the layout": {serving, map[string]int64{"reported": traced}, "reported", 450},
		"no trace":                      {serving, map[string]int64{"layout": counts, "reported": counts}, "layout", 450},
		"no profile":                    {serving, nil, "", 0},
		"a trace precedes counts":       {serving, map[string]int64{"tables": counts, "layout": counts, "reported": traced}, "reported", 450},
	} {
		t.Run(name, func(t *testing.T) {
			test.serving.Profiles = map[string]*semmoev1.AffinityProfile{"unused": {}}
			for profile, tokens := range test.profiles {
				test.serving.Profiles[profile] = &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{Result: &semmoev1.ProfileResult{TracedTokens: tokens}}}
			}
			profile, plan, err := Replan(sampled(), test.serving, time.Unix(0, 0), time.Unix(3600, 0))
			var state *StateError
			if test.prior == "" {
				if !errors.As(err, &state) {
					t.Fatalf("error %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := profile.Spec.Live.PriorProfileRef.Name; got != test.prior || plan.Spec.PriorProfileRef.Name != test.prior {
				t.Errorf("prior %q of the profile, %q of the plan; want %q", got, plan.Spec.PriorProfileRef.Name, test.prior)
			}
			if current := plan.Spec.Current; current.TargetLARMilli != test.target || current.TablesDigest != test.serving.TablesDigest {
				t.Errorf("current %+v, want target %d", current, test.target)
			}
		})
	}
}

// TestReplanUsesAuto verifies that a plan that replaces another one uses the algorithm auto and the objective of the
// plan in service, regardless of the MoEDeployment's algorithm.
func TestReplanUsesAuto(t *testing.T) {
	moed := sampled()
	moed.Spec.Placement.Solver = semmoev1.SolverSpec{Algorithm: "eplb", TimeBudgetSeconds: 60}
	layout := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{
		ProfileRef: semmoev1.ProfileReference{Name: "layout"}, LayoutSpec: semmoev1.LayoutSpec{Objective: semmoev1.ObjectiveRankDedup},
	}}
	traced := map[string]*semmoev1.AffinityProfile{"layout": {Status: semmoev1.AffinityProfileStatus{Result: &semmoev1.ProfileResult{TracedTokens: 200}}}}
	_, plan, err := Replan(moed, InService{Plan: layout, Profiles: traced}, time.Unix(0, 0), time.Unix(3600, 0))
	if err != nil {
		t.Fatal(err)
	}
	if s := plan.Spec; s.Objective != semmoev1.ObjectiveRankDedup || s.Solver.Algorithm != "" || s.Solver.TimeBudgetSeconds != 60 {
		t.Errorf("objective %q, solver %+v", s.Objective, s.Solver)
	}
}

// sampled returns a deployment with request sampling.
func sampled() *semmoev1.MoEDeployment {
	return &semmoev1.MoEDeployment{Spec: semmoev1.MoEDeploymentSpec{
		Engine:      semmoev1.EngineSpec{Type: semmoev1.EngineSGLang},
		Parallelism: semmoev1.ParallelismSpec{Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 2},
		Profiling:   &semmoev1.ProfilingSpec{}, Routing: semmoev1.RoutingSpec{SamplePercent: ptr.To[int32](5)},
		Drift: semmoev1.DriftSpec{ThresholdPercent: 10},
	}}
}
