// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/trace"
)

// plain returns a profile for computation by hand: reading and moving cost nothing, a product of a million weights and
// rows takes 2 µs.
func plain() *hardware.Profile {
	gemm := func(start float64) hardware.GEMM {
		return hardware.GEMM{Start: start, BytesPerMicrosecond: 1e15, FlopsPerMicrosecond: 1e6}
	}
	return &hardware.Profile{
		Name: "plain", Grouped: gemm(5), Dense: gemm(3),
		Attention: hardware.Attention{Line: hardware.Line{Start: 7, PerMicrosecond: 1e6}}, AllToAll: straight(10, 100),
		AllReduce: straight(20, 100), ReduceScatter: straight(11, 200), AllGather: straight(12, 200),
	}
}

// straight returns an exchange without separate parameters for large messages.
func straight(start, rate float64) hardware.Exchange {
	return hardware.Exchange{Line: hardware.Line{Start: start, PerMicrosecond: rate}}
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(a), math.Abs(b)) }

// Two ranks of two experts. Rank 0 has two tokens, of experts {0, 2} and {2, 3}; rank 1 has one, of {0, 1}.
func twoRanks() *Counts {
	return &Counts{
		Tokens: []int{2, 1}, Rows: []int{1, 3, 2, 0}, Distinct: []int{1, 2, 1, 0},
		Experts: []int{2, 1, 2, 1},
	}
}

func TestLayerByHand(t *testing.T) {
	topology := OneNode(2, plain())
	for _, c := range []struct {
		messages          Messages
		dispatchBytes     float64
		dispatch, combine float64
	}{
		// The busiest rank sends 3 rows of 50 values: 300 bytes in bf16, at 100 bytes/µs. Two kernels that sum take 3
		// µs each.
		{PerActivation, 2, 10 + 3, 10 + 3 + 6},
		{PerActivation, 1, 10 + 1.5, 10 + 3 + 6},
		// Two of its tokens go to the other rank, one of them for both experts.
		{PerRank, 2, 10 + 2, 10 + 2 + 6},
	} {
		layer := Layer{Hidden: 50, ExpertSize: 40, Experts: 4, Messages: c.messages, DispatchBytes: c.dispatchBytes, Kernels: engineKernels}
		got := layer.Time(plain(), &topology, twoRanks())
		want := LayerTime{
			Gate:     3 + 50*4*2*2/1e6, // two tokens on the fuller rank
			Dispatch: c.dispatch,
			Products: 2*5 + 2*128*50*40*3*2/1e6, // two experts with rows on either rank, a tile each, of three matrices
			Combine:  c.combine,
		}
		if !near(got.Gate, want.Gate) || !near(got.Dispatch, want.Dispatch) || !near(got.Products, want.Products) || !near(got.Combine, want.Combine) {
			t.Errorf("%s, %v bytes: %+v; want %+v", c.messages, c.dispatchBytes, got, want)
		}
	}
}

// A rank without rows computes nothing, and a single rank exchanges nothing.
func TestLayerOfOneRank(t *testing.T) {
	layer, topology := Layer{Hidden: 50, ExpertSize: 40, Experts: 4, Messages: PerActivation, DispatchBytes: 2}, OneNode(1, plain())
	got := layer.Time(plain(), &topology, &Counts{Tokens: []int{1}, Rows: []int{2}, Distinct: []int{1}, Experts: []int{1, 0, 1, 0}})
	if got.Dispatch != 0 || got.Combine != 0 || !near(got.Products, 2*5+2*128*50*40*3*2/1e6) {
		t.Errorf("%+v", got)
	}
	if idle := layer.products(plain(), []int{0, 0}); idle != 0 {
		t.Errorf("an idle rank takes %v µs", idle)
	}
}

// The time of moving rows is the moved bytes divided by the rate of the kernels.
func TestMovesByHand(t *testing.T) {
	p := plain()
	layer, topology := Layer{Hidden: 50, ExpertSize: 40, Experts: 4, Messages: PerActivation, DispatchBytes: 2}, OneNode(2, p)
	p.Grouped.BytesPerMicrosecond = 1e3
	without := layer.Time(p, &topology, twoRanks())
	layer.Kernels = Kernels{Choose: hardware.Line{Start: 4, PerMicrosecond: 2}, Sent: 2, Hidden: 2, Expert: 3, Sums: true}
	got := layer.Time(p, &topology, twoRanks())
	want := LayerTime{
		Gate:     4 + 2*4/2.0,                                     // two tokens with four scores each
		Dispatch: 3 * 2 * 100 / (gathering * 1e3),                 // three rows are read and written
		Products: 3 * (2*100 + 3*80) / (strided * 1e3),            // three rows
		Combine:  2*p.Dense.Start + (3+3+4+2)*100/(gathering*1e3), // rank 0: 3 rows into 3 messages, and 4 of these into 2 tokens
	}
	if !near(got.Gate-without.Gate, want.Gate) || !near(got.Dispatch-without.Dispatch, want.Dispatch) || !near(got.Products-without.Products, want.Products) || !near(got.Combine-without.Combine, want.Combine) {
		t.Errorf("%+v, without moves %+v; want a difference of %+v", got, without, want)
	}
}

func TestExchangeByHand(t *testing.T) {
	// Ranks 0 and 1 form an island, 2 and 3 another. 0 sends 4 messages to 1, 1 to 2 and 2 to 3; 3 sends 5 to 2.
	messages := make([]int, 16)
	messages[0*4+1], messages[0*4+2], messages[0*4+3], messages[3*4+2], messages[1*4+1] = 4, 1, 2, 5, 100
	inside, across := straight(1, 10), straight(2, 1)
	for name, c := range map[string]struct {
		links []Link
		want  float64
	}{
		"one node: rank 0 sends 7":                       {[]Link{{"", 4, inside}}, 1 + 7*20/10.0},
		"two islands: rank 0 sends 3 across":             {[]Link{{"", 2, inside}, {"", 4, across}}, 2 + 3*20},
		"two islands, a fast link across: rank 2 gets 5": {[]Link{{"", 2, inside}, {"", 4, straight(0, 1e9)}}, 1 + 5*20/10.0},
	} {
		topology := Topology{Ranks: 4, Links: c.links}
		if got := topology.Exchange(messages, 20); !near(got, c.want) {
			t.Errorf("%s: %v µs; want %v", name, got, c.want)
		}
	}
}

func TestTopologies(t *testing.T) {
	p := plain()
	for _, c := range []struct {
		topology Topology
		links    []int
		slowest  float64
	}{
		{OneNode(8, p), []int{8}, 100},
		{Islands(8, p), []int{4, 8}, crossingRate},
		{Islands(4, p), []int{4}, islandRate},
		{Islands(6, p), []int{4, 8}, crossingRate},
		{Nodes(16, 8, p), []int{8, 16}, 100},
		{Nodes(8, 8, p), []int{8}, 100},
	} {
		var links []int
		for _, l := range c.topology.Links {
			links = append(links, l.RanksPerGroup)
		}
		if err := c.topology.Check(); err != nil || !slices.Equal(links, c.links) || c.topology.slowest().Rate() != c.slowest {
			t.Errorf("%s of %d ranks: links that join %v, the slowest at %v, error %v", c.topology.Name, c.topology.Ranks, links, c.topology.slowest().Rate(), err)
		}
	}
	line := straight(0, 1)
	for name, bad := range map[string]Topology{
		"no ranks": {Links: []Link{{"", 1, line}}}, "no links": {Ranks: 2}, "too few": {Ranks: 4, Links: []Link{{"", 2, line}}},
		"no multiple": {Ranks: 3, Links: []Link{{"", 2, line}, {"", 3, line}}}, "no rate": {Ranks: 1, Links: []Link{{"", 1, straight(0, 0)}}},
	} {
		if bad.Check() == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

// measuredLayers are measurements of test/gpu/pipelined_moe.py: uncut layers with balanced routing, and exchanges of
// their pieces.
type measuredLayers struct {
	Models map[string]struct {
		Hidden, Inter, Experts, TopK int
	} `json:"models"`
	Layers []struct {
		Model    string
		Tokens   int `json:"tokens_per_rank"`
		Pieces   int
		Channels int
		Us       float64
	} `json:"layers"`
	Pieces []struct {
		Model    string
		Bytes    float64 `json:"remote_bytes_per_rank"`
		Dispatch float64 `json:"dispatch_us"`
	} `json:"pieces"`
}

// exchange fits a line to the exchanges of all models but one, by least squares of relative errors.
func (m *measuredLayers) exchange(but string) hardware.Exchange {
	var one, work, us, works, both float64
	for _, p := range m.Pieces {
		if p.Model == but {
			continue
		}
		w := 1 / (p.Dispatch * p.Dispatch)
		one, work, us, works, both = one+w, work+w*p.Bytes, us+w*p.Dispatch, works+w*p.Bytes*p.Bytes, both+w*p.Bytes*p.Dispatch
	}
	slope := (one*both - work*us) / (one*works - work*work)
	return straight((us-slope*work)/one, 1/slope)
}

// TestMeasuredPieces compares predicted layers with layers measured on two H200. Products use the built-in profile,
// which was fitted to other runs, and exchanges are fitted to the two other models. Mixtral's experts are three times
// as large as any in the fit of the profile: with 256 tokens per rank, where only weights are read, its layer is 20%
// faster than predicted.
func TestMeasuredPieces(t *testing.T) {
	text, err := os.ReadFile("../../pipeline/testdata/pipelined-moe-h200x2.json")
	if err != nil {
		t.Fatal(err)
	}
	m := &measuredLayers{}
	if err := json.Unmarshal(text, m); err != nil {
		t.Fatal(err)
	}
	p, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	var errors []float64
	for _, measured := range m.Layers {
		if measured.Pieces != 1 || measured.Channels != 1 {
			continue
		}
		p.AllToAll = m.exchange(measured.Model)
		model := m.Models[measured.Model]
		const ranks = 2
		experts := model.Experts / ranks
		c := newCounts(ranks, experts)
		for slot := range c.Experts {
			c.Experts[slot] = measured.Tokens * model.TopK * ranks / model.Experts
		}
		for pair := range c.Rows {
			c.Rows[pair] = measured.Tokens * model.TopK / ranks
		}
		layer := Layer{Hidden: model.Hidden, ExpertSize: model.Inter, Experts: model.Experts, Messages: PerActivation, DispatchBytes: bf16, Kernels: Kernels{Hidden: 4, Expert: 5}}
		topology := OneNode(ranks, p)
		us := layer.Time(p, &topology, c)
		e := (us.Total()-us.Gate)/measured.Us - 1 // the measured layer has no gate
		errors = append(errors, math.Abs(e))
		allowed := 0.1
		if model.Inter == 14336 && measured.Tokens == 256 {
			allowed = 0.25
		}
		if math.Abs(e) > allowed {
			t.Errorf("%s, %d tokens a rank: %.0f µs, measured %.0f: %+.1f%%", measured.Model, measured.Tokens, us.Total()-us.Gate, measured.Us, 100*e)
		}
	}
	slices.Sort(errors)
	if len(errors) != 15 || errors[len(errors)/2] > 0.06 {
		t.Errorf("%d layers, errors %.3f", len(errors), errors)
	}
}

//go:generate go run ../../../cmd/semmoe-lab fit --measurements testdata/calibration-h200x2.json --name h200x2 --out testdata/h200x2.json

// measuredRoutes are measurements of test/gpu/moe_layer.py, which describes them: layers with real routes.
type measuredRoutes struct {
	Models map[string]struct {
		Hidden, Inter, Experts, TopK int
	} `json:"models"`
	Cases []measuredLayer `json:"cases"`
}

type measuredLayer struct {
	Model, Method, Exchange string
	Layer, Ranks            int
	BatchTokens             int `json:"batch_tokens"`
	Tokens                  int `json:"tokens_per_rank"`
	Rows, Distinct          [][]int
	Experts                 [][]int `json:"experts_rows"`
	Microseconds            float64 `json:"layer_us"`
	Order                   float64 `json:"order_us"`
	Scatter                 float64 `json:"srs_us"`
	Gate                    float64 `json:"gate_us"`
	Gather                  float64 `json:"sag_us"`
}

// moe returns the time of the gate, the exchanges and the products.
func (l *measuredLayer) moe() float64 { return l.Microseconds - l.Order - l.Scatter - l.Gather }

// readMeasured reads layers measured on two H200, and the profile of that machine, which was fitted without routes.
func readMeasured(t *testing.T, file string) (*measuredRoutes, *hardware.Profile) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	m := &measuredRoutes{}
	if err := json.Unmarshal(text, m); err != nil {
		t.Fatal(err)
	}
	if text, err = os.ReadFile("testdata/h200x2.json"); err != nil {
		t.Fatal(err)
	}
	p, err := hardware.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return m, p
}

// TestMeasuredRoutes compares predicted layers with layers measured on two H200: real routes of two models, 32 to
// 32,768 tokens per rank, seven methods of placement and dispatch, and one row per expert or per rank. The collectives
// around the layer and the reordering of tokens are excluded.
func TestMeasuredRoutes(t *testing.T) {
	for _, file := range []string{"moe-layer-h200x2.json", "moe-layer-plans-h200x2.json"} {
		m, p := readMeasured(t, file)
		// Scores are converted to 32-bit floating-point numbers, weighted and sorted: three kernels; the rate is fitted
		// to the first file.
		kernels := engineKernels
		kernels.Choose, kernels.Expert = hardware.Line{Start: 21, PerMicrosecond: 1 / 6e-5}, 5
		var errors []float64
		for _, c := range m.Cases {
			model, topology := m.Models[c.Model], OneNode(c.Ranks, p)
			layer := Layer{Hidden: model.Hidden, ExpertSize: model.Inter, Experts: model.Experts, Messages: PerActivation, DispatchBytes: bf16, Kernels: kernels}
			if c.Exchange == "distinct" {
				layer.Messages = PerRank
			}
			us := layer.Time(p, &topology, &Counts{
				Tokens: slices.Repeat([]int{c.Tokens}, c.Ranks), Rows: slices.Concat(c.Rows...), Distinct: slices.Concat(c.Distinct...), Experts: slices.Concat(c.Experts...),
			})
			e := us.Total()/c.moe() - 1
			errors = append(errors, math.Abs(e))
			if math.Abs(e) > 0.1 {
				t.Errorf("%s, %d tokens a rank, %s, %s: %+v, %.0f µs in total, measured %.0f: %+.1f%%", c.Model, c.Tokens, c.Method, c.Exchange, us, us.Total(), c.moe(), 100*e)
			}
		}
		slices.Sort(errors)
		n := len(errors)
		if n < 100 || errors[n/2] > 0.04 {
			t.Fatalf("%s: %d layers: the median error is %.3f", file, n, errors[n/2])
		}
		t.Logf("%s: %d layers: errors of %.1f%% in the median, at most %.1f%% in 95 of 100, and %.1f%% in all", file, n, 100*errors[n/2], 100*errors[n*95/100], 100*errors[n-1])
	}
}

// TestPlansAreOrderedAsMeasured compares the model that ranks plans with layers measured under different plans: of any
// two layers that differ by more than 3%, it must predict the faster one. The model contains only exchanges and
// products, so it underestimates times but orders plans.
func TestPlansAreOrderedAsMeasured(t *testing.T) {
	m, p := readMeasured(t, "moe-layer-plans-h200x2.json")
	type batch struct {
		model, exchange string
		tokens, layer   int
	}
	type times struct {
		method              string
		predicted, measured float64
	}
	batches := map[batch][]times{}
	for _, c := range m.Cases {
		model := m.Models[c.Model]
		shape := &trace.Model{TopK: model.TopK, HiddenSize: model.Hidden, Config: fmt.Sprintf(`{"moe_intermediate_size": %d}`, model.Inter)}
		layer := cost.LayerOf(shape, cost.MachinesOf(p, c.Ranks, c.Ranks), c.Ranks, model.Experts/c.Ranks)
		rows, sent, received, loads, all := c.Rows, make([]int, c.Ranks), make([]int, c.Ranks), make([]int, c.Ranks), 0
		if c.Exchange == "distinct" {
			rows = c.Distinct
		}
		for from := range rows {
			for to, n := range rows[from] {
				if from != to {
					sent[from] += n
					received[to] += n
				}
			}
			for _, n := range c.Experts[from] {
				loads[from] += n
				all += n
			}
		}
		activations := float64(c.Tokens * model.TopK)
		busiest := float64(max(slices.Max(sent), slices.Max(received))) / activations
		us := layer.Time(c.BatchTokens, busiest, float64(slices.Max(loads)*c.Ranks)/float64(all)).Total()
		key := batch{c.Model, c.Exchange, c.BatchTokens, c.Layer}
		batches[key] = append(batches[key], times{c.Method, us, c.moe()})
	}
	const unlike = 0.03
	pairs, right := 0, 0
	for key, plans := range batches {
		for i, a := range plans {
			for _, b := range plans[:i] {
				if math.Abs(a.measured-b.measured) <= unlike*min(a.measured, b.measured) {
					continue
				}
				pairs++
				if (a.measured < b.measured) == (a.predicted < b.predicted) {
					right++
				} else {
					t.Logf("%+v: %s and %s: predicted %.0f and %.0f µs, measured %.0f and %.0f", key, a.method, b.method, a.predicted, b.predicted, a.measured, b.measured)
				}
			}
		}
	}
	t.Logf("%d of %d pairs are in the right order", right, pairs)
	if pairs < 100 || right*100 < pairs*95 {
		t.Errorf("%d of %d pairs are in the correct order; want 95%%", right, pairs)
	}
}
