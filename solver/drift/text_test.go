// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// withTokens returns requests without ranks, each in its own document, with tokens specific to their kinds. The
// forecast does not predict that the local shares of kinds differ, by a sixth of the mean from the highest to the
// lowest.
func withTokens(n int, seed uint64) []Request {
	random := rand.New(rand.NewPCG(seed, 9))
	requests := made(n, 1, seed)
	for i := range requests {
		r := &requests[i]
		r.Document = i
		r.Local[0] += 0.015 * float64(r.Kind)
		tokens := make([]int32, 200)
		for at := range tokens {
			tokens[at] = random.Int32N(5000) // common tokens
			if at%2 == 0 {
				tokens[at] = int32(5000*(1+r.Kind)) + random.Int32N(20)
			}
		}
		r.Bag = Bag(tokens)
	}
	return requests
}

// Weights are stored by bucket, so the buckets of tokens must never change.
func TestBucketsOfTokens(t *testing.T) {
	for token, want := range map[int32]int{0: 0, 1: 158, 2: 60, 255: 153, 32_767: 30, 151_935: 254, math.MaxInt32: 225} {
		if got := bucketOf(token); got != want {
			t.Errorf("token %d is in bucket %d; want %d", token, got, want)
		}
	}
	text := Text{Weights: make([]float32, buckets)}
	text.Weights[158], text.Weights[60] = 0.5, -1
	if got := text.Of(Bag([]int32{1, 1, 1, 2})); got != 0.125 {
		t.Errorf("the text term of three tokens with weight 0.5 and one with -1 is %v; want 0.125", got)
	}
	if got := text.Of(Bag(nil)); got != 0 {
		t.Errorf("the text term without tokens is %v; want 0", got)
	}
}

// If tokens explain what no forecast does, the detection delay is shorter, and other requests of the same kinds raise
// no alarm.
func TestTokensExplainResiduals(t *testing.T) {
	requests := withTokens(800, 1)
	c := calibrated(t, requests)
	if c.Text == nil {
		t.Fatal("the calibration has no text model")
	}
	if diff := cmp.Diff(c, calibrated(t, requests)); diff != "" {
		t.Errorf("the same requests yield another calibration:\n%s", diff)
	}
	withoutTokens := withTokens(800, 1)
	for i := range withoutTokens {
		withoutTokens[i].Bag = nil
	}
	if with, without := medianDelay(t, c, requests), medianDelay(t, calibrated(t, withoutTokens), withoutTokens); with >= without {
		t.Errorf("a drop of 10%% is detected after %d requests, and after %d with forecasts only", with, without)
	}
	for _, order := range c.orders() {
		alarms, err := c.Alarms(t.Context(), withTokens(800, 2), order, 100_000)
		if err != nil {
			t.Fatal(err)
		}
		if alarms > 0 {
			t.Errorf("%+v: %d false alarms", order, alarms)
		}
	}
}

// The residual of a document does not change its own text term but changes the terms of other documents.
func TestTextIsCrossFittedByDocument(t *testing.T) {
	requests := withTokens(100, 1)
	residuals := make([]float64, len(requests))
	for i, r := range requests {
		residuals[i] = r.Local[0]
	}
	const at, by = 0, 1e-3
	before := newTextTraining(requests, residuals).crossFitted(1)
	other := 4 // of the same kind
	for foldOf(requests[other]) == foldOf(requests[at]) {
		other += 4
	}
	own, others := before[at].text, before[other].text
	// The overall mean stays constant, so that only the fitted weights change.
	residuals[at] += by
	for i, r := range requests {
		if r.Kind != requests[at].Kind && foldOf(r) == foldOf(requests[at]) {
			residuals[i] -= by
			break
		}
	}
	after := newTextTraining(requests, residuals).crossFitted(1)
	if d := math.Abs(after[at].text - own); d > 1e-12 {
		t.Errorf("the text term of a request changes by %v with its own residual", d)
	}
	if d := after[other].text - others; d < 1e-6 {
		t.Errorf("the text term of another request of the same kind changes by only %v", d)
	}
}

// Tokens that are equal in all requests yield no text model.
func TestEqualBagsYieldNoText(t *testing.T) {
	requests := withTokens(100, 1)
	for i := range requests {
		requests[i].Bag = Bag([]int32{1, 2, 3})
	}
	if c := calibrated(t, requests); c.Text != nil {
		t.Errorf("the text model has weights %v", c.Text.Weights)
	}
}

func TestTextRoundTrip(t *testing.T) {
	c := calibrated(t, withTokens(800, 1))
	content, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var read Calibration
	if err := json.Unmarshal(content, &read); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, &read); diff != "" {
		t.Errorf("the decoded calibration differs:\n%s", diff)
	}
	for name, tc := range map[string]struct {
		change func(*Calibration)
		want   string
	}{
		"few weights":    {func(c *Calibration) { c.Text = &Text{Weights: make([]float32, 3)} }, "text.weights has 3 entries"},
		"NaN":            {func(c *Calibration) { c.Text.Weights[7] = float32(math.NaN()) }, "one is NaN"},
		"infinite slope": {func(c *Calibration) { c.Slopes.Text = math.Inf(1) }, "one is +Inf"},
		"ranks":          {func(c *Calibration) { *c = withRanks(*c) }, "text is for requests that have no rank; ranks is 2"},
	} {
		wrong := read
		wrong.Text = &Text{Weights: append([]float32(nil), read.Text.Weights...)}
		tc.change(&wrong)
		if err := wrong.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v; want %q", name, err, tc.want)
		}
	}
}

// withRanks returns a copy of the calibration for two ranks.
func withRanks(c Calibration) Calibration {
	cells := make([]float64, 4)
	c.Ranks, c.Highest, c.Predicted, c.Local = 2, cells, cells, cells
	return c
}
