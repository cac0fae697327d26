// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// A schedule requires a trace with the model's shape.
func TestScheduleLayers(t *testing.T) {
	recorded, err := trace.Open(t.Context(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	machines, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	p := &solver.Plan{Placement: &placement.Placement{Ranks: 4, Experts: 32, SlotsPerRank: 9}}
	first, err := solver.ScheduleLayers(&recorded.Model, p, 0.4, machines, 0)
	if err != nil || first == nil {
		t.Fatalf("%+v, %v", first, err)
	}
	if first.Ranks != 4 || first.LAR != 0.4 || first.Model.Experts != 32 || first.Model.TopK != 4 || first.Model.MoELayers != len(recorded.Model.Layers) || first.Model.Hidden != recorded.Model.HiddenSize {
		t.Errorf("the schedule is for %+v", first)
	}
	again, err := solver.ScheduleLayers(&recorded.Model, p, 0.4, machines, 0)
	if diff := cmp.Diff(first, again); diff != "" || err != nil {
		t.Errorf("the same inputs lead to another schedule, error %v:\n%s", err, diff)
	}
	machines.Ranks = 2
	spread, err := solver.ScheduleLayers(&recorded.Model, p, 0.4, machines, 2)
	if err != nil || spread.Shared[0].Ungrouped <= first.Shared[0].Ungrouped || spread.Disaggregated[0].TokensPerSecond >= first.Disaggregated[0].TokensPerSecond {
		t.Errorf("on two nodes exchanges take no longer than on one: error %v", err)
	}
	p.RanksPerNode = 2
	if schedule, err := solver.ScheduleLayers(&recorded.Model, p, 0.4, machines, 0); err != nil || cmp.Diff(spread, schedule) != "" {
		t.Errorf("the nodes that the plan is for are not taken: error %v", err)
	}
	p.RanksPerNode = 0
	for name, config := range map[string]string{"no configuration": "", "no heads": strings.ReplaceAll(recorded.Model.Config, "num_attention_heads", "attention_heads"), "no JSON": "{"} {
		m := recorded.Model
		m.Config = config
		if s, err := solver.ScheduleLayers(&m, p, 0.4, machines, 0); s != nil || err != nil {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}
	p.Placement.Ranks, p.Placement.SlotsPerRank = 1, 32
	if s, err := solver.ScheduleLayers(&recorded.Model, p, 1, machines, 0); s != nil || err != nil {
		t.Errorf("one rank: %+v, %v", s, err)
	}
}

// If all activations are local, the mean over any number of layers is 1, and a schedule can be computed from it.
// Without a limit, 48 times 1/48 would exceed 1 by rounding.
func TestSchedulesOfLocalPlans(t *testing.T) {
	const experts, requests, tokens = 4, 40, 20
	for _, layers := range []int{36, 48, 58} {
		tr := &trace.Trace{Offsets: []int64{0}, Model: trace.Model{
			Type: "local", Experts: experts, TopK: 2, Vocabulary: 2, HiddenLayers: layers, HiddenSize: 64,
			Config: `{"num_attention_heads":4,"head_dim":16,"moe_intermediate_size":32,"intermediate_size":64}`,
		}}
		for l := range layers {
			tr.Model.Layers = append(tr.Model.Layers, l)
		}
		for r := range requests {
			kind := uint16(r % 2)
			for range tokens {
				tr.Tokens = append(tr.Tokens, int32(kind))
				for range layers {
					tr.Experts = append(tr.Experts, 2*kind, 2*kind+1)
				}
			}
			tr.Offsets, tr.Documents = append(tr.Offsets, int64(len(tr.Tokens))), append(tr.Documents, int32(r/2))
		}
		for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
			o := options(attention, 2)
			o.Algorithm = placement.ContiguousAlgorithm
			s := solve(t, tr, o)
			if attention == placement.TensorParallel && s.Report.LAR < 1-1e-9 {
				t.Errorf("%d layers: local activation rate %v", layers, s.Report.LAR)
			}
			if made, err := solver.ScheduleLayers(&tr.Model, s.Plan, s.Report.LAR, hardware.DefaultProfile(), 0); err != nil || made == nil {
				t.Errorf("%d layers, %s: %v", layers, attention, err)
			}
			for name, share := range map[string]float64{"baseline": s.Report.BaselineLAR, "oracle": s.Report.OracleLAR, "bound": s.Report.UpperBound, "nodes": s.Report.NodeLAR} {
				if share > 1 {
					t.Errorf("%d layers, %s: the share %s is %v", layers, attention, name, share)
				}
			}
		}
	}
}
