// SPDX-License-Identifier: Apache-2.0

// Package copyrule compares the local activations that plans count under vllm-ascend's copy rule with a Python
// reimplementation of the rule.
package copyrule

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/engine/vllmascend"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// sums is the output of the Python program.
type sums struct {
	Total     int `json:"total"`
	Hosted    int `json:"hosted"`
	Local     int `json:"local"`
	Elsewhere int `json:"elsewhere"`
}

// served routes the requests in order of arrival with the policy Masked. It returns the number of activations by MoE
// layer, rank and expert, and the sums of the Go implementation.
func served(t *testing.T, tr *trace.Trace, p *solver.Plan, requests []int) (counts [][][]int, want sums) {
	t.Helper()
	scheduler, err := dispatch.NewScheduler(dispatch.Options{Policy: dispatch.Masked, Ranks: p.Placement.Ranks, Cap: 1.15})
	if err != nil {
		t.Fatal(err)
	}
	scores, places := p.Ranks.Forecast(tr), make([]dispatch.Place, p.Placement.Ranks)
	counts = make([][][]int, len(p.Placement.Layers))
	hosts, local := make([][][]int, len(counts)), make([][][]int, len(counts))
	for l := range counts {
		hosts[l], local[l] = p.Placement.Hosts(l), p.Placement.Local(l)
		counts[l] = make([][]int, p.Placement.Ranks)
		for rank := range counts[l] {
			counts[l][rank] = make([]int, p.Placement.Experts)
		}
	}
	on := func(ranks []int, rank int) int {
		for _, r := range ranks {
			if r == rank {
				return 1
			}
		}
		return 0
	}
	for _, r := range requests {
		request := dispatch.Request{Scores: make([]float32, p.Placement.Ranks), Tokens: tr.Length(r)}
		scores.Score(request.Scores, r)
		for rank := range places {
			places[rank] = dispatch.Place{Rank: rank, Outstanding: int64(scheduler.Load(rank))}
		}
		decision := scheduler.Decide(&request, places)
		scheduler.Take(&request, &decision)
		for position := int(tr.Offsets[r]); position < int(tr.Offsets[r+1]); position++ {
			for l := range counts {
				for _, e := range tr.Row(position, l) {
					counts[l][decision.Rank][e]++
					want.Total++
					want.Hosted += on(hosts[l][e], decision.Rank)
					want.Local += on(local[l][e], decision.Rank)
				}
			}
		}
	}
	want.Elsewhere = want.Hosted - want.Local
	return counts, want
}

// TestRankModulo solves plans with redundant experts for vllm-ascend. With a plan for the engine's copy rule, the
// engine sends at most 1% of the activations with a copy on their rank to another rank; with a plan for another rule,
// at least 5%. The Python program must count the same. SEMMOE_COPYRULE_TRACES is a directory with recorded traces, for
// the figures in the docs.
func TestRankModulo(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	type story struct {
		trace             string
		ranks, redundants int
	}
	stories := []story{{"../../solver/testdata/tiny-32e-top4.safetensors.zst", 4, 2}}
	if dir := os.Getenv("SEMMOE_COPYRULE_TRACES"); dir != "" {
		big := filepath.Join(dir, "dsv2-64e-top6.safetensors.zst")
		stories = append(stories, story{big, 8, 2}, story{big, 16, 1})
	}
	for _, s := range stories {
		t.Run(strings.TrimSuffix(filepath.Base(s.trace), ".safetensors.zst")+"/EP"+strconv.Itoa(s.ranks), func(t *testing.T) {
			tr, err := trace.Open(t.Context(), s.trace)
			if err != nil {
				t.Fatal(err)
			}
			for _, rule := range []placement.CopyRule{placement.NearestCopy, vllmascend.Adapter().CopyRule} {
				solution, err := solver.Solve(t.Context(), tr, solver.Options{
					Ranks: s.ranks, Attention: placement.DataParallel, Algorithm: placement.Auto, Forecast: solver.Table, RedundantSlots: s.redundants,
					CopyRule: rule, TrainPercent: 20, Seed: 1,
				})
				if err != nil {
					t.Fatal(err)
				}
				// The engine applies its own rule, independent of the rule that the plan was solved for.
				asEngine := *solution.Plan.Placement
				asEngine.CopyRule = placement.RankModuloCopy
				serving := *solution.Plan
				serving.Placement = &asEngine
				counts, want := served(t, tr, &serving, solution.HeldOut)
				var got sums
				runPython(t, python, solution.Plan, counts, &got)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("rule %q (-Go +Python):\n%s", rule, diff)
				}
				share := float64(got.Elsewhere) / float64(got.Hosted)
				t.Logf("rule %q: plan LAR %.4f; under the engine's rule: local %.4f, with a copy on the rank %.4f, of these %.2f%% sent to another rank", rule,
					solution.Report.LAR, float64(got.Local)/float64(got.Total), float64(got.Hosted)/float64(got.Total), 100*share)
				if rule == placement.RankModuloCopy && share > 0.01 {
					t.Errorf("the engine sends %.2f%% of the activations with a copy on their rank to another rank, want at most 1%%", 100*share)
				}
				if rule == placement.NearestCopy && share < 0.05 {
					t.Errorf("with a plan for another rule, the engine sends %.2f%% to another rank: want at least 5%% for a meaningful test", 100*share)
				}
			}
		})
	}
}

func runPython(t *testing.T, python string, p *solver.Plan, counts [][][]int, into any) {
	t.Helper()
	artifact, err := plan.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "plan")
	if err := plan.Write(dir, artifact, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(counts)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "counts.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	process := exec.Command(python, "rank_modulo.py", dir, file)
	process.Stderr = os.Stderr
	printed, err := process.Output()
	if err == nil {
		err = json.Unmarshal(printed, into)
	}
	if err != nil {
		t.Fatalf("%v: %s", err, printed)
	}
}
