// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// clustered returns a trace in which every token (attention tp) or request (dp) has a kind, and activates only experts
// of the cluster of its kind.
func clustered(groups, kinds int, attention placement.Attention, cluster func(kind, layer int) []int) *trace.Trace {
	shape := tracetest.Shape{
		Experts: testExperts, TopK: 2, Layers: 2, Vocabulary: 60, Domains: kinds, DocumentsPerDomain: 20, RequestsPerDocument: 2, TokensPerRequest: 60,
		Noise: 100, Groups: groups,
	}
	t := tracetest.Generate(shape, 1)
	for r := range t.Requests() {
		for position := int(t.Offsets[r]); position < int(t.Offsets[r+1]); position++ {
			kind := int(t.Tokens[position]) % kinds
			if attention == placement.DataParallel {
				// The request's tokens determine its kind. Requests are routed only by tokens.
				kind = int(t.Domains[r])
				t.Tokens[position] += int32(kind - int(t.Tokens[position])%kinds)
			}
			for l := range shape.Layers {
				experts := cluster(kind, l)
				for k := range shape.TopK {
					t.Row(position, l)[k] = uint16(experts[(position+k)%len(experts)])
				}
			}
		}
	}
	return t
}

// TestSolvedPermutationKeepsGroups applies solved plans to a checkpoint with a gate that chooses groups. The default
// placement splits all clusters. Plans that preserve groups are accepted, and a plan that does not is refused.
func TestSolvedPermutationKeepsGroups(t *testing.T) {
	everyOther := func(kind, layer int) []int {
		// The groups change places from layer to layer, and so do the clusters of a group.
		first := (kind/2+layer)%2*6 + (kind+layer)%2
		return []int{first, first + 2, first + 4}
	}
	for name, test := range map[string]struct {
		groups, ranks int
		attention     placement.Attention
		preserve      bool
		cluster       func(kind, layer int) []int
		want          string
	}{
		"whole groups on ranks": {4, 2, placement.TensorParallel, true, func(kind, _ int) []int {
			return []int{kind * 3, kind*3 + 1, kind*3 + 2, kind*3 + 6, kind*3 + 7, kind*3 + 8}
		}, ""},
		"a group on each rank": {4, 4, placement.DataParallel, true, func(kind, layer int) []int {
			group := (kind + layer) % 4
			return []int{group * 3, group*3 + 1, group*3 + 2}
		}, ""},
		"groups over ranks, tp": {2, 4, placement.TensorParallel, true, everyOther, ""},
		"groups over ranks, dp": {2, 4, placement.DataParallel, true, everyOther, ""},
		"groups not preserved": {4, 4, placement.TensorParallel, false, func(kind, _ int) []int {
			return []int{kind, kind + 4, kind + 8}
		}, "solve with --preserve-groups"},
	} {
		t.Run(name, func(t *testing.T) {
			m := generators["deepseek_v3 in FP8, with groups and multi-token prediction"](7)
			m.config["n_group"], m.config["topk_group"] = test.groups, 1
			solution, err := solver.Solve(t.Context(), clustered(test.groups, test.ranks, test.attention, test.cluster), solver.Options{
				Ranks: test.ranks, Attention: test.attention, Algorithm: placement.Auto, Forecast: solver.Table, PreserveGroups: test.preserve,
				TrainPercent: 50, Seed: 1,
			})
			if err != nil {
				t.Fatal(err)
			}
			artifact, err := plan.Encode(solution.Plan)
			if err != nil {
				t.Fatal(err)
			}
			permutation, err := ParsePermutation(artifact.Files[plan.GatePermutationFile])
			if err != nil {
				t.Fatal(err)
			}
			if solution.FallBack != "" || len(permutation.canonical().Layers) == 0 {
				t.Fatalf("no layer is permuted: %s", solution.FallBack)
			}
			if solution.Report.LAR < 0.8 {
				t.Errorf("local activation rate %v; the clusters were not found: %v", solution.Report.LAR, permutation.Layers)
			}
			out, model := filepath.Join(t.TempDir(), "out"), m.write(t, 40)
			_, err = Run(t.Context(), Options{Model: model, Permutation: permutation, Out: out, Verify: true})
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("error %v; want %q", err, test.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			sameTensors(t, expected(m.tensors, permutation), readAll(t, out))
		})
	}
}
