// SPDX-License-Identifier: Apache-2.0

package stepsizes

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func repeated(size float64) []float64 {
	sizes := make([]float64, Parts)
	for i := range sizes {
		sizes[i] = size
	}
	return sizes
}

// The mean of the sizes equals that of the steps, and few large steps are represented among many small ones.
func TestSizes(t *testing.T) {
	var h Histogram
	if h.Sizes() != nil || h.PrefillShare() != 0 {
		t.Errorf("without steps: %v, %v", h.Sizes(), h.PrefillShare())
	}
	h.Add(100, 950, 0)
	h.Add(16000, 50, 50)
	sizes, mean := h.Sizes(), 0.0
	for _, size := range sizes {
		mean += size / Parts
	}
	if want := .95*100 + .05*16000; math.Abs(mean-want) > 1e-6*want || sizes[6] != 100 || math.Abs(sizes[7]-(.4*16000+.6*100)) > 1 || h.PrefillShare() != .05 {
		t.Errorf("sizes %v of mean %v, want %v; share of prefill %v", sizes, mean, want, h.PrefillShare())
	}
	h.Fade(.5)
	if h.Steps() != 500 || !cmp.Equal(roundSizes(h.Sizes()), roundSizes(sizes)) || h.PrefillShare() != .05 {
		t.Errorf("faded: %v steps, sizes %v, share of prefill %v", h.Steps(), h.Sizes(), h.PrefillShare())
	}
	h.Add(0, 1, 0)
	h.Add(math.Inf(1), 1, 0)
	if err := Validate([]Pod{{Sizes: h.Sizes(), Steps: h.Steps()}}); err != nil {
		t.Error(err)
	}
}

func TestRoundAndMoved(t *testing.T) {
	if got, want := roundSizes([]float64{0, 1, 2.4, 2.5, 3.4, 3.5, 100, 1 << 30}), []int32{1, 1, 2, 3, 3, 4, 96, maxTokens}; !cmp.Equal(got, want) {
		t.Errorf("rounded to %v, want %v", got, want)
	}
	for _, tc := range []struct {
		from, to []int32
		want     bool
	}{
		{[]int32{64, 96, 4096}, []int32{64, 96, 4096}, false},
		{[]int32{64, 96, 4096}, []int32{48, 128, 6144}, false}, // adjacent sizes
		{[]int32{64, 96, 4096}, []int32{64, 96, 12288}, true},  // the mean differs
		{[]int32{64, 4096, 96}, []int32{64, 192, 4096}, true},  // the median differs
		{[]int32{64, 96, 4096}, []int32{32, 48, 4096}, true},
		{[]int32{64, 64, 64}, []int32{64}, false}, // same distribution
		{nil, []int32{1}, true},
	} {
		if got := Differ(tc.from, tc.to); got != tc.want {
			t.Errorf("from %v to %v: %v", tc.from, tc.to, got)
		}
	}
}

func TestMerge(t *testing.T) {
	small, large := Pod{Pod: "a", Sizes: repeated(64), Steps: 900}, Pod{Pod: "b", Sizes: repeated(4096), Steps: 300, PrefillShare: 1}
	older := small
	older.Steps = 10
	broken := Pod{Pod: "c", Problem: "no metric"}
	for name, tc := range map[string]struct {
		reports [][]Pod
		want    Sum
	}{
		"nothing":               {nil, Sum{}},
		"too few steps":         {[][]Pod{{older}}, Sum{Steps: 10}},
		"pods of two routers":   {[][]Pod{{older, large}, {small, broken}}, Sum{Sizes: []int32{64, 64, 64, 64, 64, 64, 4096, 4096}, Steps: 1200, PrefillMilli: 250}},
		"problems":              {[][]Pod{{{Pod: "d", Problem: "other"}, broken}}, Sum{Problem: "no metric", Pod: "c", Pods: 2}},
		"a router that reached": {[][]Pod{{{Pod: "a", Problem: "away"}}, {small}}, Sum{Sizes: roundSizes(repeated(64)), Steps: 900}},
	} {
		if diff := cmp.Diff(tc.want, Merge(tc.reports...)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestValidate(t *testing.T) {
	for want, p := range map[string]Pod{
		"":                 {Sizes: repeated(1), Steps: 1, PrefillShare: 1},
		"7 sizes":          {Sizes: repeated(1)[1:]},
		"is [NaN":          {Sizes: repeated(math.NaN())},
		"is [0 0":          {Sizes: repeated(0)},
		"steps is -1":      {Steps: -1},
		"steps is +Inf":    {Steps: math.Inf(1)},
		"prefillShare 2":   {PrefillShare: 2},
		"problem has 201 ": {Problem: strings.Repeat("x", MaxProblem+1)},
	} {
		if err := Validate([]Pod{p}); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want %q", p, err, want)
		}
	}
	if Validate(make([]Pod, maxPods+1)) == nil {
		t.Error("any number of pods is allowed")
	}
}
