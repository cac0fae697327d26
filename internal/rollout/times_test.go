package rollout

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/lar"
)

// traffic is what the times of a revision are like.
type traffic struct {
	change   float64 // relative to the stable revision
	inFlight float64 // in the mean
	each     int     // requests a minute
	// sd and correlation are those of what a minute adds to the times of one revision alone: an autoregressive process of first order.
	sd, correlation float64
	// cold is by how much the times are longer in the first minute; the surplus halves from minute to minute.
	cold float64
	// whole answers in one piece, plain reports no covariates.
	whole, plain bool
}

// minutes draws the requests of a number of minutes. Times depend on the covariates and on a level that both revisions have in common.
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

// Times are evaluated at each look of an hour. Candidates that are slower by the margin are hardly ever promoted, and those that are not slower
// hardly ever taken back, also where the minutes of one revision depend on each other.
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
		"equal":                               {change(0), usual, 0.9, 1, 0, 0.01},
		"10% faster":                          {change(-0.10), usual, 0.99, 1, 0, 0.001},
		"5% slower":                           {change(0.05), usual, 0, 0.025, 0, 1},
		"10% slower":                          {change(0.10), usual, 0, 0.001, 0.9, 1},
		"50% slower":                          {change(0.50), usual, 0, 0.001, 0.99, 1},
		"equal, noise of 4%":                  {noisy(0, 0.04, 0), usual, 0.5, 1, 0, 0.025},
		"equal, correlated noise of 4%":       {noisy(0, 0.04, 0.5), usual, 0.1, 1, 0, 0.025},
		"5% slower, noise of 4%":              {noisy(0.05, 0.04, 0), usual, 0, 0.025, 0, 1},
		"5% slower, correlated noise of 4%":   {noisy(0.05, 0.04, 0.5), usual, 0, 0.05, 0, 1},
		"equal, correlated noise of 20%":      {noisy(0, 0.20, 0.5), usual, 0, 1, 0, 0.05},
		"equal, starts cold":                  {with(func(tr *traffic) { tr.cold = 1 }), usual, 0.5, 1, 0, 0.01},
		"equal, half as many again in flight": {with(func(tr *traffic) { tr.inFlight = 30 }), usual, 0.6, 1, 0, 0.01},
		"the same, without covariates":        {with(func(tr *traffic) { tr.inFlight, tr.plain = 30, true }), usual, 0, 0, 0.9, 1},
		"equal, without covariates":           {with(func(tr *traffic) { tr.plain = true }), usual, 0.5, 1, 0, 0.01},
		"equal, answers in one piece":         {with(func(tr *traffic) { tr.whole = true }), traffic{inFlight: 20, each: 120, whole: true}, 0.9, 1, 0, 0.01},
		"20% slower, answers in one piece":    {with(func(tr *traffic) { tr.whole, tr.change = true, 0.2 }), traffic{inFlight: 20, each: 120, whole: true}, 0, 0.001, 0.7, 1},
		"equal, few requests":                 {with(func(tr *traffic) { tr.each = 3 }), usual, 0, 0, 0, 0.01},
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
			t.Logf("%.1f%% promoted, %.1f%% taken back, after %.0f minutes in the mean", 100*up, 100*back, float64(minutes)/runs)
			if up < tc.promoted || up > tc.promotedMost || back < tc.takenBack || back > tc.takenBackAtMost {
				t.Errorf("%.3f promoted, want %v to %v; %.3f taken back, want %v to %v", up, tc.promoted, tc.promotedMost, back, tc.takenBack, tc.takenBackAtMost)
			}
		})
	}
}
