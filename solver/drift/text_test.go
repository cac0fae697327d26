package drift

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// spoken are made requests without ranks, each a document, of tokens of their kinds: no forecast tells that kinds differ in their local
// shares, by a sixth of the mean from the highest to the lowest.
func spoken(n int, seed uint64) []Request {
	random := rand.New(rand.NewPCG(seed, 9))
	requests := made(n, 1, seed)
	for i := range requests {
		r := &requests[i]
		r.Document = i
		r.Local[0] += 0.015 * float64(r.Kind)
		tokens := make([]int32, 200)
		for at := range tokens {
			tokens[at] = random.Int32N(5000) // tokens of all kinds
			if at%2 == 0 {
				tokens[at] = int32(5000*(1+r.Kind)) + random.Int32N(20)
			}
		}
		r.Bag = Bag(tokens)
	}
	return requests
}

// Whoever reads a file of weights puts tokens into the same buckets.
func TestBucketsOfTokens(t *testing.T) {
	for token, want := range map[int32]int{0: 0, 1: 158, 2: 60, 255: 153, 32_767: 30, 151_935: 254, math.MaxInt32: 225} {
		if got := bucketOf(token); got != want {
			t.Errorf("token %d is in bucket %d; want %d", token, got, want)
		}
	}
	text := Text{Weights: make([]float32, Buckets)}
	text.Weights[158], text.Weights[60] = 0.5, -1
	if got := text.Of(Bag([]int32{1, 1, 1, 2})); got != 0.125 {
		t.Errorf("three of four tokens that weigh 0.5 and one that weighs -1 say %v; want 0.125", got)
	}
	if got := text.Of(Bag(nil)); got != 0 {
		t.Errorf("no tokens say %v", got)
	}
}

// Where tokens tell what no forecast does, drops are found sooner, and other requests of the same kinds raise no alarm.
func TestTokensExplainResiduals(t *testing.T) {
	requests := spoken(800, 1)
	c := calibrated(t, requests)
	if c.Text == nil {
		t.Fatal("tokens were not read")
	}
	if diff := cmp.Diff(c, calibrated(t, requests)); diff != "" {
		t.Errorf("the same requests lead to another calibration:\n%s", diff)
	}
	silent := spoken(800, 1)
	for i := range silent {
		silent[i].Bag = nil
	}
	if with, without := found(t, c, requests), found(t, calibrated(t, silent), silent); with >= without {
		t.Errorf("a drop of a tenth is found after %d requests, and after %d by forecasts alone", with, without)
	}
	for _, order := range c.orders() {
		alarms, err := c.Alarms(t.Context(), spoken(800, 2), order, 100_000)
		if err != nil {
			t.Fatal(err)
		}
		if alarms > 0 {
			t.Errorf("%+v: %d false alarms", order, alarms)
		}
	}
}

// What a document shows does not change what it is told of itself, and changes what others are told.
func TestNoDocumentIsToldOfItself(t *testing.T) {
	requests := spoken(100, 1)
	residuals := make([]float64, len(requests))
	for i, r := range requests {
		residuals[i] = r.Local[0]
	}
	const at, by = 0, 1e-3
	before := newLesson(requests, residuals).crossed(1)
	other := 4 // of the same kind
	for foldOf(requests[other]) == foldOf(requests[at]) {
		other += 4
	}
	own, others := before[at].text, before[other].text
	// The mean of all stays, so that only what is learnt of tokens changes.
	residuals[at] += by
	for i, r := range requests {
		if r.Kind != requests[at].Kind && foldOf(r) == foldOf(requests[at]) {
			residuals[i] -= by
			break
		}
	}
	after := newLesson(requests, residuals).crossed(1)
	if d := math.Abs(after[at].text - own); d > 1e-12 {
		t.Errorf("what a request is told changes by %v with its own residual", d)
	}
	if d := after[other].text - others; d < 1e-6 {
		t.Errorf("what another of its kind is told changes by %v", d)
	}
}

// Tokens that are the same in all requests say nothing.
func TestSameTokensTeachNothing(t *testing.T) {
	requests := spoken(100, 1)
	for i := range requests {
		requests[i].Bag = Bag([]int32{1, 2, 3})
	}
	if c := calibrated(t, requests); c.Text != nil {
		t.Errorf("learnt %v", c.Text.Weights)
	}
}

func TestTextIsItsFile(t *testing.T) {
	c := calibrated(t, spoken(800, 1))
	content, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var read Calibration
	if err := json.Unmarshal(content, &read); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, &read); diff != "" {
		t.Errorf("what was read differs:\n%s", diff)
	}
	for name, tc := range map[string]struct {
		change func(*Calibration)
		want   string
	}{
		"few weights":    {func(c *Calibration) { c.Text = &Text{Weights: make([]float32, 3)} }, "text.weights has 3 entries"},
		"no number":      {func(c *Calibration) { c.Text.Weights[7] = float32(math.NaN()) }, "one is NaN"},
		"no slope":       {func(c *Calibration) { c.Slopes.Text = math.Inf(1) }, "one is +Inf"},
		"with any ranks": {func(c *Calibration) { *c = withRanks(*c) }, "text is for requests that have no rank; ranks is 2"},
	} {
		wrong := read
		wrong.Text = &Text{Weights: append([]float32(nil), read.Text.Weights...)}
		tc.change(&wrong)
		if err := wrong.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v; want %q", name, err, tc.want)
		}
	}
}

// withRanks is a calibration for two ranks.
func withRanks(c Calibration) Calibration {
	cells := make([]float64, 4)
	c.Ranks, c.Highest, c.Predicted, c.Local = 2, cells, cells, cells
	return c
}
