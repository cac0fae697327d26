// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"encoding/json"
	"math"
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/tier"
)

func openTiny(t *testing.T) *trace.Trace {
	t.Helper()
	recorded, err := trace.Open(context.Background(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	return recorded
}

// someLayers returns a trace with half of its layers in the commit tier. The time of a solve is proportional to the
// number of layers. Fewer requests would not shorten it: small profiles are searched longer.
func someLayers(tr *trace.Trace) *trace.Trace {
	n := len(tr.Model.Layers)
	layers := make([]int, tier.Choose(n/2, n, n))
	for i := range layers {
		layers[i] = i
	}
	return tr.WithLayers(layers)
}

// Locality saves time in both attention modes.
func TestWorthOfALocalPlan(t *testing.T) {
	recorded := openTiny(t)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := Options{Ranks: 4, Attention: attention, Algorithm: placement.Auto, Forecast: Table, TrainPercent: 80, Seed: 1, BatchTokens: []int{4096}}
		s, err := Solve(t.Context(), recorded, o)
		if err != nil {
			t.Fatal(err)
		}
		w, err := WorthOf(t.Context(), recorded, s, o, 0)
		if err != nil {
			t.Fatal(err)
		}
		if w.LayerUS >= w.BaselineLayerUS || w.LayerUS < w.BaselineLayerUS/2 || w.Low > w.SavedPercent || w.High < w.SavedPercent {
			t.Errorf("attention %s: %+v", attention, w)
		}
	}
}

// With the sizes of a large model, the placement with the highest local activation rate is not the fastest, because the
// slowest rank decides. A search by time is faster than this placement and than the default one, and records its
// candidates.
func TestTimeObjectiveBeatsActivation(t *testing.T) {
	recorded := openTiny(t)
	recorded.Model.Config = widened(t, recorded.Model.Config, 2048, 768)
	recorded.Model.HiddenSize = 2048
	worth := func(objective placement.Objective) (*Solution, *Worth) {
		o := Options{Ranks: 8, Attention: placement.DataParallel, Algorithm: placement.Auto, Forecast: Table, TrainPercent: 80, Seed: 1, Objective: objective, BatchTokens: []int{65536}}
		s, err := Solve(t.Context(), recorded, o)
		if err != nil {
			t.Fatal(err)
		}
		w, err := WorthOf(t.Context(), recorded, s, o, DefaultMinimumGainPercent)
		if err != nil {
			t.Fatal(err)
		}
		return s, w
	}
	timed, byTime := worth(placement.Time)
	_, byActivation := worth(placement.Activation)
	if byTime.LayerUS >= byActivation.LayerUS || byTime.LayerUS > byTime.BaselineLayerUS {
		t.Errorf("by time %+v; by activation %+v", byTime, byActivation)
	}
	if len(timed.Plan.Front) < 3 || timed.Plan.Chosen == "" {
		t.Errorf("the front is %+v, chosen is %q", timed.Plan.Front, timed.Plan.Chosen)
	}
}

// widened returns a model's configuration with other sizes.
func widened(t *testing.T, config string, hidden, expert int) string {
	t.Helper()
	fields := map[string]any{}
	if err := json.Unmarshal([]byte(config), &fields); err != nil {
		t.Fatal(err)
	}
	fields["hidden_size"], fields["moe_intermediate_size"] = hidden, expert
	text, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A batch size listed three times counts three times.
func TestRepeatedBatchSizes(t *testing.T) {
	recorded := openTiny(t)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := Options{Ranks: 4, Attention: attention, Algorithm: placement.KMeans2D, Forecast: Table, TrainPercent: 80, Seed: 1, BatchTokens: []int{1024, 65536, 1024, 1024}}
		s, err := Solve(t.Context(), recorded, o)
		if err != nil {
			t.Fatal(err)
		}
		trial, err := TrialOf(t.Context(), recorded, s, o)
		if err != nil {
			t.Fatal(err)
		}
		small, large := trial.At(1024), trial.At(65536)
		want := .75*small.Saved() + .25*large.Saved()
		if got := trial.Worth(0, o.BatchTokens...); math.Abs(got.BaselineLayerUS-got.LayerUS-want) > 1e-6*math.Abs(want) || len(trial.scores) > 2 {
			t.Errorf("attention %s: %v µs saved from %d scores, want %v", attention, got.BaselineLayerUS-got.LayerUS, len(trial.scores), want)
		}
	}
}
