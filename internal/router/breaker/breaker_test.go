// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// TestBreaker plays outcomes of requests, one letter each: s served, f failed, 5 unavailable, u unreachable. A dot is a
// second.
func TestBreaker(t *testing.T) {
	rate := Default()
	rate.FailurePercent, rate.ConsecutiveFailures = 50, MaxConsecutiveFailures
	patient := Default()
	patient.ConsecutiveFailures, patient.Ejection, patient.MaxEjection = 4, 3*time.Second, 5*time.Second
	for name, tc := range map[string]struct {
		settings Settings
		outcomes string
		state    State
		// left is the rest of the ejection in seconds. reasons are the begun ejections.
		left    int
		reasons string
	}{
		"served":                       {Default(), "sss", Closed, 0, ""},
		"one failure":                  {Default(), "sfs", Closed, 0, ""},
		"two failures":                 {Default(), "ff", Open, 1, "failures"},
		"failures that are not in row": {Default(), "fsfsfs", Closed, 0, ""},
		"after the ejection":           {Default(), "ff.", HalfOpen, 0, "failures"},
		"closed by a served request":   {Default(), "ff.s", Closed, 0, "failures"},
		"twice as long":                {Default(), "ff.f", Open, 2, "failures failures"},
		"at most":                      {Default(), "ff.f..f....f........f", Open, 8, "failures failures failures failures failures"},
		"again after success":          {Default(), "ff.f..sff", Open, 1, "failures failures failures"},
		"while it is open":             {Default(), "fffff", Open, 1, "failures"},
		"unavailable at once":          {Default(), "5", Open, 1, "unavailable"},
		"unavailable again":            {Default(), "5.5..5", Open, 4, "unavailable unavailable unavailable"},
		"unreachable":                  {Default(), "u", Open, 1, "unreachable"},
		"unreachable again":            {Default(), "u.u.u", Open, 1, "unreachable unreachable unreachable"},
		"other settings":               {patient, "ffff...f", Open, 5, "failures failures"},
		"fewer than the settings":      {patient, "fff", Closed, 0, ""},
		"rate of a few requests":       {rate, strings.Repeat("f", rateMinimum-1), Closed, 0, ""},
		"rate":                         {rate, strings.Repeat("sf", rateMinimum/2), Open, 1, "error_rate"},
		"rate below":                   {rate, strings.Repeat("ssf", 50), Closed, 0, ""},
		"rates in a row":               {rate, strings.Repeat("sf", rateMinimum/2) + "." + strings.Repeat("sf", rateMinimum/2), Open, 2, "error_rate error_rate"},
		"rate in two windows":          {rate, strings.Repeat("sf", 8) + ".........." + strings.Repeat("sf", 8), Closed, 0, ""},
		"rates with a good window between": {rate, strings.Repeat("sf", rateMinimum/2) + "." + strings.Repeat("s", rateMinimum) +
			".........." + strings.Repeat("fs", rateMinimum/2) + "f", Open, 1, "error_rate error_rate"},
		"no rate by default": {Settings{ConsecutiveFailures: MaxConsecutiveFailures, Ejection: 1, MaxEjection: 1}, strings.Repeat("sf", 100), Closed, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if err := tc.settings.Validate(); err != nil {
				t.Fatal(err)
			}
			var b Breaker
			var begun []string
			now := time.Unix(1000, 0)
			for _, outcome := range tc.outcomes {
				var reason Reason
				switch outcome {
				case 's':
					b.Served(&tc.settings, now, now)
				case 'f':
					reason = b.Failed(&tc.settings, now, now)
				case '5':
					reason = b.Unavailable(&tc.settings, now, now)
				case 'u':
					reason = b.Unreachable(&tc.settings, now)
				default:
					now = now.Add(time.Second)
				}
				if reason != None {
					begun = append(begun, reason.String())
				}
			}
			if got := strings.Join(begun, " "); got != tc.reasons {
				t.Errorf("ejections %q, want %q", got, tc.reasons)
			}
			if left := max(0, b.until.Sub(now)); b.State(now) != tc.state || left != time.Duration(tc.left)*time.Second {
				t.Errorf("state %d for %v, want %d for %d s", b.State(now), left, tc.state, tc.left)
			}
		})
	}
}

// TestHalfOpen checks that a half-open breaker admits a limited number of requests until one of them is served.
func TestHalfOpen(t *testing.T) {
	settings, limit := Default(), 2
	now := time.Unix(1000, 0)
	var b Breaker
	early := now
	b.Unreachable(&settings, now)
	if b.Admits(now, limit) || b.Admits(now, 0) || b.Begin(now) {
		t.Error("an open breaker admits a request, or counts it as a trial")
	}
	now = now.Add(time.Second)
	for i := range limit {
		if !b.Admits(now, limit) || !b.Begin(now) {
			t.Fatalf("trial %d is not admitted", i)
		}
	}
	if b.Admits(now, limit) || !b.Admits(now, 0) {
		t.Error("the limit of trials is ignored, or applies without a limit")
	}
	b.Served(&settings, early, now)
	if b.State(now) != HalfOpen {
		t.Error("a request from before the ejection closes the breaker")
	}
	b.End()
	if !b.Admits(now, limit) {
		t.Error("an ended trial counts")
	}
	b.Served(&settings, now, now)
	if b.State(now) != Closed || !b.Admits(now, 1) || b.Begin(now) {
		t.Error("a served request does not close the breaker")
	}
}

// TestEarlierRequestsDoNotExtend checks that failures of requests that were sent before the end of an ejection have no
// effect.
func TestEarlierRequestsDoNotExtend(t *testing.T) {
	settings := Default()
	now := time.Unix(1000, 0)
	var b Breaker
	b.Unavailable(&settings, now, now)
	sent := now
	now = now.Add(time.Second)
	for range 10 {
		if b.Failed(&settings, sent, now) != None || b.Unavailable(&settings, sent, now) != None {
			t.Fatal("a request of the past opens the breaker")
		}
	}
	if b.State(now) != HalfOpen {
		t.Errorf("state %d", b.State(now))
	}
}

// TestBounds checks for random outcomes that an ejection is bounded and that no breaker stays open without requests.
func TestBounds(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	settings := Settings{ConsecutiveFailures: 3, FailurePercent: 30, Ejection: time.Second, MaxEjection: 5 * time.Second, HalfOpenRequests: 1}
	var b Breaker
	now := time.Unix(1000, 0)
	for range 20_000 {
		now = now.Add(time.Duration(random.IntN(300)) * time.Millisecond)
		sent := now.Add(-time.Duration(random.IntN(3000)) * time.Millisecond)
		trial := b.Begin(now)
		switch random.IntN(4) {
		case 0:
			b.Served(&settings, sent, now)
		case 1:
			b.Failed(&settings, sent, now)
		case 2:
			b.Unavailable(&settings, sent, now)
		case 3:
			b.Unreachable(&settings, now)
		}
		if trial {
			b.End()
		}
		if left := b.until.Sub(now); left > settings.MaxEjection || b.trials != 0 {
			t.Fatalf("open for %v, %d trials", left, b.trials)
		}
		if !b.Admits(now.Add(settings.MaxEjection), settings.HalfOpenRequests) {
			t.Fatal("the breaker does not admit a request after the longest ejection")
		}
	}
}

func TestRejectsInvalidSettings(t *testing.T) {
	for field, change := range map[string]func(*Settings){
		"consecutiveFailures: 0":     func(s *Settings) { s.ConsecutiveFailures = 0 },
		"consecutiveFailures: 1001":  func(s *Settings) { s.ConsecutiveFailures = 1001 },
		"failurePercent: 101":        func(s *Settings) { s.FailurePercent = 101 },
		"failurePercent: -1":         func(s *Settings) { s.FailurePercent = -1 },
		"ejection: 0s":               func(s *Settings) { s.Ejection = 0 },
		"ejection: 2h0m0s":           func(s *Settings) { s.Ejection = 2 * time.Hour },
		"maxEjection: 500ms":         func(s *Settings) { s.MaxEjection = time.Second / 2 },
		"maxEjection: 2h0m0s":        func(s *Settings) { s.MaxEjection = 2 * time.Hour },
		"halfOpenRequests: -1":       func(s *Settings) { s.HalfOpenRequests = -1 },
		"halfOpenRequests: 1000000 ": func(s *Settings) { s.HalfOpenRequests = 1_000_000 },
	} {
		settings := Default()
		change(&settings)
		if err := settings.Validate(); err == nil || !strings.HasPrefix(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
}
