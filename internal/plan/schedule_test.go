// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/schedule"
)

// scheduled returns a schedule for a number of ranks.
func scheduled(t *testing.T, ranks int) *schedule.Schedule {
	t.Helper()
	machines, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	shape := &pipeline.Shape{
		HiddenLayers: 4, MoELayers: 3, Experts: 16, TopK: 2, Hidden: 1024, ExpertSize: 512, SharedSize: 512, Heads: 8, KVHeads: 8, QueryDim: 128, ValueDim: 128,
	}
	s, err := schedule.Of(shape, machines, schedule.Inputs{Ranks: ranks, SlotsPerRank: 16 / ranks, LAR: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestScheduleIsPartOfThePlan(t *testing.T) {
	p := solved(t, placement.DataParallel)
	without := encode(t, p)
	if _, has := without.Files[plan.ScheduleFile]; has {
		t.Fatal("a plan without a schedule has a file of it")
	}
	p.Schedule = scheduled(t, 4)
	dir, a := written(t, p)
	if a.Digest == without.Digest || a.Manifest.LayoutDigest != without.Manifest.LayoutDigest {
		t.Error("the plan digest must cover the schedule, and the layout digest must not")
	}
	got, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(p.Schedule, got.Schedule); diff != "" || len(got.Schedule.Disaggregated) == 0 {
		t.Errorf("the schedule that was read differs:\n%s", diff)
	}
}

func TestRefusesAScheduleOfAnotherPlan(t *testing.T) {
	p := solved(t, placement.TensorParallel)
	p.Schedule = scheduled(t, 2)
	if _, err := plan.Encode(p); err == nil || !strings.Contains(err.Error(), "schedule.json: ranks is 2; the plan has 4") {
		t.Errorf("other number of ranks: error = %v", err)
	}
	p.Schedule = scheduled(t, 4)
	for name, text := range map[string]string{"no JSON": "{", "other fields": `{"when":"now"}`, "empty": "{}"} {
		a := encode(t, p)
		a.Files[plan.ScheduleFile] = []byte(text)
		if _, err := plan.Decode(a); !plan.IsInvalid(err) || !strings.Contains(err.Error(), plan.ScheduleFile) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
