// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var start = time.Unix(1_700_000_000, 0)

// observations returns random observations with integers and forecasts in 64ths (their sums are exact in any order).
func observations(random *rand.Rand, n int) []Observation {
	all := make([]Observation, n)
	for i := range all {
		o := Observation{Time: start.Add(time.Duration(random.IntN(300)) * time.Second), Revision: fmt.Sprint("r", random.IntN(2)), Rank: random.IntN(6) - 1}
		if random.IntN(3) > 0 {
			o.Plan = fmt.Sprint("p", random.IntN(2))
			o.Forecast = &Forecast{Predicted: float64(random.IntN(65)) / 64}
		}
		o.LayerGroups = make([]Activations, 1+random.IntN(4))
		for g := range o.LayerGroups {
			total := int64(random.IntN(1000))
			o.LayerGroups[g] = Activations{Local: int64(random.IntN(int(total) + 1)), Total: total}
			o.Local += o.LayerGroups[g].Local
			o.Total += total
		}
		o.Tokens, o.RemoteRanks, o.SavedBytes = random.IntN(50), int64(random.IntN(100)), float64(random.IntN(2000)-1000)
		o.TokenLayers = 4 * int64(o.Tokens)
		all[i] = o
	}
	return all
}

func setOf(all []Observation) Set {
	set := Set{}
	for _, o := range all {
		set.Add(o)
	}
	return set
}

// For any distribution of observations over routers and any merge order, the result is the sketch of all observations.
func TestMerging(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		all := observations(random, 1+random.IntN(60))
		want := setOf(all)
		routers := make([]Set, 1+random.IntN(5))
		for i := range routers {
			routers[i] = Set{}
		}
		for _, o := range all {
			routers[random.IntN(len(routers))].Add(o)
		}
		// Merge in random order and grouping until one is left.
		for len(routers) > 1 {
			random.Shuffle(len(routers), func(i, j int) { routers[i], routers[j] = routers[j], routers[i] })
			before := encode(t, routers[1])
			routers[0].Merge(routers[1])
			if encode(t, routers[1]) != before {
				t.Fatal("merging changes what was merged")
			}
			routers = append(routers[:1], routers[2:]...)
		}
		if diff := cmp.Diff(want, routers[0], cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("merged (-of all +merged):\n%s", diff)
		}
		// Sums over plans and revisions equal those of the observations.
		one := setOf(withOneKey(all))
		if diff := cmp.Diff(*one[Key{}], want.All()); diff != "" {
			t.Fatalf("all (-want +got):\n%s", diff)
		}
		if r0, r1 := want.Revision("r0").Overall.Requests, want.Revision("r1").Overall.Requests; r0+r1 != int64(len(all)) {
			t.Fatalf("%d and %d requests of %d", r0, r1, len(all))
		}
	}
}

func withOneKey(all []Observation) []Observation {
	plain := append([]Observation(nil), all...)
	for i := range plain {
		plain[i].Revision, plain[i].Plan = "", ""
	}
	return plain
}

// The parts of a sketch sum to the whole.
func TestPartsOfASketch(t *testing.T) {
	all := observations(rand.New(rand.NewPCG(2, 2)), 500)
	s := setOf(withOneKey(all)).All()
	var ranks, without, groups Activations
	add := func(to *Activations, a Activations) { to.Local, to.Total = to.Local+a.Local, to.Total+a.Total }
	for _, o := range all {
		if o.Rank < 0 {
			add(&without, o.Activations)
		}
	}
	for _, r := range s.Ranks {
		add(&ranks, r.Activations)
	}
	for _, g := range s.LayerGroups {
		add(&groups, g.Activations)
	}
	add(&ranks, without)
	if ranks != s.Overall.Activations || groups != s.Overall.Activations || len(s.Ranks) != 5 || s.Overall.Requests != 500 {
		t.Errorf("overall %+v, ranks %+v, layer groups %+v", s.Overall.Activations, ranks, groups)
	}
}

func encode(t *testing.T, value any) string {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestSetCodec(t *testing.T) {
	for n := range 20 {
		want := setOf(observations(rand.New(rand.NewPCG(3, uint64(n))), n))
		text := encode(t, want)
		var got Set
		if err := json.Unmarshal([]byte(text), &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("%d observations (-want +got):\n%s", n, diff)
		}
	}
	for name, text := range map[string]string{
		"no list":           `{}`,
		"local above total": `[{"revision":"r","overall":{"requests":1,"local":2,"total":1}}]`,
		"negative":          `[{"revision":"r","overall":{"requests":-1}}]`,
		"of no request":     `[{"revision":"r","overall":{"total":1}}]`,
		"negative squares":  `[{"revision":"r","overall":{"totalSquares":-1}}]`,
		"too many groups":   `[{"revision":"r","layerGroups":[{},{},{},{},{}]}]`,
		"bad rank":          `[{"revision":"r","ranks":[{},{"local":1}]}]`,
		"negative tokens":   `[{"revision":"r","tokens":-1}]`,
		"forecast":          `[{"revision":"r","forecast":{"total":[-1,0,0]}}]`,
		"twice":             `[{"revision":"r"},{"revision":"r"}]`,
	} {
		var got Set
		if err := json.Unmarshal([]byte(text), &got); err == nil {
			t.Errorf("%s: %s is accepted", name, text)
		}
	}
}

// Every report that decodes without an error can be merged, evaluated and encoded again.
func FuzzReport(f *testing.F) {
	seed := Report{Service: []ServiceBucket{{Start: start, Revisions: map[string]Service{"r0": {Requests: 1, Answer: Moments{N: 1, Sum: 2, SumSquares: 4, Covariates: CovariateSums{N: 1}}}}}}, Last: setOf(observations(rand.New(rand.NewPCG(4, 4)), 3)), CaptureCost: &CaptureCost{}, Window: []Bucket{{Start: 10, Eligible: 3, Sketches: setOf(observations(rand.New(rand.NewPCG(4, 5)), 2))}}}
	text, err := json.Marshal(seed)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"last":[null],"window":[{"sketches":null}],"captureCost":{"asked":{"requests":1}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var report Report
		if json.Unmarshal(text, &report) != nil || report.Validate() != nil {
			return
		}
		sum := report.Last.All()
		sum.Overall.StandardError()
		sum.Forecast.Slope()
		report.Revision("r0")
		for range report.ServiceSince("r0", start) {
		}
		merged := mergeBuckets(report.Window, report.Window)
		Sum(merged)
		if report.CaptureCost != nil {
			report.CaptureCost.Ratio()
		}
		again, err := json.Marshal(report.Last)
		if err != nil {
			t.Fatal(err)
		}
		var back Set
		if err := json.Unmarshal(again, &back); err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		if diff := cmp.Diff(report.Last, back, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("the set changes on its way (-want +got):\n%s", diff)
		}
	})
}

// A window contains the requests of its time, in buckets that align between routers.
func TestWindow(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	all := observations(random, 400)
	now := start.Add(299 * time.Second)
	oldest := startOf(now) - 110
	routers := []*Window{{}, {}, {}}
	want := map[int64]*Bucket{}
	for second := range 300 {
		at := start.Add(time.Duration(second) * time.Second)
		for _, o := range all {
			if !o.Time.Equal(at) {
				continue
			}
			w := routers[random.IntN(3)]
			w.AddEligible(at)
			w.Add(o)
			if bucket := startOf(at); bucket >= oldest {
				if want[bucket] == nil {
					want[bucket] = &Bucket{Start: bucket, Sketches: Set{}}
				}
				want[bucket].Eligible++
				want[bucket].Sketches.Add(o)
			}
		}
	}
	merged := mergeBuckets(routers[0].Recent(now), routers[1].Recent(now), routers[2].Recent(now))
	if len(merged) != len(want) || len(merged) > Buckets {
		t.Fatalf("%d buckets, want %d", len(merged), len(want))
	}
	for i, got := range merged {
		if i > 0 && got.Start <= merged[i-1].Start {
			t.Errorf("bucket %d does not follow its predecessor", i)
		}
		if diff := cmp.Diff(*want[got.Start], got); diff != "" {
			t.Errorf("bucket %d (-want +got):\n%s", i, diff)
		}
	}
	if later := routers[0].Recent(now.Add(2 * time.Minute)); len(later) != 0 {
		t.Errorf("after two minutes without a request %d buckets are left", len(later))
	}
	// Setting the clock back loses no request.
	var w Window
	w.AddEligible(now)
	w.AddEligible(now.Add(-time.Hour))
	if got := w.Recent(now); len(got) != 1 || got[0].Eligible != 2 {
		t.Errorf("%+v", got)
	}
}

func TestReportOfARevision(t *testing.T) {
	few, many := Set{}, Set{}
	for i := range 5 {
		o := Observation{Revision: "r", Count: Count{Activations: Activations{1, 2}}}
		if many.Add(o); i < 2 {
			few.Add(o)
		}
	}
	for _, r := range []Report{{Last: many, Window: []Bucket{{Sketches: few}}}, {Last: few, Window: []Bucket{{Sketches: few}, {Sketches: many}}}} {
		want := int64(5)
		if len(r.Window) == 2 {
			want = 7
		}
		if got := r.Revision("r").Overall.Requests; got != want || r.Revision("other").Overall.Requests != 0 {
			t.Errorf("%d requests, want %d", got, want)
		}
	}
}
