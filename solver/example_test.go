// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"context"
	"fmt"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// Solve places the experts of a generated trace on four ranks, and scores the plan on requests that were not used to
// solve it.
func ExampleSolve() {
	routing := tracetest.Generate(tracetest.Small, 1)
	solution, err := solver.Solve(context.Background(), routing, solver.Options{
		Ranks: 4, Attention: placement.TensorParallel, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 75, Seed: 1,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%d train and %d test requests\n", solution.TrainRequests, solution.TestRequests)
	fmt.Println("MoE layers:", len(solution.Plan.Placement.Layers))
	fmt.Println("experts of rank 0 in the first one:", solution.Plan.Placement.Layers[0].Slots[:solution.Plan.Placement.SlotsPerRank])
	fmt.Println("more local activations than the default placement:", solution.Report.LAR > solution.Report.BaselineLAR)
	// Output:
	// 40 train and 8 test requests
	// MoE layers: 3
	// experts of rank 0 in the first one: [0 1 3 10]
	// more local activations than the default placement: true
}

// Replan compares three plans on recent requests of other kinds: the plan in service, the same placement with new
// tables, and a new placement.
func ExampleReplan() {
	old, recent := drifting(1)
	current, err := solver.Solve(context.Background(), old, solver.Options{
		Ranks: 4, Attention: placement.TensorParallel, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 80, Seed: 1,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	found, err := solver.Replan(context.Background(), recent, old, current.Plan, solver.ReplanOptions{
		Options:         solver.Options{TrainPercent: 60, Seed: 1},
		MoveGainPercent: solver.DefaultMoveGainPercent,
		PriorPercent:    solver.DefaultPriorPercent,
		ReplanPolicy:    solver.ReplanPolicy{BatchTokens: []int{1 << 17}, MinimumGainPercent: solver.DefaultMinimumGainPercent},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("roll out:", found.Tier)
	fmt.Println("reason:", found.Verdict)
	fmt.Println("moves experts:", found.Layout.Moves > 0)
	fmt.Println("more local activations:", found.Layout.Score.LAR > found.Current.Score.LAR)
	// Output:
	// roll out: layout
	// reason: Gain
	// moves experts: true
	// more local activations: true
}
