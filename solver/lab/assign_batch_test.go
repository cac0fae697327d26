// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func TestAssignBatch(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	const ranks = 4
	plan := solve(t, tr, options(placement.TensorParallel, ranks)).Plan
	positions := []int{}
	for position := 0; position < 403; position++ {
		positions = append(positions, position*len(tr.Tokens)/403)
	}
	local := func(assigned [][]int) int {
		n := 0
		for l, ranksOf := range assigned {
			hosts, load := plan.Placement.Hosts(l), [ranks]int{}
			for i, position := range positions {
				load[ranksOf[i]]++
				for _, expert := range tr.Row(position, l) {
					if hosts[expert][0] == ranksOf[i] {
						n++
					}
				}
			}
			if load != [ranks]int{101, 101, 101, 100} {
				t.Errorf("layer %d: shards are %v", l, load)
			}
		}
		return n
	}
	byTable, err := lab.AssignBatch(t.Context(), tr, plan, solver.Table, positions)
	if err != nil {
		t.Fatal(err)
	}
	byRoutes, err := lab.AssignBatchByRoutes(t.Context(), tr, plan.Placement, positions)
	if err != nil {
		t.Fatal(err)
	}
	roundRobin := len(positions) * len(tr.Model.Layers) * tr.Model.TopK / ranks
	if table, routes := local(byTable), local(byRoutes); table <= roundRobin || routes <= table {
		t.Errorf("%d activations are local by the table, %d by the routes, about %d with tokens assigned round-robin", table, routes, roundRobin)
	}
	if plan.Forecast != solver.Table {
		t.Errorf("the plan's forecast is %s now", plan.Forecast)
	}
	if _, err := lab.AssignBatch(t.Context(), tr, plan, solver.Prefill, positions); err == nil {
		t.Error("a forecast whose tables the plan lacks is accepted")
	}
	other := tracetest.Generate(tracetest.Small, 3)
	other.Model.Vocabulary++
	if _, err := lab.AssignBatch(t.Context(), other, plan, solver.Table, positions); err == nil {
		t.Error("a trace of another model is accepted")
	}
}
