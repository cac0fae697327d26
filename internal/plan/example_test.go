// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// Read verifies the hash of every file of a plan.
func ExampleRead() {
	parent, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(parent)
	dir := filepath.Join(parent, "plan")
	if err := writeExample(dir); err != nil {
		fmt.Println(err)
		return
	}

	solved, artifact, err := plan.Read(dir)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(solved.Placement.Ranks, "ranks,", solved.Placement.SlotsPerRank, "experts each, forecast", solved.Forecast)
	for _, name := range slices.Sorted(maps.Keys(artifact.Manifest.Files)) {
		fmt.Println(name)
	}

	if err := os.WriteFile(filepath.Join(dir, plan.TablesFile), []byte("damaged"), 0o644); err != nil {
		fmt.Println(err)
		return
	}
	_, _, err = plan.Read(dir)
	fmt.Println("damaged plan is invalid:", plan.IsInvalid(err))
	// Output:
	// 4 ranks, 4 experts each, forecast table
	// engine/sglang.json
	// engine/trtllm.yaml
	// engine/vllm-ascend.json
	// gate-permutation.json
	// placement.json
	// tables.safetensors
	// damaged plan is invalid: true
}

// writeExample solves and writes a small plan.
func writeExample(dir string) error {
	solution, err := solver.Solve(context.Background(), tracetest.Generate(tracetest.Small, 1), solver.Options{
		Ranks: 4, Attention: placement.TensorParallel, Algorithm: placement.ContiguousAlgorithm, Forecast: solver.Table, TrainPercent: 75, Seed: 1,
	})
	if err != nil {
		return err
	}
	artifact, err := plan.Encode(solution.Plan)
	if err != nil {
		return err
	}
	return plan.Write(dir, artifact, nil)
}
