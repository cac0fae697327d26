// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const sizes = `{"hidden_size":1024,"moe_intermediate_size":512}`

// generated returns a small trace of a model with known sizes.
func generated() *trace.Trace {
	t := tracetest.Generate(tracetest.Small, 3)
	t.Model.Config = sizes
	return t
}

// solved solves a plan for a trace, and returns the inputs of its report.
func solved(t *testing.T, tr *trace.Trace, attention placement.Attention, ranks, redundant int) Input {
	t.Helper()
	s, err := solver.Solve(t.Context(), tr, solver.Options{
		Ranks: ranks, Attention: attention, Algorithm: placement.Auto, Forecast: solver.Table, RedundantSlots: redundant, TrainPercent: 40, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	return Input{Name: "a plan", Plan: s.Plan, Digest: strings.Repeat("1f", 32), Trace: tr, Requests: s.HeldOut, BatchTokens: 4096}
}

func built(t *testing.T, in Input) *Data {
	t.Helper()
	d, err := Build(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func rendered(t *testing.T, d *Data) []byte {
	t.Helper()
	var page bytes.Buffer
	if err := Render(&page, d); err != nil {
		t.Fatal(err)
	}
	return page.Bytes()
}

// TestFiguresEqualCostModel compares the report of a recorded trace with package cost.
func TestFiguresEqualCostModel(t *testing.T) {
	recorded, err := trace.Open(t.Context(), "../../solver/testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	tr := recorded.Subset(trace.Shuffled(recorded.AllRequests(), 1)[:44])
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		in := solved(t, tr, attention, 4, 0)
		d := built(t, in)
		o := solver.DefaultEvaluation()
		o.Requests, o.Seed = in.Requests, in.Plan.Seed
		want, err := solver.Evaluate(t.Context(), tr, in.Plan, o)
		if err != nil {
			t.Fatal(err)
		}
		baseline, err := cost.EvaluateBaseline(t.Context(), tr, attention, 4, o)
		if err != nil {
			t.Fatal(err)
		}
		layer := cost.LayerOf(&tr.Model, cost.NodeOf(hardware.DefaultProfile()), 4, 8)
		before, after := layer.TimeOf(4096, &baseline), layer.TimeOf(4096, &want)
		s := d.Score
		lar, kinds, ranks := 0.0, 0.0, 0.0
		for l := range s.Layers {
			lar += s.Layers[l].After / float64(len(s.Layers))
		}
		for _, k := range s.Kinds {
			kinds += k.After * k.Activations
		}
		for _, r := range s.Ranks {
			ranks += r.ServedAfter
		}
		for name, f := range map[string]struct{ got, want float64 }{
			"rate":                    {s.After, want.LAR},
			"rate today":              {s.Before, want.BaselineLAR},
			"oracle":                  {s.Oracle, want.OracleLAR},
			"bound":                   {s.Bound, want.UpperBound},
			"mean over layers":        {lar, want.LAR},
			"mean over kinds":         {kinds, want.LAR},
			"loads of ranks":          {ranks, 4},
			"busiest rank":            {s.ImbalanceAfter, want.ExpertWindowImbalance},
			"time":                    {s.Times.Served.After.Total(), after.Total()},
			"time today":              {s.Times.Served.Before.Total(), before.Total()},
			"time saved":              {s.Times.Served.Saved, before.Total() - after.Total()},
			"time saved in the table": {s.Times.Sizes[3].Saved, before.Total() - after.Total()},
			"experts moved":           {float64(d.Change.Total), float64(placement.Moves(in.today(), in.Plan.Placement))},
			"weights of an expert":    {float64(d.Change.ExpertWeights), float64(cost.ExpertWeights(&tr.Model))},
			"evaluated tokens":        {float64(s.Tokens), float64(tokens(tr, in.Requests))},
		} {
			if math.Abs(f.got-f.want) > 1e-9 {
				t.Errorf("attention %s: %s is %v, want %v", attention, name, f.got, f.want)
			}
		}
		if s.GainError <= 0 || s.GainError > 0.05 || s.Times.Served.Error <= 0 {
			t.Errorf("attention %s: the errors are %v of the rate and %v µs of the time saved", attention, s.GainError, s.Times.Served.Error)
		}
		for _, l := range s.Layers {
			if l.CoactivationAfter <= l.CoactivationBefore {
				t.Errorf("attention %s: layer %d: co-activation relative to chance is %v with the plan, %v today", attention, l.Layer, l.CoactivationAfter, l.CoactivationBefore)
			}
		}
	}
}

func tokens(tr *trace.Trace, requests []int) (n int) {
	for _, r := range requests {
		n += tr.Length(r)
	}
	return n
}

func TestPlanComparedWithItselfSavesNothing(t *testing.T) {
	in := solved(t, generated(), placement.DataParallel, 4, 0)
	in.Current, in.CurrentDigest = in.Plan, in.Digest
	d := built(t, in)
	if d.Change.Total != 0 || d.Score.After != d.Score.Before || d.Score.Times.Served.Saved != 0 || d.Score.Times.Served.Error != 0 || d.Score.Times.PaysFrom != 0 {
		t.Errorf("%d moves, rates %v and %v, %+v", d.Change.Total, d.Score.Before, d.Score.After, d.Score.Times.Served)
	}
	page := string(rendered(t, d))
	for _, want := range []string{"the plan in service, " + in.Digest[:16], "This plan moves no expert and keeps "} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	// There are enough documents for a spread, and the spread of no gain is 0.
	if strings.Contains(page, "spread over documents is omitted") || !strings.Contains(page, "gain &#43;0.0 ± 0.0 points") {
		t.Error("the page has no spread over documents")
	}
}

func TestTimesUseCalibration(t *testing.T) {
	in := solved(t, generated(), placement.TensorParallel, 4, 0)
	slow, nvlink := hardware.Line{Start: 10, PerMicrosecond: 1e3}, cost.NodeOf(hardware.DefaultProfile()).Link
	measured := &hardware.Calibration{GPU: "a slow machine"}
	for bytes := 1e5; bytes < 1e8; bytes *= 3 {
		measured.AllToAll = append(measured.AllToAll, hardware.MeasuredExchange{Bytes: bytes, Microseconds: slow.Microseconds(bytes)})
	}
	fast := built(t, in).Score.Times
	var err error
	if in.Hardware, err = hardware.DefaultProfile().With(measured); err != nil {
		t.Fatal(err)
	}
	d := built(t, in)
	exchange := (fast.Served.After.Exchange - 2*nvlink.Start) * nvlink.PerMicrosecond / 1e3
	if got := d.Score.Times.Served.After.Exchange; math.Abs(got/(exchange+20)-1) > 1e-6 {
		t.Errorf("over a link of 1 GB/s the exchanges take %v µs, want %v", got, exchange+20)
	}
	if page := string(rendered(t, d)); !strings.Contains(page, "a slow machine") || !strings.Contains(d.Summary(), "a slow machine") {
		t.Error("the page or its summary does not name the hardware of the times")
	}
}

// TestExchangeText verifies that the text of an exchange contains all of its lines.
func TestExchangeText(t *testing.T) {
	e := &hardware.Exchange{Line: hardware.Line{Start: 13, PerMicrosecond: 225e3}}
	if got := lines(e); got != "13.0 µs and 225 GB/s" {
		t.Errorf("one line: %q", got)
	}
	e.Large = &hardware.Line{Start: 40, PerMicrosecond: 318e3}
	if got := lines(e); got != "13.0 µs and 225 GB/s, or for large exchanges 40.0 µs and 318 GB/s" {
		t.Errorf("two lines: %q", got)
	}
}

// TestTimeToFirstToken verifies that the time to first token covers all passes and layers, and that the plan only saves
// time of MoE layers.
func TestTimeToFirstToken(t *testing.T) {
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		tr := generated()
		in := solved(t, tr, attention, 4, 0)
		in.Requests = in.Requests[:4] // too few documents for a spread, which would need eight more evaluations
		if d := built(t, in); d.Score.Times.PromptTokens != 0 || d.Score.Times.Served.First != 0 || !strings.Contains(string(rendered(t, d)), "num_attention_heads") {
			t.Errorf("attention %s: without the sizes of attention the time to first token is %v µs, or the page does not report the missing sizes", attention, d.Score.Times.Served.First)
		}
		tr.Model.Config = `{"hidden_size":1024,"moe_intermediate_size":512,"intermediate_size":2048,"num_attention_heads":16}`
		d := built(t, in)
		shape, err := pipeline.ShapeOf(&tr.Model)
		if err != nil {
			t.Fatal(err)
		}
		prompt := tokens(tr, in.Requests) / len(in.Requests)
		for _, size := range d.Score.Times.Sizes {
			pass := pipeline.Pass{Ranks: 4, Tokens: size.BatchTokens, Sequence: prompt, TensorParallel: attention == placement.TensorParallel}
			passes, layers := float64(pass.PassesOfPrompt()), float64(len(tr.Model.Layers))
			for name, f := range map[string]struct{ got, want float64 }{
				"today": {size.First, passes * (shape.OutsideExperts(hardware.DefaultProfile(), pass) + layers*size.Before.Total())},
				"saved": {size.FirstSaved, passes * layers * size.Saved},
				"error": {size.FirstError, passes * layers * size.Error},
			} {
				if math.Abs(f.got-f.want) > 1e-9*math.Abs(f.want) {
					t.Errorf("attention %s, %d tokens per batch: %s: %v, want %v", attention, size.BatchTokens, name, f.got, f.want)
				}
			}
			if math.Abs(size.FirstPercent()) >= math.Abs(size.SavedPercent()) {
				t.Errorf("attention %s, %d tokens per batch: %v%% of the time to first token is saved, want less than the %v%% of an MoE layer", attention, size.BatchTokens, size.FirstPercent(), size.SavedPercent())
			}
		}
		want := fmt.Sprintf("The time to first token of a prompt of %d tokens ", prompt)
		if page := string(rendered(t, d)); !strings.Contains(page, "First token, today") || !strings.Contains(d.Summary(), want) {
			t.Errorf("attention %s: the page has no column for the first token, or the summary is %q", attention, d.Summary())
		}
	}
}

func TestBuildRejectsInvalidInput(t *testing.T) {
	in := solved(t, generated(), placement.DataParallel, 4, 0)
	tp, small := solved(t, generated(), placement.TensorParallel, 4, 0), solved(t, generated(), placement.DataParallel, 2, 0)
	other := tracetest.Small
	other.Layers = 2
	for want, change := range map[string]func(in *Input){
		"attention tp":            func(in *Input) { in.Current = tp.Plan },
		"3 MoE layers on 2 ranks": func(in *Input) { in.Current = small.Plan },
		"batch tokens: 0":         func(in *Input) { in.BatchTokens = 0 },
		"no request":              func(in *Input) { in.Requests = nil },
		"the trace 16 in 2":       func(in *Input) { in.Trace = tracetest.Generate(other, 1) },
		"vocabulary of 200":       func(in *Input) { tr := *in.Trace; tr.Model.Vocabulary = 300; in.Trace = &tr },
	} {
		in := in
		change(&in)
		if _, err := Build(t.Context(), in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

func TestCoactivationByHand(t *testing.T) {
	// Two tokens with experts 0 and 1, one with 2 and 3, one with 0 and 2.
	tr := &trace.Trace{
		Model:  trace.Model{Experts: 4, TopK: 2, Vocabulary: 4, Layers: []int{1}, HiddenLayers: 2},
		Tokens: []int32{0, 0, 1, 2}, Offsets: []int64{0, 2, 3, 4}, Documents: []int32{0, 1, 2},
		Experts: []uint16{0, 1, 0, 1, 2, 3, 0, 2},
	}
	pairs, err := countCoactivations(t.Context(), tr, tr.AllRequests(), placement.TensorParallel, 1)
	if err != nil {
		t.Fatal(err)
	}
	g := &pairs[0]
	// The experts have 3, 2, 2 and 1 activations. The products of all ordered pairs sum to 8² - 18, and there are 8
	// co-activations.
	scale := 8.0 / 46
	for _, c := range []struct {
		e, f int
		want float64
	}{{0, 1, 2 / (scale * 6)}, {1, 0, 2 / (scale * 6)}, {2, 3, 1 / (scale * 2)}, {0, 3, 0}} {
		if got := g.timesChance(c.e, c.f); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("co-activation of experts %d and %d relative to chance is %v, want %v", c.e, c.f, got, c.want)
		}
	}
	if got, want := g.withinRanks([][]int{{0}, {0}, {1}, {1}}), 3/(scale*(6+2)); math.Abs(got-want) > 1e-9 {
		t.Errorf("within ranks: %v, want %v", got, want)
	}
	if got := g.withinRanks([][]int{{0}, {1}, {2}, {3}}); got != 1 {
		t.Errorf("without pairs within ranks: %v, want 1", got)
	}
	requests, err := countCoactivations(t.Context(), tr, tr.AllRequests(), placement.DataParallel, 1)
	if err != nil {
		t.Fatal(err)
	}
	// The first request has two tokens with experts 0 and 1 each: 2·2/2.
	if got := requests[0].count[1]; got != 2 {
		t.Errorf("request count of experts 0 and 1 is %v, want 2", got)
	}
}

func TestDrawTakesMeans(t *testing.T) {
	h := draw(2*maxCells, 2, nil, nil, func(row, column int) float32 {
		if column == 1 {
			return -1
		}
		return float32(row % 2)
	})
	if h.Rows != maxCells || h.Columns != 2 || h.Values[0] != 0.5 || h.Values[1] != -1 {
		t.Errorf("%d × %d cells that begin with %v", h.Rows, h.Columns, h.Values[:2])
	}
	h.Low, h.Top = 0, 1
	for v, want := range map[float32]uint8{-1: 0, 0: 1, 0.5: 8, 1: levels, 7: levels} {
		if got := h.level(v); got != want {
			t.Errorf("the color of %v is %d, want %d", v, got, want)
		}
	}
}

func TestPaletteDarkensEvenly(t *testing.T) {
	luminance := func(i int) float64 {
		r, g, b, _ := palette[i].RGBA()
		return 0.2126*float64(r) + 0.7152*float64(g) + 0.0722*float64(b)
	}
	for i := 2; i < len(palette); i++ {
		if luminance(i) >= luminance(i-1) {
			t.Errorf("color %d is not darker than color %d", i, i-1)
		}
	}
}

func TestNumberFormats(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{count(0), "0"}, {count(999), "999"}, {count(262144), "262,144"}, {count(-1234), "-1,234"}, {count(-123), "-123"},
		{points(-2.34), "−2.3%"}, {points(-0.04), "0.0%"}, {percent(0.2289), "22.9%"}, {plural(1, "rank"), "1 rank"}, {plural(2000, "rank"), "2,000 ranks"},
		{microseconds(12.34), "12.3 µs"}, {microseconds(-258), "−258 µs"}, {microseconds(1910), "1.91 ms"}, {microseconds(45678), "45.7 ms"}, {microseconds(456789), "457 ms"},
		{bytes10(900), "900 bytes"}, {bytes10(53.7e6), "53.7 MB"}, {bytes10(408e6), "408 MB"}, {bytes10(2.5e12), "2.5 TB"}, {short("abc"), "abc"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

func TestVerdicts(t *testing.T) {
	at := func(before, saved, maxSaved, err float64) *Data {
		served := Size{BatchTokens: 4096, Before: cost.LayerTime{Exchange: before}, Saved: saved, MaxSaved: maxSaved, Error: err}
		return &Data{Score: &Score{Times: &Times{Served: served}}}
	}
	for want, d := range map[string]*Data{
		"At 4,096 tokens per batch the plan pays: the modelled time of an MoE layer falls by 20.0% (95% interval: 18.0% to 22.0%).":                                                      at(100, 20, 60, 2),
		"the plan may pay, but the gain is not statistically significant":                                                                                                                at(100, 6, 60, 7),
		"latency dominates: even if every activation were local and all ranks had equal loads, the modelled time of an MoE layer would change by −1.5%; with this plan it falls by 1.0%": at(100, 1, 1.5, 0),
		"the expected gain is too small for a rollout: the modelled time of an MoE layer rises by 2.0% (95% interval: 1.0% to 3.0%); the minimum is a fall of 2%":                        at(100, -2, 30, 1),
		"the expected gain is too small for a rollout: the modelled time of an MoE layer falls by 0.0% (95% interval: −1.0% to 0.9%)":                                                    at(100, -0.04, 30, 0.96),
		"the expected gain is too small for a rollout: the modelled time of an MoE layer rises by 0.5% (95% interval: −0.5% to 1.5%)":                                                    at(100, -0.5, 30, 1),
	} {
		if got := d.verdict(); !strings.Contains(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := (&Data{}).verdict(); got != "" {
		t.Errorf("verdict without times: %q", got)
	}
}

// somePages returns reports with all combinations of parts.
func somePages(t *testing.T) map[string]*Data {
	t.Helper()
	whole := solved(t, generated(), placement.DataParallel, 4, 0)
	tokens := solved(t, generated(), placement.TensorParallel, 4, 0)
	bare := whole
	bare.Trace = nil
	unnamed := generated()
	unnamed.Domains, unnamed.Model.Domains = nil, nil
	few := whole
	few.Requests = whole.Requests[:4]
	nameless := solved(t, unnamed, placement.DataParallel, 8, 0)
	nameless.Trace.Model.Config = "{}"
	return map[string]*Data{
		"dp": built(t, whole), "tp": built(t, tokens), "no trace": built(t, bare), "no kinds, no sizes": built(t, nameless), "few documents": built(t, few),
		"copies": built(t, solved(t, generated(), placement.DataParallel, 4, 2)), "one rank": built(t, solved(t, generated(), placement.TensorParallel, 1, 0)),
		"large": large(),
	}
}

// large returns a report of maximum size. All heat maps are noise, which does not compress.
func large() *Data {
	const layers, experts, ranks, kinds = 61, 256, 64, 20
	random := rand.New(rand.NewPCG(1, 1))
	noise := func(rows, columns int) Heat {
		h := Heat{Rows: rows, Columns: columns, Low: 0, Top: 1}
		for range rows * columns {
			h.Values = append(h.Values, random.Float32())
		}
		for rank := 1; rank < ranks; rank++ {
			h.ColumnBounds = append(h.ColumnBounds, float64(rank)/ranks)
		}
		h.RowBounds = h.ColumnBounds
		return h
	}
	loads := func() []float64 {
		row := make([]float64, ranks)
		for rank := range row {
			row[rank] = random.Float64()
		}
		return row
	}
	s := &Score{Requests: 1e6, Tokens: 1e9, After: 0.4, Before: 0.1, Oracle: 0.5, Bound: 0.6, Documents: true, GainError: 0.001, Ranks: make([]Rank, ranks), Times: &Times{}}
	d := &Data{Name: "large", Digest: strings.Repeat("2e", 32), Attention: placement.DataParallel, Ranks: ranks, Experts: experts, SlotsPerRank: experts / ranks, Layers: layers, Score: s}
	d.Change.Slots = layers * experts
	for l := range layers {
		s.Layers = append(s.Layers, Layer{Layer: l + 3, Before: 0.1, After: random.Float64() / 2, Oracle: 0.5, Bound: 0.6, CoactivationBefore: 1, CoactivationAfter: 2})
		s.LoadBefore, s.LoadAfter = append(s.LoadBefore, loads()), append(s.LoadAfter, loads())
		d.Change.Moves = append(d.Change.Moves, LayerMoves{l + 3, 200})
	}
	for i := range kinds {
		s.Kinds = append(s.Kinds, Kind{Name: fmt.Sprintf("kind %d", i), Activations: 1. / kinds, Before: 0.1, After: 0.4, Ranks: loads()})
	}
	for i, place := range []string{"highest", "median", "lowest"} {
		s.Pictures = append(s.Pictures, Picture{
			Layer: s.Layers[i], Place: place, PairsBefore: noise(maxCells, maxCells), PairsAfter: noise(maxCells, maxCells),
			TokensBefore: noise(maxTokens, maxCells), TokensAfter: noise(maxTokens, maxCells),
		})
	}
	for _, batch := range batchSizes {
		s.Times.Sizes = append(s.Times.Sizes, Size{BatchTokens: batch, Before: cost.LayerTime{Exchange: 1000, Compute: 100}, After: cost.LayerTime{Exchange: 700, Compute: 100}, Saved: 300, Error: 50})
	}
	s.Times.Served = s.Times.Sizes[0]
	return d
}

func TestLargePageIsBelowTwoMegabytes(t *testing.T) {
	if size := len(rendered(t, large())); size > 2e6 {
		t.Errorf("the page has %d bytes", size)
	}
}

func TestPagesAreWellFormedAndAccessible(t *testing.T) {
	for name, d := range somePages(t) {
		page := rendered(t, d)
		for _, problem := range problems(page) {
			t.Errorf("%s: %s", name, problem)
		}
		text := withoutImages(string(page))
		for _, forbidden := range []string{"http:", "https:", "//", "url(", "<script", "ZgotmplZ", "NaN", "Inf", "%!"} {
			if strings.Contains(text, forbidden) {
				t.Errorf("%s: the page has %q", name, forbidden)
			}
		}
	}
}

// withoutImages removes the base64 data of images, which may contain any sequence of letters.
func withoutImages(page string) string {
	var b strings.Builder
	for i, part := range strings.Split(page, `src="data:image/png;base64,`) {
		if i > 0 {
			_, part, _ = strings.Cut(part, `"`)
		}
		b.WriteString(part)
	}
	return b.String()
}

// problems parses a page as XML. It lists syntax errors and accessibility problems.
func problems(page []byte) (out []string) {
	decoder := xml.NewDecoder(bytes.NewReader(page))
	ids, level, landmarks := map[string]bool{}, 0, map[string]int{}
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return append(out, err.Error())
		}
		element, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		attribute := func(name string) string {
			for _, a := range element.Attr {
				if a.Name.Local == name {
					return a.Value
				}
			}
			return ""
		}
		name := element.Name.Local
		landmarks[name]++
		if id := attribute("id"); id != "" {
			if ids[id] {
				out = append(out, "two elements have the id "+id)
			}
			ids[id] = true
		}
		switch {
		case name == "html" && attribute("lang") == "":
			out = append(out, "html has no lang")
		case name == "img" && attribute("alt") == "":
			out = append(out, "an img has no alt")
		case name == "svg" && attribute("aria-hidden") != "true":
			out = append(out, "an svg is not hidden from screen readers")
		case attribute("role") == "img" && attribute("aria-label") == "", attribute("role") == "region" && attribute("aria-label") == "":
			out = append(out, "a "+name+" with a role has no label")
		case name == "section" && !strings.Contains(string(page), `id="`+attribute("aria-labelledby")+`"`):
			out = append(out, "a section has no heading")
		case name == "th" && attribute("scope") == "":
			out = append(out, "a th has no scope")
		case len(name) == 2 && name[0] == 'h' && name[1] >= '1' && name[1] <= '6':
			if now := int(name[1] - '0'); now > level+1 {
				out = append(out, fmt.Sprintf("h%d follows h%d", now, level))
			} else {
				level = now
			}
		}
	}
	for _, once := range []string{"h1", "main", "header", "footer", "title"} {
		if landmarks[once] != 1 {
			out = append(out, fmt.Sprintf("there are %d %s", landmarks[once], once))
		}
	}
	return out
}

// TestCopies verifies that the candidate numbers of copies are drawn and listed. Without candidates only the reason is
// shown.
func TestCopies(t *testing.T) {
	in := solved(t, generated(), placement.DataParallel, 4, 0)
	if page := string(rendered(t, built(t, in))); strings.Contains(page, "Number of copies") {
		t.Error("the page of a plan with a given number of copies has a section on their selection")
	}
	in.Plan.Copies = &solver.Copies{MemoryBytes: 2e9, ExpertBytes: 1e8, Layers: 4, MaxSlots: 5, Chosen: 2, Points: []solver.CopyPoint{
		{LayerUS: 400, LAR: .25, ExpertImbalance: 1.125}, {RedundantSlots: 1, MemoryBytes: 4e8, LayerUS: 350, LAR: .35, ExpertImbalance: 1.2}, {RedundantSlots: 2, MemoryBytes: 8e8, LayerUS: 300, LAR: .45, ExpertImbalance: 1.3},
	}}
	page := rendered(t, built(t, in))
	for _, text := range []string{"2.0 GB per rank: 2 of at most 5 copies", "falls by 25.0% against none", "2 (chosen)</th><td>800 MB</td><td>45.0%</td><td>1.300</td><td>300 µs", "1</th><td>400 MB"} {
		if !strings.Contains(string(page), text) {
			t.Errorf("the page lacks %q", text)
		}
	}
	for _, problem := range problems(page) {
		t.Error(problem)
	}
	in.Plan.Copies = &solver.Copies{MemoryBytes: 2e8, ExpertBytes: 1e8, Layers: 4, Points: in.Plan.Copies.Points[:0]}
	if page := string(rendered(t, built(t, in))); !strings.Contains(page, "too small for one expert in each of the 4 layers") || strings.Contains(page, "Figures by number of copies") {
		t.Error("the page of a plan without memory for copies lacks the reason, or has a table")
	}
}

func TestTextIsEscaped(t *testing.T) {
	const evil = `"><script>alert('x')</script>`
	d := built(t, solved(t, generated(), placement.DataParallel, 4, 0))
	d.Name, d.ModelDigest, d.Algorithm, d.Objective, d.Today = evil, evil, evil, evil, evil
	d.Score.Times.Machines.Profile, d.Score.TraceDigest = evil, evil
	for i := range d.Score.Kinds {
		d.Score.Kinds[i].Name = evil
	}
	page := string(rendered(t, d))
	if strings.Contains(page, "<script") || strings.Count(page, "&lt;script&gt;") < 8 {
		t.Errorf("%d escaped texts, want at least 8; unescaped: %v", strings.Count(page, "&lt;script&gt;"), strings.Contains(page, "<script"))
	}
	for _, problem := range problems([]byte(page)) {
		t.Error(problem)
	}
}

func TestRenderIsDeterministic(t *testing.T) {
	in := solved(t, generated(), placement.TensorParallel, 4, 0)
	first := rendered(t, built(t, in))
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	if !bytes.Equal(first, rendered(t, built(t, in))) {
		t.Error("two pages of the same plan differ")
	}
}

// TestFrontBars checks that candidates are in the order of their times, relative to the slowest one.
func TestFrontBars(t *testing.T) {
	at := func(name string, us float64) solver.FrontPoint {
		return solver.FrontPoint{Name: name, LayerUS: map[string]float64{"4096": us, "16384": us}}
	}
	d := Data{Chosen: "time", Front: []solver.FrontPoint{at("contiguous", 80), at("activation", 100), at("time", 50)}}
	want := []candidateBar{{"time", true, 50, 50}, {"contiguous", false, 80, 80}, {"activation", false, 100, 100}}
	if diff := cmp.Diff(want, d.FrontBars()); diff != "" {
		t.Error(diff)
	}
	if bars := (&Data{}).FrontBars(); len(bars) != 0 {
		t.Errorf("%d bars without candidates", len(bars))
	}
}
