// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"testing"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/lab/simulate"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestOurGoodputIsAtLeastDefault serves a part of a recorded trace on PCIe islands, where exchanges take most of a step. Our
// placement and forecast meet the latency objective at the default's rate or above. Steps have about 1,200 tokens, in which
// latency dominates: rates of plans of equal quality differ by 2%.
func TestOurGoodputIsAtLeastDefault(t *testing.T) {
	if testing.Short() {
		t.Skip("figures are checked without -short")
	}
	tr, err := trace.Open(t.Context(), "../testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	p, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	o := options(placement.TensorParallel, 8)
	methods, heldOut, err := lab.SolveServing(t.Context(), tr, lab.ServingMethods, dispatch.Price, o)
	if err != nil {
		t.Fatal(err)
	}
	outputs, err := simulate.ParseLengths("exp:16")
	if err != nil {
		t.Fatal(err)
	}
	requests, err := (&simulate.Workload{Sources: heldOut, Count: 400, Prompts: simulate.Recorded, Outputs: outputs, Seed: 1}).Draw(tr)
	if err != nil {
		t.Fatal(err)
	}
	// The sizes of Qwen3-30B-A3B, with the experts and layers of the trace.
	shape := pipeline.Shape{
		HiddenLayers: 4, MoELayers: 4, Experts: tr.Model.Experts, TopK: tr.Model.TopK, Hidden: 2048, ExpertSize: 768, Heads: 32, KVHeads: 4, QueryDim: 128, ValueDim: 128,
	}
	r, err := simulate.Compare(t.Context(), tr, methods, requests, []float64{100}, simulate.DefaultGoal, &simulate.Options{
		Attention: placement.TensorParallel, Collective: simulate.ReduceScatter, Shape: shape, Profile: p, Topology: simulate.Islands(8, p),
		Messages: simulate.PerActivation, DispatchBytes: 2, StepTokens: 8192, Running: 1024, CacheTokens: 1 << 20, Cap: 1.15,
	})
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]simulate.Curve{}
	for _, c := range r.Curves {
		byName[c.Method] = c
		t.Logf("%s: %.1f requests a second, local activation rate %.3f, %.0f tokens a step, %+v", c.Method, c.Goodput, *c.Served.LAR, c.Served.StepTokens, c.Served.Step)
	}
	ours, first := byName[string(lab.OurServing)], byName[string(lab.Vanilla)]
	if len(r.Curves) != 4 || ours.Goodput < 0.98*first.Goodput || *ours.Served.LAR < *first.Served.LAR+0.1 {
		t.Errorf("ours serves %.1f requests a second at a local activation rate of %.3f, the default %.1f at %.3f", ours.Goodput, *ours.Served.LAR, first.Goodput, *first.Served.LAR)
	}
}

// Each method has its placement, policy and forecast.
func TestServingMethods(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := options(attention, 4)
		o.RedundantSlots = 1
		methods, heldOut, err := lab.SolveServing(t.Context(), tr, lab.ServingMethods, dispatch.Masked, o)
		if err != nil || len(methods) != 4 || len(heldOut) == 0 || len(heldOut) >= tr.Requests() {
			t.Fatalf("%d methods, %d requests held out, error %v", len(methods), len(heldOut), err)
		}
		for _, m := range methods {
			ours := m.Name == string(lab.OurServing)
			if forecast := m.Requests != nil || m.Tokens != nil; forecast != ours {
				t.Errorf("%s, attention %s: a forecast %t", m.Name, attention, forecast)
			}
			if (m.Policy == dispatch.Masked) != (ours && attention == placement.DataParallel) {
				t.Errorf("%s, attention %s: policy %s", m.Name, attention, m.Policy)
			}
			if copies := m.Placement.Redundant(); copies == (m.Name == string(lab.TunedServing)) {
				t.Errorf("%s, attention %s: copies %t", m.Name, attention, copies)
			}
		}
	}
	if _, err := lab.ParseServingMethod("exflow"); err == nil {
		t.Error("exflow is a method")
	}
	for _, m := range lab.ServingMethods {
		if got, err := lab.ParseServingMethod(string(m)); got != m || err != nil {
			t.Errorf("%s: %s, error %v", m, got, err)
		}
	}
}

// Too many redundant slots are rejected, as by Solve, even by algorithms without support for them.
func TestServingRefusesSlots(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for _, redundant := range []int{-1, tr.Model.Experts} {
		o := options(placement.DataParallel, 4)
		o.RedundantSlots = redundant
		if _, _, err := lab.SolveServing(t.Context(), tr, []lab.ServingMethod{lab.Vanilla, lab.TunedServing}, dispatch.Price, o); err == nil {
			t.Errorf("%d redundant slots are accepted", redundant)
		}
	}
}
