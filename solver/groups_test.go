// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestGroupsAreNeverBelowContiguous solves with as many ranks as groups, and with twice as many, and compares held-out
// rates with those of the default placement under the same tables and dispatch.
func TestGroupsAreNeverBelowContiguous(t *testing.T) {
	figures(t)
	shape := tracetest.Shape{
		Experts: 32, TopK: 2, Layers: 3, Vocabulary: 100, Domains: 4, DocumentsPerDomain: 20, RequestsPerDocument: 3, TokensPerRequest: 60,
		Noise: 10, Groups: 4,
	}
	for seed := range uint64(3) {
		tr := tracetest.Generate(shape, seed)
		for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
			for _, ranks := range []int{4, 8} {
				o := options(attention, ranks)
				o.PreserveGroups = true
				solved := solve(t, tr, o)
				o.Algorithm = placement.ContiguousAlgorithm
				plain := solve(t, tr, o).Report.LAR
				if solved.Report.LAR < plain {
					t.Errorf("seed %d, %s, EP %d: %v; contiguous is %v", seed, attention, ranks, solved.Report.LAR, plain)
				}
				// Related experts alternate within a group: with two ranks per group the gain is large.
				if ranks == 8 && (solved.FallBack != "" || solved.Report.LAR < plain*1.1) {
					t.Errorf("seed %d, %s: %v, contiguous is %v; %s", seed, attention, solved.Report.LAR, plain, solved.FallBack)
				}
				t.Logf("seed %d, %s, EP %d: %.4f, contiguous %.4f; %s", seed, attention, ranks, solved.Report.LAR, plain, solved.FallBack)
			}
		}
	}
}
