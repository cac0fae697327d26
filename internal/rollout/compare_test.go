package rollout

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/lar"
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

// taking adds, in each of some minutes, n streamed answers with a mean time to the first token and a standard deviation of half of it.
func taking(n int64, seconds ...float64) func(*Sample) {
	return func(s *Sample) {
		for minute, mean := range seconds {
			s.Add(start.Add(time.Duration(minute)*time.Minute), lar.Service{Requests: n,
				FirstToken: lar.Moments{N: n, Sum: float64(n) * mean, SumSquares: float64(n) * mean * mean * 1.25}})
		}
	}
}

func TestCompare(t *testing.T) {
	cases := map[string]struct {
		candidate, stable Sample
		want              Verdict
		reason            string
	}{
		"nothing":                 {Sample{}, Sample{}, TooFew, ""},
		"few":                     {sample(29, 8, 10), sample(100, 2, 10), TooFew, ""},
		"few of the stable one":   {sample(100, 8, 10), sample(29, 2, 10), TooFew, ""},
		"no activation":           {sample(100, 0, 0), sample(100, 0, 0), TooFew, ""},
		"higher":                  {sample(40, 8, 10), sample(40, 2, 10), Better, ""},
		"lower":                   {sample(40, 2, 10), sample(40, 8, 10), Worse, "LocalityWorse"},
		"the same":                {sample(40, 4, 10), sample(40, 4, 10), NotBetter, ""},
		"higher, and fails":       {sample(40, 8, 10, served(100, 20)), sample(40, 2, 10, served(200, 0)), Worse, "MoreFailures"},
		"fails now and then":      {sample(40, 8, 10, served(100, 1)), sample(40, 2, 10, served(200, 0)), Better, ""},
		"both fail":               {sample(40, 8, 10, served(100, 50)), sample(40, 2, 10, served(100, 50)), Better, ""},
		"higher, and slow":        {sample(40, 8, 10, taking(200, 1.6, 1.6, 1.6)), sample(40, 2, 10, taking(200, 1, 1, 1)), Worse, "FirstTokenSlower"},
		"slow after a while":      {sample(40, 8, 10, taking(200, 1, 1.6, 1.6, 1.6)), sample(40, 2, 10, taking(200, 1, 1, 1, 1)), Worse, "FirstTokenSlower"},
		"within the margin":       {sample(40, 8, 10, taking(2000, 1.15, 1.15, 1.15)), sample(40, 2, 10, taking(2000, 1, 1, 1)), Better, ""},
		"slow, too few to tell":   {sample(40, 8, 10, taking(9, 5, 5, 5)), sample(40, 2, 10, taking(200, 1, 1, 1)), Better, ""},
		"slow for two minutes":    {sample(40, 8, 10, taking(200, 5, 5)), sample(40, 2, 10, taking(200, 1, 1)), Better, ""},
		"slow at first":           {sample(40, 8, 10, taking(200, 5, 5, 5, 1)), sample(40, 2, 10, taking(200, 1, 1, 1, 1)), Better, ""},
		"both slow in one minute": {sample(40, 8, 10, taking(200, 1, 5, 1)), sample(40, 2, 10, taking(200, 1, 5, 1)), Better, ""},
		"slow, in other minutes": {sample(40, 8, 10, taking(200, 5, 5, 5)), sample(40, 2, 10, func(s *Sample) {
			s.Add(start.Add(-time.Minute), lar.Service{Requests: 200, FirstToken: lar.Moments{N: 200, Sum: 200, SumSquares: 250}})
		}), Better, ""},
		"fails, and nothing was sampled":  {sample(0, 0, 0, served(100, 20)), sample(0, 0, 0, served(200, 0)), Worse, "MoreFailures"},
		"nothing fails, none was sampled": {sample(0, 0, 0, served(100, 0)), sample(0, 0, 0, served(200, 0)), TooFew, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := Compare(tc.candidate, tc.stable); got.Verdict != tc.want || got.Reason != tc.reason {
				t.Errorf("%+v, want %s %s", got, tc.want, tc.reason)
			}
		})
	}
}

// kind is what the requests to a revision are like.
type kind struct{ rate, failures, seconds float64 }

// serve adds requests: local shares scatter by 0.12 about the rate, their numbers of tokens and their times by their own size.
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

// A canary is looked at again and again as requests come in. Plans that are better are hardly ever taken back, plans that are
// worse hardly ever promoted, and neither takes long.
func TestCompareErrs(t *testing.T) {
	stable := kind{rate: 0.40, failures: 0.001, seconds: 0.3}
	cases := map[string]struct {
		candidate               kind
		better, worse           float64 // at least this share is found so, or
		betterAtMost, worseMost float64 // at most this
	}{
		"better by 5 points":         {kind{0.45, 0.001, 0.3}, 0.99, 0, 1, 0.005},
		"better by 20 points":        {kind{0.60, 0.001, 0.3}, 1, 0, 1, 0.005},
		"worse by 5 points":          {kind{0.35, 0.001, 0.3}, 0, 0.99, 0.005, 1},
		"no different":               {kind{0.40, 0.001, 0.3}, 0, 0, 0.05, 0.05},
		"better, and 5% fail":        {kind{0.60, 0.05, 0.3}, 0, 0, 1, 1},
		"no different, and 5% fail":  {kind{0.40, 0.05, 0.3}, 0, 0.97, 0.05, 1},
		"no different, half as fast": {kind{0.40, 0.001, 0.6}, 0, 0.99, 0.05, 1},
		"no different, 15% slower":   {kind{0.40, 0.001, 0.345}, 0, 0, 0.05, 0.05},
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
					verdict := Compare(candidate, other).Verdict
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

// The variance of a mean does not go below nothing by rounding.
func TestMean(t *testing.T) {
	if _, variance := mean(lar.Moments{N: 3, Sum: 0.3, SumSquares: 0.03 - 1e-18}); variance < 0 || math.IsNaN(variance) {
		t.Errorf("variance %v", variance)
	}
}
