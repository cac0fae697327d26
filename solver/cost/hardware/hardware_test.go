package hardware

import (
	"encoding/json"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
)

func measurements(t *testing.T) *Calibration {
	t.Helper()
	text, err := os.ReadFile("testdata/h200x4.json")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ParseCalibration(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func builtInProfile(t *testing.T) *Profile {
	t.Helper()
	p, err := BuiltIn(Default)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The built-in profile is what its measurements lead to, and is not written by hand.
func TestBuiltInProfileIsFitted(t *testing.T) {
	got := builtInProfile(t)
	want, err := NewProfile(got.Name, got.MemoryBytes, measurements(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, pair := range map[string][2]float64{
		"grouped: flops":  {got.Grouped.FlopsPerMicrosecond, want.Grouped.FlopsPerMicrosecond},
		"grouped: bytes":  {got.Grouped.BytesPerMicrosecond, want.Grouped.BytesPerMicrosecond},
		"dense: flops":    {got.Dense.FlopsPerMicrosecond, want.Dense.FlopsPerMicrosecond},
		"attention":       {got.Attention.PerMicrosecond, want.Attention.PerMicrosecond},
		"all-to-all":      {got.AllToAll.PerMicrosecond, want.AllToAll.PerMicrosecond},
		"all-reduce":      {got.AllReduce.Start, want.AllReduce.Start},
		"reduce-scatter":  {got.ReduceScatter.Start, want.ReduceScatter.Start},
		"all-gather":      {got.AllGather.Start, want.AllGather.Start},
		"held-out errors": {got.AllToAll.Fit.HeldOutMedianError, want.AllToAll.Fit.HeldOutMedianError},
	} {
		if math.Abs(pair[0]/pair[1]-1) > 1e-6 { // other processors may round otherwise
			t.Errorf("%s is %v; the measurements lead to %v: go generate ./solver/cost/hardware", name, pair[0], pair[1])
		}
	}
	if !reflect.DeepEqual(got.Products, want.Products) {
		t.Error("the products are not those that were measured")
	}
}

// What is promised of the built-in models, on measurements that they have not seen. Of collectives there are five measurements, of which
// the smallest took longer than the next: less is promised of them.
func TestHeldOutErrors(t *testing.T) {
	p := builtInProfile(t)
	for name, c := range map[string]struct {
		fit  Fit
		most float64
	}{
		"grouped": {p.Grouped.Fit, .1}, "dense": {p.Dense.Fit, .1}, "attention": {p.Attention.Fit, .1}, "all-to-all": {p.AllToAll.Fit, .1},
		"all-reduce": {p.AllReduce.Fit, .1}, "reduce-scatter": {p.ReduceScatter.Fit, .1}, "all-gather": {p.AllGather.Fit, .12},
	} {
		if c.fit.HeldOutMedianError > c.most || c.fit.HeldOutMedianError == 0 || len(c.fit.Residuals) != c.fit.Points {
			t.Errorf("%s: held-out median error %v, %d residuals of %d points; allowed is %v", name, c.fit.HeldOutMedianError, len(c.fit.Residuals), c.fit.Points, c.most)
		}
	}
	within, above := 0, 0
	for _, m := range measurements(t).AllToAll {
		e := math.Abs(p.AllToAll.Microseconds(m.Bytes)/m.Microseconds - 1)
		if m.Bytes > 1<<20 {
			above++
			if e <= .15 {
				within++
			}
		}
		if m.Bytes > 32<<20 && e > .15 {
			t.Errorf("an all-to-all of %.0f bytes is modelled %.0f%% off", m.Bytes, 100*e)
		}
	}
	t.Logf("%d of %d all-to-alls above 1 MiB are within 15%%", within, above)
	if within*10 < above*7 {
		t.Errorf("%d of %d all-to-alls above 1 MiB are within 15%%", within, above)
	}
}

// Why a straight line is kept that misses some measured all-to-alls by more than 15%: nothing that schedules can be searched by does better. The
// clock of these measurements was the host's, and the same exchange took up to 1.5 times as long in another batch of measurements.
func TestNoConvexModelIsWithinFifteenPercent(t *testing.T) {
	text, err := os.ReadFile("testdata/h200x4.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		AllToAll []struct {
			Hidden float64 `json:"hidden"`
			Tokens float64 `json:"tokens_per_rank"`
			Bytes  float64 `json:"remote_bytes_per_rank"`
			US     float64 `json:"us"`
		} `json:"all_to_all"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	var ofBytes, ofAll float64
	for _, a := range file.AllToAll {
		for _, b := range file.AllToAll {
			if a.Bytes == b.Bytes && a.Bytes > 1<<20 {
				ofBytes = max(ofBytes, (a.US-b.US)/(a.US+b.US)) // the best function of the bytes misses both by as much
			}
			for _, c := range file.AllToAll {
				if a.Hidden != b.Hidden || b.Hidden != c.Hidden || a.Tokens != b.Tokens || b.Tokens != c.Tokens || !(1<<20 < a.Bytes && a.Bytes < b.Bytes && b.Bytes < c.Bytes) {
					continue
				}
				// Of one batch of rows a convex function is at most the chord at b: (1 - e) b ≤ (1 + e) chord.
				part := (b.Bytes - a.Bytes) / (c.Bytes - a.Bytes)
				chord := a.US + part*(c.US-a.US)
				ofAll = max(ofAll, (b.US-chord)/(b.US+chord))
			}
		}
	}
	t.Logf("above 1 MiB no function of the bytes is within %.1f%% of every point, and none that is convex in them whatever else it knows within %.1f%%", 100*ofBytes, 100*ofAll)
	if ofBytes < .2 || ofAll < .16 {
		t.Errorf("a function of the bytes may be within %v, one that is convex in them within %v: try a better model", ofBytes, ofAll)
	}
}

// Models are found again from times that they made.
func TestFitsFindTheModels(t *testing.T) {
	want := Line{Start: 40, PerMicrosecond: 2e5}
	var points []point
	for work := 1e5; work < 1e9; work *= 3 {
		points = append(points, point{work, want.Microseconds(work)})
	}
	l, err := fitLine(points)
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(l.Start-40) > 1e-6 || math.Abs(l.PerMicrosecond/2e5-1) > 1e-9 || l.Fit.HeldOutMaxError > 1e-3 || l.Fit.R2 != 1 {
		t.Errorf("the line is %+v", l)
	}
	g := GEMM{Floor: 30, Start: 10, BytesPerMicrosecond: 2e6, FlopsPerMicrosecond: 5e8}
	var products []kernels
	for _, weights := range []float64{1e6, 1e7, 1e8} {
		for rows := 1.0; rows < 5000; rows *= 4 {
			products = append(products, kernels{2, weights, rows, 2 * g.Microseconds(weights, rows)})
		}
	}
	got, err := fitGEMM(products)
	if err != nil {
		t.Fatal(err)
	}
	if got.Fit.MaxError > .05 || math.Abs(got.FlopsPerMicrosecond/5e8-1) > .05 || math.Abs(got.BytesPerMicrosecond/2e6-1) > .1 {
		t.Errorf("the kernel is %+v", got)
	}
	falling := []point{{1, 9}, {2, 8}, {3, 7}, {4, 6}, {5, 5}}
	if _, err := fitLine(falling); err == nil || !strings.Contains(err.Error(), "no rate can be told") {
		t.Errorf("times that fall gave %v", err)
	}
	if _, err := fitLine(points[:3]); err == nil || !strings.Contains(err.Error(), "at least 5") {
		t.Errorf("three points gave %v", err)
	}
}

// Exchanges between groups are as measured, where they were.
func TestGroupsHaveLinesOfTheirOwn(t *testing.T) {
	c := measurements(t)
	for bytes := 1e6; bytes < 1e9; bytes *= 4 {
		c.Bipartite = append(c.Bipartite, MeasuredBipartite{AttentionRanks: 3, ExpertRanks: 1, Bytes: bytes, Microseconds: 20 + 3*bytes/1e5})
	}
	p, err := NewProfile("x", 1, c)
	if err != nil {
		t.Fatal(err)
	}
	if got := p.Between(3, 1); math.Abs(got.PerMicrosecond/1e5-1) > 1e-6 || math.Abs(got.Start-20) > 1e-6 {
		t.Errorf("between 3 and 1 ranks: %+v", got)
	}
	if got := p.Between(1, 3); got.PerMicrosecond != p.AllToAll.PerMicrosecond {
		t.Errorf("between 1 and 3 ranks, which were not measured: %+v", got)
	}
}

func TestParseRefuses(t *testing.T) {
	for want, change := range map[string]func(p *Profile){
		`format is ""`:               func(p *Profile) { p.Format = "" },
		"name is missing":            func(p *Profile) { p.Name = "" },
		"ranks is 1":                 func(p *Profile) { p.Ranks = 1 },
		"memory_bytes is 0":          func(p *Profile) { p.MemoryBytes = 0 },
		"attention: start_us is -1":  func(p *Profile) { p.Attention.Start = -1 },
		"all_gather: start_us":       func(p *Profile) { p.AllGather.PerMicrosecond = 0 },
		"dense_gemm: floor_us is -1": func(p *Profile) { p.Dense.Floor = -1 },
		"a2e[0] is between 0":        func(p *Profile) { p.A2E = []Bipartite{{}} },
		"a2e[0].line: start_us":      func(p *Profile) { p.A2E = []Bipartite{{1, 1, Line{}}} },
		"products[2] is":             func(p *Profile) { p.Products[2].Dense = 0 },
	} {
		p := builtInProfile(t)
		change(p)
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("wanted is an error with %q; got %v", want, err)
		}
	}
	if _, err := Parse([]byte(`{"colour": 1}`)); err == nil || !strings.Contains(err.Error(), "colour") {
		t.Errorf("an unknown member gave %v", err)
	}
	if _, err := BuiltIn("abacus"); err == nil || !strings.Contains(err.Error(), Default) {
		t.Errorf("an unknown profile gave %v", err)
	}
}
