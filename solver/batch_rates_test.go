// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"math"
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// TestBatchRates verifies that the rates of a plan rise with the size of batches, that the rate at 4,096 tokens follows
// from its neighbours, and that attention DP has none.
func TestBatchRates(t *testing.T) {
	recorded, err := trace.Open(t.Context(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Attention: placement.TensorParallel, Ranks: 4, TrainPercent: 20, Seed: 1, Algorithm: placement.Auto, Objective: placement.Activation, Forecast: Table}
	solved, err := Solve(t.Context(), recorded.WithLayers([]int{0, 3}), o)
	if err != nil {
		t.Fatal(err)
	}
	rates, err := BatchRates(t.Context(), recorded.WithLayers([]int{0, 3}), solved, o)
	if err != nil || len(rates) != len(batchRateSizes) {
		t.Fatalf("%v, %v; want %d sizes", rates, err, len(batchRateSizes))
	}
	for i := range rates[1:] {
		if rates[i].LAR >= rates[i+1].LAR {
			t.Errorf("%v is not below %v", rates[i], rates[i+1])
		}
	}
	if got := RateAt(rates, []int{4096}); math.Abs(got/solved.Report.LAR-1) > 0.02 {
		t.Errorf("the rate at 4,096 tokens is %.4f by its neighbours %v, and %.4f in the report", got, rates, solved.Report.LAR)
	}
	o.Attention = placement.DataParallel
	if rates, err := BatchRates(t.Context(), recorded, &Solution{Plan: &Plan{Attention: placement.DataParallel}}, o); rates != nil || err != nil {
		t.Errorf("attention DP: %v, %v; want none", rates, err)
	}
}

// TestRateAt verifies the interpolation between sizes, the limits outside of them, and that large batches have more activations.
func TestRateAt(t *testing.T) {
	rates := []BatchRate{{32, 0.4}, {128, 0.5}, {512, 0.8}}
	for _, test := range []struct {
		sizes []int
		want  float64
	}{
		{[]int{1}, 0.4}, {[]int{32}, 0.4}, {[]int{64}, 0.45}, {[]int{128}, 0.5}, {[]int{256}, 0.65}, {[]int{512}, 0.8}, {[]int{1 << 20}, 0.8},
		{[]int{64, 192}, (0.45 + 3*(0.5+0.3*math.Log(1.5)/math.Log(4))) / 4},
	} {
		if got := RateAt(rates, test.sizes); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("at %v: %v; want %v", test.sizes, got, test.want)
		}
	}
}
