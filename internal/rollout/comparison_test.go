// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/observation/lar"
)

func sample(requests int, local, total int64, change ...func(*Sample)) Sample {
	var s Sample
	for range requests {
		s.Locality.Add(lar.Activations{Local: local, Total: total})
	}
	for _, c := range change {
		c(&s)
	}
	return s
}

func served(requests, failures int64) func(*Sample) {
	return func(s *Sample) { s.Service.Requests, s.Service.Failures = requests, failures }
}

// taking adds, for each given mean time to the first token, a minute with n streamed responses.
func taking(n int64, seconds ...float64) func(*Sample) {
	return func(s *Sample) {
		for minute, mean := range seconds {
			s.Add(start.Add(time.Duration(minute)*time.Minute), lar.Service{Requests: n, FirstToken: lar.Moments{N: n, Sum: float64(n) * mean, SumSquares: float64(n) * mean * mean * 1.25}})
		}
	}
}

// at returns the terms of a comparison after a number of whole minutes.
func at(minutes int, promised float64) Terms {
	return Terms{Promised: promised, Since: start, Now: start.Add(time.Duration(minutes) * time.Minute), Soak: time.Minute}
}

func TestCompare(t *testing.T) {
	cases := map[string]struct {
		candidate, stable Sample
		want              Verdict
		reason            string
		promised          float64
	}{
		"nothing":                 {Sample{}, Sample{}, TooFew, "", 0},
		"few":                     {sample(29, 8, 10), sample(100, 2, 10), TooFew, "", 0},
		"few of the stable one":   {sample(100, 8, 10), sample(29, 2, 10), TooFew, "", 0},
		"no activation":           {sample(100, 0, 0), sample(100, 0, 0), TooFew, "", 0},
		"higher":                  {sample(40, 8, 10), sample(40, 2, 10), Better, "", 0},
		"lower":                   {sample(40, 2, 10), sample(40, 8, 10), Worse, "LocalityWorse", 0},
		"the same":                {sample(40, 4, 10), sample(40, 4, 10), NotBetter, "", 0},
		"higher, and fails":       {sample(40, 8, 10, served(100, 20)), sample(40, 2, 10, served(200, 0)), Worse, "MoreFailures", 0},
		"fails rarely":            {sample(40, 8, 10, served(100, 1)), sample(40, 2, 10, served(200, 0)), Better, "", 0},
		"both fail":               {sample(40, 8, 10, served(100, 50)), sample(40, 2, 10, served(100, 50)), Better, "", 0},
		"higher, and slow":        {sample(40, 8, 10, taking(200, 1.6, 1.7, 1.6, 1.65, 1.6, 1.6)), sample(40, 2, 10, taking(200, 1, 1, 1, 1, 1, 1)), Worse, "FirstTokenSlower", 0},
		"within the margin":       {sample(40, 8, 10, taking(2000, 1.05, 1.04, 1.06, 1.05, 1.05, 1.05)), sample(40, 2, 10, taking(2000, 1, 1, 1, 1, 1, 1)), Better, "", 0},
		"slow, too few requests":  {sample(40, 8, 10, taking(5, 5, 5, 5, 5, 5, 5)), sample(40, 2, 10, taking(200, 1, 1, 1, 1, 1, 1)), Better, "", 0},
		"slow for two minutes":    {sample(40, 8, 10, taking(200, 5, 5)), sample(40, 2, 10, taking(200, 1, 1)), Better, "", 0},
		"slow until a minute ago": {sample(40, 8, 10, taking(200, 1.6, 1.6, 1.6, 1.6, 1.6, 0.99)), sample(40, 2, 10, taking(200, 1, 1, 1, 1, 1, 1)), Better, "", 0},
		"both slow in one minute": {sample(40, 8, 10, taking(200, 1, 1, 1, 5, 1, 1)), sample(40, 2, 10, taking(200, 1, 1, 1, 5, 1, 1)), Better, "", 0},
		"slow, in other minutes": {sample(40, 8, 10, taking(200, 5, 5, 5, 5, 5, 5)), sample(40, 2, 10, func(s *Sample) {
			s.Add(start.Add(-time.Minute), lar.Service{Requests: 200, FirstToken: lar.Moments{N: 200, Sum: 200, SumSquares: 250}})
		}), Better, "", 0},
		"lower, as promised":                    {sample(400, 37, 100), sample(400, 40, 100), Better, "", -0.03},
		"a little lower than promised":          {sample(400, 36, 100), sample(400, 40, 100), Better, "", -0.03},
		"lower than promised":                   {sample(400, 30, 100), sample(400, 40, 100), Worse, "LocalityWorse", -0.03},
		"lower, and a higher rate is promised":  {sample(400, 37, 100), sample(400, 40, 100), Worse, "LocalityWorse", 0.03},
		"lower, as promised, and slow":          {sample(400, 37, 100, taking(200, 1.6, 1.7, 1.6, 1.65, 1.6, 1.6)), sample(400, 40, 100, taking(200, 1, 1, 1, 1, 1, 1)), Worse, "FirstTokenSlower", -0.03},
		"higher, though lower was promised":     {sample(400, 60, 100), sample(400, 40, 100), Better, "", -0.03},
		"lower, as promised, of a few requests": {sample(29, 37, 100), sample(400, 40, 100), TooFew, "", -0.03},
		"fails, and nothing was sampled":        {sample(0, 0, 0, served(100, 20)), sample(0, 0, 0, served(200, 0)), Worse, "MoreFailures", 0},
		"nothing fails, none was sampled":       {sample(0, 0, 0, served(100, 0)), sample(0, 0, 0, served(200, 0)), TooFew, "", 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := Compare(tc.candidate, tc.stable, at(6, tc.promised)); got.Verdict != tc.want || got.Reason != tc.reason {
				t.Errorf("%+v, want %s %s", got, tc.want, tc.reason)
			}
		})
	}
}

// A change that is no plan is better once no time is longer, for any soak. Its local activation rate counts only where it
// is comparable.
func TestCompareOfChange(t *testing.T) {
	same, slow := taking(2000, 1, 1, 1, 1, 1, 1), taking(2000, 1.6, 1.7, 1.6, 1.65, 1.6, 1.6)
	for name, tc := range map[string]struct {
		candidate, stable Sample
		anyLocality       bool
		want              Verdict
		reason            string
	}{
		"no request":                         {Sample{}, Sample{}, true, TooFew, ""},
		"not slower":                         {sample(0, 0, 0, same), sample(0, 0, 0, same), true, Better, ""},
		"slower":                             {sample(0, 0, 0, slow), sample(0, 0, 0, same), true, Worse, "FirstTokenSlower"},
		"too few times":                      {sample(0, 0, 0, taking(5, 1, 1, 1, 1, 1, 1)), sample(0, 0, 0, same), true, TooFew, ""},
		"more local, too few times":          {sample(40, 8, 10, taking(5, 1, 1, 1, 1, 1, 1)), sample(40, 2, 10, same), false, TooFew, ""},
		"fails":                              {sample(0, 0, 0, same, served(100, 20)), sample(0, 0, 0, same, served(200, 0)), true, Worse, "MoreFailures"},
		"less local":                         {sample(40, 2, 10, same), sample(40, 8, 10, same), false, Worse, "LocalityWorse"},
		"less local, which is no comparison": {sample(40, 2, 10, same), sample(40, 8, 10, same), true, Better, ""},
		"as local":                           {sample(40, 4, 10, same), sample(40, 4, 10, same), false, Better, ""},
	} {
		terms := at(6, 0)
		terms.NotSlower, terms.AnyLocality = true, tc.anyLocality
		got := Compare(tc.candidate, tc.stable, terms)
		if got.Verdict != tc.want || got.Reason != tc.reason || (got.Missing != "") != (tc.want == TooFew) {
			t.Errorf("%s: %+v, want %s %s", name, got, tc.want, tc.reason)
		}
	}
}

// kind describes the requests to a revision.
type kind struct{ rate, failures, seconds float64 }

// serve adds requests. Local shares have a standard deviation of 0.12 around the rate; token counts and times have
// their own distributions.
func (k kind) serve(random *rand.Rand, s *Sample, minute time.Time, requests int) {
	for range requests {
		total := 1 + int64(400*random.ExpFloat64())
		share := min(max(k.rate+0.12*random.NormFloat64(), 0), 1)
		s.Locality.Add(lar.Activations{Local: int64(share * float64(total)), Total: total})
		one := lar.Service{Requests: 1}
		if random.Float64() < k.failures {
			one.Failures++
		}
		one.FirstToken.Add(k.seconds * random.ExpFloat64())
		s.Add(minute, one)
	}
}

// A canary is evaluated repeatedly as requests arrive, with a soak that requires no proof of times. Better plans are
// rarely rolled back, worse plans are rarely promoted, and neither takes long.
func TestCompareErrs(t *testing.T) {
	stable := kind{rate: 0.40, failures: 0.001, seconds: 0.3}
	cases := map[string]struct {
		candidate               kind
		promised                float64
		better, worse           float64 // minimum share with this result, or
		betterAtMost, worseMost float64 // maximum share
	}{
		"better by 5 points":           {kind{0.45, 0.001, 0.3}, 0, 0.99, 0, 1, 0.005},
		"better by 20 points":          {kind{0.60, 0.001, 0.3}, 0, 1, 0, 1, 0.005},
		"worse by 5 points":            {kind{0.35, 0.001, 0.3}, 0, 0, 0.99, 0.005, 1},
		"no different":                 {kind{0.40, 0.001, 0.3}, 0, 0, 0, 0.025, 0.025},
		"better, and 5% fail":          {kind{0.60, 0.05, 0.3}, 0, 0, 0, 1, 1},
		"no different, and 5% fail":    {kind{0.40, 0.05, 0.3}, 0, 0, 0.97, 0.05, 1},
		"as promised, 3 points less":   {kind{0.37, 0.001, 0.3}, -0.03, 0.97, 0, 1, 0.005},
		"10 points less than promised": {kind{0.27, 0.001, 0.3}, -0.03, 0, 0.99, 0.005, 1},
	}
	const runs, looksAt, each = 400, 120, 25
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var betters, worses int
			var requests float64
			for seed := range uint64(runs) {
				random := rand.New(rand.NewPCG(seed, 3))
				var candidate, other Sample
				for look := range looksAt {
					minute := start.Add(time.Duration(look) * 30 * time.Second).Truncate(time.Minute)
					tc.candidate.serve(random, &candidate, minute, each)
					stable.serve(random, &other, minute, 2*each)
					verdict := Compare(candidate, other, Terms{Promised: tc.promised, Since: start, Now: start.Add(time.Duration(look+1) * 30 * time.Second), Soak: time.Minute}).Verdict
					if verdict == Better {
						betters++
					}
					if verdict == Worse {
						worses++
					}
					if verdict == Better || verdict == Worse {
						break
					}
				}
				requests += float64(candidate.Locality.Requests)
			}
			better, worse := float64(betters)/runs, float64(worses)/runs
			t.Logf("found better in %.1f%% of runs, worse in %.1f%%, after %.0f of at most %d requests in the mean", 100*better, 100*worse, requests/runs, looksAt*each)
			if better < tc.better || better > tc.betterAtMost || worse < tc.worse || worse > tc.worseMost {
				t.Errorf("found better in %.3f and worse in %.3f of runs", better, worse)
			}
		})
	}
}
