package solver

import (
	"context"
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// What is local saves time, in either mode of attention.
func TestLayerTimes(t *testing.T) {
	recorded, err := trace.Open(context.Background(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := Options{Ranks: 4, Attention: attention, Algorithm: placement.Auto, Forecast: Table, TrainPercent: 80, Seed: 1}
		s, err := Solve(t.Context(), recorded, o)
		if err != nil {
			t.Fatal(err)
		}
		times, err := CompareTimes(t.Context(), recorded, s, o)
		if err != nil {
			t.Fatal(err)
		}
		planned, unplanned := times.Planned.Total(), times.Unplanned.Total()
		if planned >= unplanned || planned < unplanned/2 {
			t.Errorf("attention %s: a layer takes %.1f µs, without a plan %.1f", attention, planned, unplanned)
		}
	}
}
