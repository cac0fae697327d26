// SPDX-License-Identifier: Apache-2.0

package expertload

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/observation/lar"
)

// small is a model with experts in its second layer only.
var small = lar.Shape{Layers: 2, MoELayers: []int{1}, Experts: 4, ExpertsPerToken: 1}

// tokens returns the experts of tokens in the second layer, with the given count of each expert.
func tokens(counts ...int) []int32 {
	var experts []int32
	for expert, count := range counts {
		for range count {
			experts = append(experts, 0, int32(expert)) // the first layer is dense, and its value is meaningless
		}
	}
	return experts
}

// add counts the activations of a request.
func add(t testing.TB, w *Window, model string, shape lar.Shape, experts []int32) {
	t.Helper()
	at, err := lar.Contiguous(shape, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	counts := NewCounts(shape)
	if _, err := lar.CountActivations(experts, shape, at, counts); err != nil {
		t.Fatal(err)
	}
	w.Add(model, shape, counts)
}

// clock returns a window with a clock that the test sets.
func clock(series int) (*Window, *time.Time) {
	now := time.Unix(1_700_000_000, 0)
	w := New(series)
	w.now = func() time.Time { return now }
	return w, &now
}

func compare(t *testing.T, w *Window, want string, names ...string) {
	t.Helper()
	if err := testutil.CollectAndCompare(w, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

const extremeHelp = "# HELP semmoe_extreme_expert_load_ratio Activations divided by the mean of the layer, for the experts with the highest and the lowest ratio in all MoE layers (--expert-load-series of each), for requests sampled in the last 5 to 10 minutes.\n" +
	"# TYPE semmoe_extreme_expert_load_ratio gauge\n"

func TestLoads(t *testing.T) {
	w, _ := clock(1)
	add(t, w, "m", small, tokens(150, 100, 60, 40))
	add(t, w, "m", small, append(tokens(50, 0, 0, 0), 0, 4, 0, -1)) // a shared expert, and an invalid id
	compare(t, w, extremeHelp+`
semmoe_extreme_expert_load_ratio{expert="0",extreme="highest",layer="1"} 2
semmoe_extreme_expert_load_ratio{expert="3",extreme="lowest",layer="1"} 0.4
# HELP semmoe_expert_load_ratio Distribution, over the experts of all MoE layers, of their activations divided by the mean of the layer, for requests sampled in the last 5 to 10 minutes. A snapshot: use its buckets without rate.
# TYPE semmoe_expert_load_ratio histogram
semmoe_expert_load_ratio_bucket{le="0.1"} 0
semmoe_expert_load_ratio_bucket{le="0.25"} 0
semmoe_expert_load_ratio_bucket{le="0.5"} 1
semmoe_expert_load_ratio_bucket{le="0.75"} 2
semmoe_expert_load_ratio_bucket{le="1"} 3
semmoe_expert_load_ratio_bucket{le="1.25"} 3
semmoe_expert_load_ratio_bucket{le="1.5"} 3
semmoe_expert_load_ratio_bucket{le="2"} 4
semmoe_expert_load_ratio_bucket{le="3"} 4
semmoe_expert_load_ratio_bucket{le="5"} 4
semmoe_expert_load_ratio_bucket{le="10"} 4
semmoe_expert_load_ratio_bucket{le="+Inf"} 4
semmoe_expert_load_ratio_sum 4
semmoe_expert_load_ratio_count 4
# HELP semmoe_layer_group_expert_imbalance_ratio Activations of the most used expert of a layer divided by the mean of its experts, as the mean over a group of consecutive MoE layers (group 0 has the first layers), for requests sampled in the last 5 to 10 minutes.
# TYPE semmoe_layer_group_expert_imbalance_ratio gauge
semmoe_layer_group_expert_imbalance_ratio{group="0"} 2
`)
}

// TestFewActivationsAreNotReported checks that a layer with few activations, which look uneven by chance, is omitted,
// and other layers are reported.
func TestFewActivationsAreNotReported(t *testing.T) {
	w, _ := clock(5)
	add(t, w, "m", small, tokens(2*minMean, minMean, minMean-1, 0))
	if n := testutil.CollectAndCount(w); n != 0 {
		t.Errorf("%d metrics of too few activations", n)
	}
	add(t, w, "m", small, tokens(0, 0, 1, 0))
	if n := testutil.CollectAndCount(w); n == 0 {
		t.Error("enough activations are not reported")
	}
	// A token with an expert twice in one layer was never recorded.
	two := lar.Shape{Layers: 1, MoELayers: []int{0}, Experts: 2, ExpertsPerToken: 2}
	w, _ = clock(1)
	for range 10 * minMean {
		add(t, w, "m", two, []int32{0, 0})
	}
	if n := testutil.CollectAndCount(w); n != 0 {
		t.Errorf("%d metrics of what was never recorded", n)
	}
}

// TestStaleSeriesAreRemoved checks that counts older than two buckets are dropped, and so are the series of experts
// that are no longer at an end.
func TestStaleSeriesAreRemoved(t *testing.T) {
	w, now := clock(1)
	series := func(highest, lowest string) string {
		return extremeHelp + "semmoe_extreme_expert_load_ratio{" + highest + "\nsemmoe_extreme_expert_load_ratio{" + lowest + "\n"
	}
	const name = "semmoe_extreme_expert_load_ratio"
	add(t, w, "m", small, tokens(400, 0, 100, 100))
	before := series(`expert="0",extreme="highest",layer="1"} 2.6666666666666665`, `expert="1",extreme="lowest",layer="1"} 0`)
	compare(t, w, before, name)
	*now = now.Add(period)
	compare(t, w, before, name) // it is in the previous bucket
	add(t, w, "m", small, tokens(0, 400, 100, 100))
	compare(t, w, series(`expert="1",extreme="highest",layer="1"} 1.3333333333333333`, `expert="2",extreme="lowest",layer="1"} 0.6666666666666666`), name)
	*now = now.Add(period)
	compare(t, w, series(`expert="1",extreme="highest",layer="1"} 2.6666666666666665`, `expert="0",extreme="lowest",layer="1"} 0`), name)
	*now = now.Add(2 * period)
	if n := testutil.CollectAndCount(w); n != 0 {
		t.Errorf("%d metrics of what was counted long ago", n)
	}
}

// TestSeriesAreBounded checks that the number of series does not depend on the model.
func TestSeriesAreBounded(t *testing.T) {
	large := lar.Shape{Layers: 61, Experts: 256, ExpertsPerToken: 8}
	for layer := 3; layer < large.Layers; layer++ {
		large.MoELayers = append(large.MoELayers, layer)
	}
	row := make([]int32, large.Layers*large.ExpertsPerToken)
	for asked, want := range map[int]int{-1: 0, 0: 0, 5: 10, 50: 100, 1000: 100} {
		w, _ := clock(asked)
		for token := range minMean * large.Experts / large.ExpertsPerToken {
			for i := range row {
				row[i] = int32((token*large.ExpertsPerToken + i%large.ExpertsPerToken) % large.Experts)
			}
			add(t, w, "m", large, row)
		}
		if n := testutil.CollectAndCount(w, "semmoe_extreme_expert_load_ratio"); n != want {
			t.Errorf("--expert-load-series %d: %d series, want %d", asked, n, want)
		}
		if all := testutil.CollectAndCount(w); all != want+1+4 {
			t.Errorf("--expert-load-series %d: %d metrics, want %d", asked, all, want+5)
		}
	}
	// No expert is at both ends.
	w, _ := clock(MaxSeries)
	add(t, w, "m", small, tokens(400, 300, 200, 100))
	if n := testutil.CollectAndCount(w, "semmoe_extreme_expert_load_ratio"); n != 4 {
		t.Errorf("%d series of 4 experts", n)
	}
	// An invalid shape that a pod declares takes no memory.
	huge := lar.Shape{Layers: 4096, Experts: 1 << 16, ExpertsPerToken: 1}
	for layer := range huge.Layers {
		huge.MoELayers = append(huge.MoELayers, layer)
	}
	w, _ = clock(1)
	add(t, w, "m", huge, make([]int32, huge.Layers))
	if w.current != nil || NewCounts(huge) != nil {
		t.Errorf("%d counts are kept", len(w.current))
	}
}

// TestAnotherModel checks that while two models serve, one is counted, and the other replaces it once the first has no
// more requests.
func TestAnotherModel(t *testing.T) {
	w, now := clock(1)
	const name = "semmoe_extreme_expert_load_ratio"
	add(t, w, "a", small, tokens(400, 0, 0, 0))
	for range 3 {
		*now = now.Add(period / 2)
		add(t, w, "b", small, tokens(0, 0, 0, 400))
		add(t, w, "a", small, tokens(400, 0, 0, 0))
	}
	want := func(highest, lowest string) string {
		return extremeHelp + name + `{expert="` + highest + `",extreme="highest",layer="1"} 4` + "\n" + name + `{expert="` + lowest + `",extreme="lowest",layer="1"} 0` + "\n"
	}
	compare(t, w, want("0", "1"), name)
	*now = now.Add(period)
	add(t, w, "b", small, tokens(0, 0, 0, 400))
	compare(t, w, want("3", "0"), name)
	if problems, err := testutil.CollectAndLint(w); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	prometheus.NewPedanticRegistry().MustRegister(w)
}

// BenchmarkCount measures the cost of counting each expert of a sampled request of 1,000 tokens, in addition to
// counting locality.
func BenchmarkCount(b *testing.B) {
	shape := lar.Shape{Layers: 48, Experts: 128, ExpertsPerToken: 8}
	for layer := range shape.Layers {
		shape.MoELayers = append(shape.MoELayers, layer)
	}
	experts := make([]int32, 1000*shape.Layers*shape.ExpertsPerToken)
	for i := range experts {
		experts[i] = int32((i*7 + i%shape.ExpertsPerToken) % shape.Experts)
	}
	at, err := lar.Contiguous(shape, 8, 0)
	if err != nil {
		b.Fatal(err)
	}
	w := New(DefaultSeries)
	b.Run("local only", func(b *testing.B) {
		for b.Loop() {
			if _, err := lar.CountActivations(experts, shape, at, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("each expert", func(b *testing.B) {
		for b.Loop() {
			counts := NewCounts(shape)
			if _, err := lar.CountActivations(experts, shape, at, counts); err != nil {
				b.Fatal(err)
			}
			w.Add("m", shape, counts)
		}
	})
}
