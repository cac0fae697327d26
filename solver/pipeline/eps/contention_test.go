// SPDX-License-Identifier: Apache-2.0

package eps

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// layer identifies a layer that was measured in several cuts.
type layer struct {
	Model   string
	Tokens  int
	OneLink bool
}

// measuredLayers reads the measurements of test/gpu/pipelined_moe.py: each layer uncut and cut by experts.
func measuredLayers(t *testing.T, file string) map[layer][]measurement {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	type row struct {
		Model    string  `json:"model"`
		Tokens   int     `json:"tokens_per_rank"`
		Cut      string  `json:"cut"`
		Pieces   int     `json:"pieces"`
		Channels int     `json:"channels"`
		Time     float64 `json:"us"`
		Dispatch float64 `json:"dispatch_us"`
		Experts  float64 `json:"compute_us"`
		Combine  float64 `json:"combine_us"`
	}
	var all struct {
		Layers []row `json:"layers"`
		Pieces []row `json:"pieces"`
	}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	key := func(r row) string { return fmt.Sprint(r.Model, r.Tokens, r.Cut, r.Pieces) }
	pieces := map[string]Piece{}
	for _, r := range all.Pieces {
		pieces[key(r)] = Piece{r.Dispatch, r.Experts, r.Combine}
	}
	layers := map[layer][]measurement{}
	for _, r := range all.Layers {
		piece, ok := pieces[key(r)]
		if !ok {
			t.Fatalf("%s has no piece for %+v", file, r)
		}
		if r.Cut == "experts" {
			l := layer{r.Model, r.Tokens, r.Channels == 1}
			layers[l] = append(layers[l], measurement{Cut{r.Pieces, piece, l.OneLink}, r.Time})
		}
	}
	return layers
}

// For the layers of a model outside the fit, the chosen number of pieces takes at most 5% longer than the best measured
// number, on NVLink and through host memory.
func TestChosenPiecesAreNearTheBest(t *testing.T) {
	for _, file := range []string{"pipelined-moe-h200x2.json", "pipelined-moe-h200x2-host.json"} {
		layers := measuredLayers(t, file)
		order := slices.SortedFunc(maps.Keys(layers), func(a, b layer) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
		var models []string
		for _, l := range order {
			if !slices.Contains(models, l.Model) {
				models = append(models, l.Model)
			}
		}
		if len(models) != 3 {
			t.Fatalf("%s has models %v", file, models)
		}
		for _, model := range models {
			var fitted []measurement
			for _, l := range order {
				if l.Model != model {
					fitted = append(fitted, layers[l]...)
				}
			}
			c, err := fitContention(fitted)
			if err != nil {
				t.Fatal(err)
			}
			var errors, gains []float64
			worst := 0.0
			for _, l := range order {
				measured := layers[l]
				if l.Model != model {
					continue
				}
				var cuts []Cut
				times, best := map[int]float64{}, math.Inf(1)
				for _, m := range measured {
					cuts = append(cuts, m.Cut)
					times[m.Cut.Pieces] = m.Time
					best = min(best, m.Time)
					errors = append(errors, math.Abs(c.Time(m.Cut)/m.Time-1))
				}
				chosen, err := c.Choose(cuts)
				if err != nil {
					t.Fatal(err)
				}
				worst = max(worst, times[chosen]/best-1)
				gains = append(gains, times[1]/times[chosen])
				if times[chosen] > 1.05*best {
					t.Errorf("%s, %+v: %d pieces take %v µs, the best %v", file, l, chosen, times[chosen], best)
				}
			}
			slices.Sort(errors)
			median := errors[len(errors)/2]
			t.Logf("%s, %s held out: %+v, error %.1f%% in the median, %.1f%% for 19 of 20; what is chosen costs at most %.1f%% more than the best",
				file, model, c, 100*median, 100*errors[len(errors)*19/20], 100*worst)
			t.Logf("%s, %s: layers are %.3f to %.3f times as fast with the chosen number of pieces as in one", file, model, slices.Min(gains), slices.Max(gains))
			if median > 0.12 {
				t.Errorf("%s, %s: median error %v", file, model, median)
			}
		}
	}
}

// The constant H200 equals the fit to its measurements.
func TestBuiltInContention(t *testing.T) {
	var all []measurement
	layers := measuredLayers(t, "pipelined-moe-h200x2.json")
	for _, l := range slices.SortedFunc(maps.Keys(layers), func(a, b layer) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }) {
		all = append(all, layers[l]...)
	}
	c, err := fitContention(all)
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range map[string][2]float64{"experts": {c.Experts, H200.Experts}, "exchange": {c.Exchange, H200.Exchange}, "link": {c.Link, H200.Link}} {
		if math.Abs(values[0]-values[1]) > 0.005 {
			t.Errorf("%s: the fit yields %v, the constant is %v", name, values[0], values[1])
		}
	}
}

// Without contention, a layer takes the time of its stages that cannot overlap.
func TestTimeWithoutContention(t *testing.T) {
	for _, c := range []struct {
		cut  Cut
		want float64
	}{
		{Cut{1, Piece{3, 5, 2}, true}, 10},
		{Cut{4, Piece{1, 5, 1}, false}, 22},  // products never wait
		{Cut{4, Piece{5, 1, 1}, false}, 22},  // sequential dispatches
		{Cut{2, Piece{5, 1, 5}, true}, 20},   // D1 D2 C1 C2
		{Cut{2, Piece{5, 1, 5}, false}, 16},  // D1 D2 with C1, then C2
		{Cut{3, Piece{2, 2, 2}, false}, 10},  // a full pipeline
		{Cut{3, Piece{2, 10, 2}, true}, 34},  // products from 2 to 32
		{Cut{16, Piece{1, 1, 1}, false}, 18}, //
	} {
		if got := (Contention{}).Time(c.cut); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%+v takes %v, want %v", c.cut, got, c.want)
		}
	}
}

func TestContentionSlowsWhatOverlaps(t *testing.T) {
	// The first products begin at 2. The second dispatch overlaps with them and takes 3 instead of 2; in this time 2 of
	// their 4 are done, and they end at 7. The first combine then overlaps with the second products, which end at 12,
	// and the second combine ends at 14.
	cut := Cut{2, Piece{2, 4, 2}, true}
	got := Contention{Experts: 0.5, Exchange: 0.5}.Time(cut)
	if math.Abs(got-14) > 1e-9 {
		t.Errorf("%v, want 14", got)
	}
	// Two concurrent exchanges at half rate take as long as two sequential ones, without other load.
	both, turns := Contention{Link: 1}.Time(Cut{8, Piece{5, 0.001, 5}, false}), Contention{}.Time(Cut{8, Piece{5, 0.001, 5}, true})
	if math.Abs(both/turns-1) > 0.01 {
		t.Errorf("concurrent %v, sequential %v", both, turns)
	}
}

func TestContentionRefuses(t *testing.T) {
	uncut := Cut{1, Piece{1, 1, 1}, true}
	if _, err := (Contention{}).Choose([]Cut{{2, uncut.Piece, true}}); err == nil || !strings.Contains(err.Error(), "the 1 cuts do not include the layer in one piece") {
		t.Errorf("no uncut layer: %v", err)
	}
	if _, err := fitContention([]measurement{{uncut, 3}}); err == nil || !strings.Contains(err.Error(), "at least 6") {
		t.Errorf("nothing cut: %v", err)
	}
	if _, err := fitContention([]measurement{{uncut, 0}}); err == nil || !strings.Contains(err.Error(), "all must be above 0") {
		t.Errorf("no time: %v", err)
	}
	if n, err := (Contention{}).Choose([]Cut{{2, Piece{1, 1, 1}, true}, {1, Piece{1, 1, 1}, true}}); n != 1 || err != nil {
		t.Errorf("no gain: %d pieces, %v", n, err)
	}
}

// measurement is the measured duration of a layer.
type measurement struct {
	Cut  Cut
	Time float64
}

// fitContention fits the contention to measured layers. It minimises the mean squared logarithm of the relative error
// by coordinate descent with decreasing steps.
func fitContention(measured []measurement) (Contention, error) {
	cut := 0
	for i, m := range measured {
		if m.Cut.Pieces < 1 || !(m.Time > 0) || !(m.Cut.Piece.Dispatch > 0) || !(m.Cut.Piece.Experts > 0) || !(m.Cut.Piece.Combine > 0) {
			return Contention{}, fmt.Errorf("layer %d is %+v; all must be above 0", i, m)
		}
		if m.Cut.Pieces > 1 {
			cut++
		}
	}
	if cut < 6 {
		return Contention{}, fmt.Errorf("there are %d layers in more than one piece; at least 6 are needed", cut)
	}
	loss := func(values [3]float64) float64 {
		sum, c := 0.0, Contention{values[0], values[1], values[2]}
		for _, m := range measured {
			e := math.Log(c.Time(m.Cut) / m.Time)
			sum += e * e
		}
		return sum
	}
	values := [3]float64{0.2, 0.5, 0.5}
	smallest := loss(values)
	for step := 0.25; step > 0.002; {
		improved := false
		for i := range values {
			for _, change := range []float64{step, -step} {
				next := values
				next[i] = max(0, next[i]+change)
				if l := loss(next); l < smallest {
					values, smallest, improved = next, l, true
				}
			}
		}
		if !improved {
			step /= 2
		}
	}
	return Contention{values[0], values[1], values[2]}, nil
}
