// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/observation/lar"
)

// traffic describes the times of a revision.
type traffic struct {
	change   float64 // relative to the stable revision
	inFlight float64 // mean number of requests in flight
	each     int     // requests per minute
	// sd and correlation describe the deviation of one revision's times per minute: a first-order autoregressive
	// process.
	sd, correlation float64
	// cold is the relative increase of the times in the first minute; it halves every minute.
	cold float64
	// whole: unstreamed responses. plain: no covariates are reported.
	whole, plain bool
}

// minutes returns random requests of a number of minutes. Times depend on the covariates and on a level that both
// revisions share.
func (tr traffic) minutes(random *rand.Rand, levels []float64) series {
	all := make(series, len(levels))
	own := tr.sd * random.NormFloat64()
	for minute := range all {
		own = tr.correlation*own + math.Sqrt(1-tr.correlation*tr.correlation)*tr.sd*random.NormFloat64()
		factor := levels[minute] * (1 + own) * (1 + tr.change) * (1 + tr.cold*math.Pow(0.5, float64(minute)))
		served := &all[minute]
		for range tr.each {
			x := lar.Covariates{800 * random.ExpFloat64(), 1 + math.Floor(200*random.ExpFloat64()), math.Floor(tr.inFlight * (0.5 + random.Float64()))}
			noise := func() float64 { return math.Exp(0.4*random.NormFloat64() - 0.08) }
			token := 0.02 * factor * (0.4 + 0.03*x[2]) * noise()
			first := 0.1 * factor * (0.4 + 0.03*x[2] + x[0]/1600) * noise()
			add := func(m *lar.Moments, value float64) {
				if tr.plain {
					m.Add(value)
				} else {
					m.AddWith(value, x)
				}
			}
			served.Requests++
			if tr.whole {
				add(&served.Answer, first+token*x[1])
			} else {
				add(&served.FirstToken, first)
				add(&served.InterToken, token)
			}
		}
	}
	return all
}

// Times are evaluated at each look of an hour. Candidates that are slower by the margin are rarely promoted, and
// candidates that are not slower are rarely rolled back, even if the minutes of one revision are correlated.
func TestTimesErr(t *testing.T) {
	usual := traffic{inFlight: 20, each: 120}
	with := func(change func(*traffic)) traffic {
		tr := usual
		tr.each = 60
		change(&tr)
		return tr
	}
	change := func(by float64) traffic { return with(func(tr *traffic) { tr.change = by }) }
	noisy := func(by, sd, correlation float64) traffic {
		return with(func(tr *traffic) { tr.change, tr.sd, tr.correlation = by, sd, correlation })
	}
	cases := map[string]struct {
		candidate                  traffic
		stable                     traffic
		promoted, promotedMost     float64
		takenBack, takenBackAtMost float64
	}{
		"equal":                             {change(0), usual, 0.9, 1, 0, 0.01},
		"10% faster":                        {change(-0.10), usual, 0.99, 1, 0, 0.001},
		"5% slower":                         {change(0.05), usual, 0, 0.025, 0, 1},
		"10% slower":                        {change(0.10), usual, 0, 0.001, 0.9, 1},
		"50% slower":                        {change(0.50), usual, 0, 0.001, 0.99, 1},
		"equal, noise of 4%":                {noisy(0, 0.04, 0), usual, 0.5, 1, 0, 0.025},
		"equal, correlated noise of 4%":     {noisy(0, 0.04, 0.5), usual, 0.1, 1, 0, 0.025},
		"5% slower, noise of 4%":            {noisy(0.05, 0.04, 0), usual, 0, 0.025, 0, 1},
		"5% slower, correlated noise of 4%": {noisy(0.05, 0.04, 0.5), usual, 0, 0.05, 0, 1},
		"equal, correlated noise of 20%":    {noisy(0, 0.20, 0.5), usual, 0, 1, 0, 0.05},
		"equal, starts cold":                {with(func(tr *traffic) { tr.cold = 1 }), usual, 0.5, 1, 0, 0.01},
		"equal, 1.5 times in flight":        {with(func(tr *traffic) { tr.inFlight = 30 }), usual, 0.6, 1, 0, 0.01},
		"the same, without covariates":      {with(func(tr *traffic) { tr.inFlight, tr.plain = 30, true }), usual, 0, 0, 0.9, 1},
		"equal, without covariates":         {with(func(tr *traffic) { tr.plain = true }), usual, 0.5, 1, 0, 0.01},
		"equal, unstreamed":                 {with(func(tr *traffic) { tr.whole = true }), traffic{inFlight: 20, each: 120, whole: true}, 0.9, 1, 0, 0.01},
		"20% slower, unstreamed":            {with(func(tr *traffic) { tr.whole, tr.change = true, 0.2 }), traffic{inFlight: 20, each: 120, whole: true}, 0, 0.001, 0.7, 1},
		"equal, few requests":               {with(func(tr *traffic) { tr.each = 3 }), usual, 0, 0, 0, 0.01},
	}
	const runs = 300
	local := sample(1000, 8, 10).Locality
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var promoted, takenBack, minutes int
			for seed := range uint64(runs) {
				random := rand.New(rand.NewPCG(seed, 5))
				levels := make([]float64, looks[len(looks)-1])
				for i := range levels { // load varies over the hour
					levels[i] = 1 + 0.3*math.Sin(float64(i)/9) + 0.1*random.Float64()
				}
				ours, theirs := tc.candidate.minutes(random, levels), tc.stable.minutes(random, levels)
				candidate, stable := Sample{Locality: local}, Sample{Locality: sample(1000, 2, 10).Locality}
				done := 0
				for _, look := range looks {
					for ; done < look; done++ {
						candidate.Add(start.Add(time.Duration(done)*time.Minute), ours[done])
						stable.Add(start.Add(time.Duration(done)*time.Minute), theirs[done])
					}
					verdict := Compare(candidate, stable, Terms{Since: start, Now: start.Add(time.Duration(look) * time.Minute), Soak: timedSoak}).Verdict
					if verdict == Better {
						promoted++
					}
					if verdict == Worse {
						takenBack++
					}
					if verdict == Better || verdict == Worse {
						break
					}
				}
				minutes += done
			}
			up, back := float64(promoted)/runs, float64(takenBack)/runs
			t.Logf("%.1f%% promoted, %.1f%% rolled back, after %.0f minutes in the mean", 100*up, 100*back, float64(minutes)/runs)
			if up < tc.promoted || up > tc.promotedMost || back < tc.takenBack || back > tc.takenBackAtMost {
				t.Errorf("%.3f promoted, want %v to %v; %.3f rolled back, want %v to %v", up, tc.promoted, tc.promotedMost, back, tc.takenBack, tc.takenBackAtMost)
			}
		})
	}
}

// A promotion needs the times that at least a third of the requests have, and reports which of them are missing.
func TestTimesForAPromotion(t *testing.T) {
	higher, equal := sample(1000, 8, 10).Locality, sample(1000, 4, 10).Locality
	lower := sample(1000, 2, 10).Locality
	// streamed and whole return minutes of n requests with nearly equal times, in seconds.
	streamed := func(n int64, token, first float64) func(int) lar.Service {
		return func(minute int) lar.Service {
			s := lar.Service{Requests: n}
			for range n {
				scatter := 1 + 0.01*float64(minute%3)
				s.InterToken.Add(token * scatter)
				s.FirstToken.Add(first * scatter)
			}
			return s
		}
	}
	whole := func(n int64, seconds float64) func(int) lar.Service {
		return func(minute int) lar.Service {
			s := lar.Service{Requests: n}
			for range n {
				s.Answer.Add(seconds * (1 + 0.01*float64(minute%3)))
			}
			return s
		}
	}
	both := func(a, b func(int) lar.Service) func(int) lar.Service {
		return func(minute int) lar.Service {
			s := a(minute)
			s.Merge(b(minute))
			return s
		}
	}
	short := func(minute int) lar.Service { // one token each
		s := streamed(100, 1, 1)(minute)
		s.InterToken = lar.Moments{}
		return s
	}
	none := func(int) lar.Service { return lar.Service{} }
	usual := streamed(100, 1, 1)
	for name, tc := range map[string]struct {
		candidate, stable func(minute int) lar.Service
		locality, other   lar.Ratio
		soak              time.Duration
		want              Verdict
		says              string // part of the message, or of what is missing
	}{
		"more local, as fast":                  {usual, usual, higher, equal, timedSoak, Better, "its time to the first token changes by +0.0%"},
		"more local, no requests":              {none, none, higher, equal, timedSoak, TooFew, "0 of at least 200 requests with a time"},
		"the same, a short soak":               {none, none, higher, equal, timedSoak - 1, Better, "8"},
		"few requests":                         {streamed(4, 1, 1), usual, higher, equal, timedSoak, TooFew, "40 of at least 200 streamed requests of the canary"},
		"few of the stable one":                {usual, streamed(4, 1, 1), higher, equal, timedSoak, TooFew, "40 of at least 200 streamed requests of the stable revision"},
		"few unstreamed requests":              {whole(4, 1), whole(100, 1), higher, equal, timedSoak, TooFew, "40 of at least 200 unstreamed requests of the canary"},
		"only unstreamed requests":             {whole(100, 1), whole(100, 1), higher, equal, timedSoak, Better, "its time of an unstreamed response changes by"},
		"few unstreamed requests, and streams": {both(usual, whole(2, 1)), both(usual, whole(2, 1)), higher, equal, timedSoak, Better, "per output token"},
		"a token each":                         {short, short, higher, equal, timedSoak, Better, "to the first token"},
		"a later first token":                  {streamed(100, 1, 1.2), usual, higher, equal, timedSoak, Worse, "its time to the first token changes by +20.0%"},
		"more local, but slower":               {streamed(100, 1.05, 1), usual, higher, equal, timedSoak, Worse, "its time per output token changes by +5.0%"},
		"slower, a short soak":                 {streamed(100, 1.05, 1), usual, higher, equal, 1, Worse, "its time per output token changes by +5.0%"},
		"more local, 1% slower":                {streamed(100, 1.01, 1), usual, higher, equal, timedSoak, Better, "+1.0%"},
		"as local, and faster":                 {streamed(100, 0.9, 1), usual, equal, equal, timedSoak, Better, "-10.0%"},
		"not sampled, and faster":              {streamed(100, 0.9, 1), usual, lar.Ratio{}, lar.Ratio{}, timedSoak, Better, "-10.0%"},
		"not sampled, as fast":                 {usual, usual, lar.Ratio{}, lar.Ratio{}, timedSoak, TooFew, "0 of at least 30 sampled requests of the canary"},
		"as local, as fast":                    {usual, usual, equal, equal, timedSoak, NotBetter, "changes by"},
		"a faster first token":                 {streamed(100, 1, 0.8), usual, equal, equal, timedSoak, NotBetter, "changes by"},
		"faster, but less local":               {streamed(100, 0.9, 1), usual, lower, equal, timedSoak, Worse, "its local activation rate"},
	} {
		candidate, stable := Sample{Locality: tc.locality}, Sample{Locality: tc.other}
		for minute := range 13 {
			candidate.Add(start.Add(time.Duration(minute)*time.Minute), tc.candidate(minute))
			stable.Add(start.Add(time.Duration(minute)*time.Minute), tc.stable(minute))
		}
		got := Compare(candidate, stable, Terms{Since: start, Now: start.Add(13 * time.Minute), Soak: tc.soak})
		if text := got.Message + got.Missing; got.Verdict != tc.want || !strings.Contains(text, tc.says) || (got.Missing != "") != (got.Verdict == TooFew) {
			t.Errorf("%s: %+v, want %s and %q", name, got, tc.want, tc.says)
		}
	}
}
