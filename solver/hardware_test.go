// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// Times use the profile of the target machines. A plan contains the profile, unless it is the default one.
func TestPlansContainTheirHardwareProfile(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	slow := *hardware.DefaultProfile()
	slow.Name, slow.AllToAll.PerMicrosecond = "slow", slow.AllToAll.PerMicrosecond/100
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		o := options(attention, 4)
		o.Hardware = hardware.DefaultProfile()
		usual := solve(t, tr, o)
		if usual.Plan.Hardware != nil || usual.Plan.Machines() != hardware.DefaultProfile() {
			t.Errorf("%s: a plan for the default profile carries %+v", attention, usual.Plan.Hardware)
		}
		o.Hardware = &slow
		solved := solve(t, tr, o)
		if solved.Plan.Hardware != &slow || solved.Report.Hardware != "slow" || *solved.Report.ModelledUS <= *usual.Report.ModelledUS {
			t.Errorf("%s: %+v, by %s", attention, solved.Plan.Hardware, solved.Report.Hardware)
		}
		again, err := solver.Replan(t.Context(), tr, nil, usual.Plan, solver.ReplanOptions{Options: o, PriorPercent: 0, ReplanPolicy: solver.ReplanPolicy{BatchTokens: []int{4096}}})
		if err != nil {
			t.Fatal(err)
		}
		if again.Tables.Plan.Hardware != &slow || again.Layout.Plan.Hardware != &slow || again.Current.Plan.Hardware != nil {
			t.Errorf("%s: plans made anew for other machines carry %+v and %+v", attention, again.Tables.Plan.Hardware, again.Layout.Plan.Hardware)
		}
	}
}
