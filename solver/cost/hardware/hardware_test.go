// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Measurements: those that the built-in profile is fitted to, whose clock was the host's, and some by the devices' clocks, as semmoe calibrate makes them.
const (
	builtInFrom = "testdata/h200x4.json"
	byDevices   = "../../../internal/calibration/testdata/h200x2.json"
	elsewhere   = "../../lab/simulate/testdata/calibration-h200x2.json"
)

func measurements(t *testing.T, file string) *Calibration {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ParseCalibration(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func marshalled(t *testing.T, p *Profile) []byte {
	t.Helper()
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// errorsOf are the relative errors of a model.
func errorsOf[P measurement[P], M timed[P]](points []P, model M) []float64 {
	var errors []float64
	for _, p := range points {
		errors = append(errors, math.Abs(model.of(p)/p.microseconds()-1))
	}
	return errors
}

func builtInProfile(t *testing.T) *Profile {
	t.Helper()
	p, err := BuiltIn(Default)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The built-in profile is what semmoe-lab fit makes of its measurements, and is not written by hand.
func TestBuiltInProfileIsFitted(t *testing.T) {
	got := builtInProfile(t)
	want, err := NewProfile(got.Name, got.MemoryBytes, measurements(t, builtInFrom))
	if err != nil {
		t.Fatal(err)
	}
	// Other processors may round differently.
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(1e-6, 1e-4)); diff != "" {
		t.Errorf("the profile (+) is not what its measurements lead to (-): go generate ./solver/cost/hardware\n%s", diff)
	}
}

// promise is what a fit is to reach on measurements that it has not seen, and of the variance of all.
type promise struct {
	fit         *Fit
	heldOut, r2 float64
}

func (p *promise) check(t *testing.T, name string) {
	t.Helper()
	if f := p.fit; f.HeldOutMedianError > p.heldOut || f.HeldOutMedianError == 0 || f.R2 < p.r2 || len(f.Residuals) != f.Points {
		t.Errorf("%s: held-out median error %v, R² %v, %d residuals of %d points; promised are %v and %v", name, f.HeldOutMedianError, f.R2, len(f.Residuals), f.Points, p.heldOut, p.r2)
	}
}

// What is promised of the built-in models. Of collectives there are five measurements, of which the smallest took longer than the next: less is promised
// of them.
func TestBuiltInFits(t *testing.T) {
	p := builtInProfile(t)
	for name, c := range map[string]promise{
		"grouped": {&p.Grouped.Fit, .1, .97}, "dense": {&p.Dense.Fit, .1, .99}, "attention": {&p.Attention.Fit, .06, .99}, "all-to-all": {&p.AllToAll.Fit, .08, .98},
		"all-reduce": {&p.AllReduce.Fit, .1, .98}, "reduce-scatter": {&p.ReduceScatter.Fit, .1, .95}, "all-gather": {&p.AllGather.Fit, .12, .97},
	} {
		c.check(t, name)
	}
	c := measurements(t, builtInFrom)
	for _, m := range c.AllToAll {
		if e := math.Abs(p.AllToAll.Microseconds(m.Bytes)/m.Microseconds - 1); m.Bytes > 32<<20 && e > .15 {
			t.Errorf("an all-to-all of %.0f bytes is modelled %.0f%% off", m.Bytes, 100*e)
		}
	}
	if within, of := p.Reproduced(c); within != 38 || of != 51 {
		t.Errorf("%d of %d all-to-alls above 1 MiB are within 15%%", within, of)
	}
}

// What is promised of measurements by the devices' clocks: every model is within 10% of half of what it has not seen, of the same run and of
// another, and every all-to-all above 1 MiB of both runs within 15%. Those of the exchanges between groups are of six sizes, there and back.
func TestFitsOfDeviceTimes(t *testing.T) {
	c := measurements(t, byDevices)
	p, err := NewProfile("two H200", c.MemoryBytes, c)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]promise{
		"grouped": {&p.Grouped.Fit, .055, .99}, "dense": {&p.Dense.Fit, .045, .99}, "attention": {&p.Attention.Fit, .07, .995}, "all-to-all": {&p.AllToAll.Fit, .015, .985},
		"all-reduce": {&p.AllReduce.Fit, .03, .999}, "reduce-scatter": {&p.ReduceScatter.Fit, .02, .999}, "all-gather": {&p.AllGather.Fit, .035, .999},
		"between groups": {&p.Between(1, 1).Fit, .07, .995},
	} {
		c.check(t, name)
	}
	if within, of := p.Reproduced(c); within != of || of != 71 {
		t.Errorf("%d of %d all-to-alls above 1 MiB are within 15%%", within, of)
	}
	if got, err := Parse(marshalled(t, p)); err != nil || !cmp.Equal(p, got) {
		t.Errorf("the profile is read back with error %v, and differs: %s", err, cmp.Diff(p, got))
	}
	other := measurements(t, elsewhere)
	if within, of := p.Reproduced(other); within != of || of != 71 {
		t.Errorf("in another run %d of %d all-to-alls above 1 MiB are within 15%%", within, of)
	}
	reduce, scatter, gather := collectives(other)
	for name, errors := range map[string][]float64{
		"grouped": errorsOf(groupedKernels(other), p.Grouped), "dense": errorsOf(denseKernels(other), p.Dense), "attention": errorsOf(attentions(other), &p.Attention),
		"all-to-all": errorsOf(allToAlls(other), &p.AllToAll), "all-reduce": errorsOf(reduce, &p.AllReduce), "reduce-scatter": errorsOf(scatter, &p.ReduceScatter),
		"all-gather": errorsOf(gather, &p.AllGather),
	} {
		t.Logf("in another run, %s: %.1f%% in the median", name, 100*median(errors))
		if median(errors) > .1 {
			t.Errorf("in another run, %s is modelled %.1f%% off in the median", name, 100*median(errors))
		}
	}
	for name, e := range map[string]*Exchange{"all-to-all": &p.AllToAll, "all-reduce": &p.AllReduce, "reduce-scatter": &p.ReduceScatter, "all-gather": &p.AllGather} {
		if e.Large == nil {
			t.Errorf("%s has no line for large sizes", name)
		}
	}
}

// Why a straight line is kept that misses some measured all-to-alls by more than 15%: no function of the bytes does much better. The clock of these
// measurements was the host's, and the same exchange took up to 1.5 times as long in another batch of measurements.
func TestBuiltInAllToAllsScatter(t *testing.T) {
	least := 0.0
	all := measurements(t, builtInFrom).AllToAll
	for _, a := range all {
		for _, b := range all {
			if a.Bytes == b.Bytes && a.Bytes > 1<<20 {
				least = max(least, (a.Microseconds-b.Microseconds)/(a.Microseconds+b.Microseconds)) // the best function of the bytes misses both by as much
			}
		}
	}
	t.Logf("above 1 MiB no function of the bytes is within %.1f%% of every point", 100*least)
	if least < .2 {
		t.Errorf("a function of the bytes may be within %v: try a better model", least)
	}
}

// Models are found again from times that they made.
func TestFitsFindTheModels(t *testing.T) {
	for _, want := range []Exchange{
		{Line: Line{Start: 40, PerMicrosecond: 2e5}},
		{Line: Line{Start: 10, PerMicrosecond: 1e5}, Large: &Line{Start: 60, PerMicrosecond: 3e5}},
	} {
		e, err := fitExchange(exchangesOf(&want, 0))
		if err != nil {
			t.Fatal(err)
		}
		fit := e.Fit
		e.Fit = Fit{}
		if diff := cmp.Diff(want, e, cmpopts.EquateApprox(1e-6, 0)); diff != "" || fit.MaxError > 1e-3 || fit.R2 != 1 {
			t.Errorf("the exchange has the fit %+v, and is not what the times were made by (-):\n%s", fit, diff)
		}
	}
	for _, rowFlops := range []float64{0, 2e5} {
		want := Attention{Line: Line{Start: 12, PerMicrosecond: 6e8}, RowFlops: rowFlops}
		var points []attended
		for sequence := 256.0; sequence <= 16384; sequence *= 2 {
			for _, heads := range []float64{16, 128} {
				work := CausalAttention(2, heads, sequence, 192, 128)
				points = append(points, attended{work, want.Microseconds(work)})
			}
		}
		a, err := fitAttention(points)
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(a.RowFlops-rowFlops) > 1e-3*rowFlops || math.Abs(a.Start/12-1) > .01 || math.Abs(a.PerMicrosecond/6e8-1) > 1e-3 {
			t.Errorf("attention is %+v; the times were made by %+v", a, want)
		}
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
	falling := []exchanged{{1, 9}, {2, 8}, {3, 7}, {4, 6}, {5, 5}}
	if _, err := fitExchange(falling); err == nil || !strings.Contains(err.Error(), "no rate can be fitted") {
		t.Errorf("times that fall gave %v", err)
	}
	if _, err := fitExchange(falling[:3]); err == nil || !strings.Contains(err.Error(), "at least 5") {
		t.Errorf("three points gave %v", err)
	}
}

// exchangesOf are times that a model makes, each by turns a part longer and shorter.
func exchangesOf(e *Exchange, noise float64) []exchanged {
	var points []exchanged
	for bytes := 1e5; bytes < 1e9; bytes *= 1.7 {
		noise = -noise
		points = append(points, exchanged{bytes, e.Microseconds(bytes) * (1 + noise)})
	}
	return points
}

// A second line is fitted only where it explains what has not been seen: not to one line's times, however they scatter, nor to a few.
func TestSecondLineIsFittedOnlyWhereItExplains(t *testing.T) {
	straight := Exchange{Line: Line{Start: 40, PerMicrosecond: 2e5}}
	bent := Exchange{Line: Line{Start: 10, PerMicrosecond: 1e5}, Large: &Line{Start: 60, PerMicrosecond: 3e5}}
	for name, c := range map[string]struct {
		points []exchanged
		bent   bool
	}{
		"straight": {exchangesOf(&straight, 0), false}, "straight, scattering": {exchangesOf(&straight, .1), false},
		"bent": {exchangesOf(&bent, 0), true}, "bent, scattering": {exchangesOf(&bent, .05), true}, "bent, five measurements": {exchangesOf(&bent, 0)[:5], false},
		"of one size but for one": {[]exchanged{{1e6, 20}, {1e6, 21}, {1e6, 22}, {1e6, 20}, {1e6, 21}, {1e6, 20}, {2e6, 30}}, false},
	} {
		e, err := fitExchange(c.points)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if (e.Large != nil) != c.bent {
			t.Errorf("%s: the exchange is %+v", name, e)
		}
	}
}

// Exchanges between groups are as measured, where they were.
func TestGroupsAreFittedSeparately(t *testing.T) {
	c := measurements(t, builtInFrom)
	for bytes := 1e6; bytes < 1e9; bytes *= 4 {
		c.Bipartite = append(c.Bipartite, MeasuredBipartite{AttentionRanks: 3, ExpertRanks: 1, Bytes: bytes, Microseconds: 19 + 3*bytes/1e5, Back: 21 + 3*bytes/1e5})
	}
	p, err := NewProfile("x", 1, c)
	if err != nil {
		t.Fatal(err)
	}
	if got := p.Between(3, 1); math.Abs(got.PerMicrosecond/1e5-1) > 1e-4 || math.Abs(got.Start-20) > .1 || got.Fit.Points != 10 {
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
		"attention: row_flops is -1": func(p *Profile) { p.Attention.RowFlops = -1 },
		"all_to_all: large: start_us is 1e+06, per_us 1; they must be at least": func(p *Profile) { p.AllToAll.Large = &Line{1e6, 1} },
		"all_reduce: large: start_us is 1, per_us 0":                            func(p *Profile) { p.AllReduce.Large = &Line{1, 0} },
		"dense_gemm: floor_us is -1":                                            func(p *Profile) { p.Dense.Floor = -1 },
		"measurements are missing: grouped_gemm; without them":                  func(p *Profile) { p.Grouped = GEMM{} },
		"missing: all_to_all, dense_gemm; without them times cannot":            func(p *Profile) { p.AllToAll, p.Dense = Exchange{}, GEMM{} },
		"a2e[0] is between 0":                                                   func(p *Profile) { p.A2E = []Bipartite{{}} },
		"a2e[0].line: start_us":                                                 func(p *Profile) { p.A2E = []Bipartite{{1, 1, Exchange{}}} },
		"products[2] is":                                                        func(p *Profile) { p.Products[2].Dense = 0 },
	} {
		p := builtInProfile(t)
		change(p)
		if _, err := Parse(marshalled(t, p)); err == nil || !strings.Contains(err.Error(), want) {
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
