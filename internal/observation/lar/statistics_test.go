// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"math"
	"math/rand/v2"
	"testing"
)

// request returns a random request with a realistic length distribution, its own rate, and a forecast that explains
// part of the rate.
func request(random *rand.Rand) (Activations, float64) {
	total := int64(24 * math.Exp(3+random.NormFloat64()))
	predicted := 0.1 + 0.3*random.Float64()
	share := min(max(predicted+0.02+0.08*random.NormFloat64(), 0), 1)
	return Activations{Local: int64(math.Round(share * float64(total))), Total: total}, predicted
}

// The standard errors of rate, bias and slope match the actual deviation of the estimates, and their 95% intervals have
// the nominal coverage.
func TestStandardErrors(t *testing.T) {
	const runs, requests = 1000, 150
	var truth Sketch
	random := rand.New(rand.NewPCG(1, 2))
	for range 400_000 {
		a, predicted := request(random)
		truth.Add(Observation{Count: Count{Activations: a}, Forecast: &Forecast{Predicted: predicted}})
	}
	trueBias, _ := truth.Forecast.Bias()
	trueSlope, _ := truth.Forecast.Slope()
	estimates := map[string]func(Sketch) (float64, float64){
		"rate":  func(s Sketch) (float64, float64) { return s.Overall.Value(), s.Overall.StandardError() },
		"bias":  func(s Sketch) (float64, float64) { return s.Forecast.Bias() },
		"slope": func(s Sketch) (float64, float64) { return s.Forecast.Slope() },
	}
	truths := map[string]float64{"rate": truth.Overall.Value(), "bias": trueBias, "slope": trueSlope}
	covered, sum, squares, errors := map[string]int{}, map[string]float64{}, map[string]float64{}, map[string]float64{}
	for range runs {
		var s Sketch
		for range requests {
			a, predicted := request(random)
			s.Add(Observation{Count: Count{Activations: a}, Forecast: &Forecast{Predicted: predicted}})
		}
		for name, estimate := range estimates {
			value, standardError := estimate(s)
			sum[name] += value
			squares[name] += value * value
			errors[name] += standardError
			if math.Abs(value-truths[name]) <= normal95*standardError {
				covered[name]++
			}
		}
	}
	for name := range estimates {
		mean := sum[name] / runs
		scatter := math.Sqrt((squares[name] - mean*sum[name]) / (runs - 1))
		t.Logf("%s: %.4f, scatter %.4f, standard error %.4f, covered %d of %d", name, truths[name], scatter, errors[name]/runs, covered[name], runs)
		if off := errors[name] / runs / scatter; off < 0.88 || off > 1.12 {
			t.Errorf("%s: the mean standard error is %.5f, estimates scatter by %.5f", name, errors[name]/runs, scatter)
		}
		if covered[name] < 920 || covered[name] > 975 {
			t.Errorf("%s: 95%% intervals cover the truth in %d of %d runs", name, covered[name], runs)
		}
		if math.Abs(mean-truths[name]) > 4*scatter/math.Sqrt(runs)+0.002 {
			t.Errorf("%s: the mean estimate is %.4f, the truth %.4f", name, mean, truths[name])
		}
	}
}

// The sums give the same result as the residuals.
func TestMomentsAgainstResiduals(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for n := 3; n < 40; n++ {
		var c Calibration
		var r Ratio
		type point struct{ l, t, x float64 }
		var points []point
		for range n {
			a, x := request(random)
			c.Add(a, x)
			r.Add(a)
			points = append(points, point{float64(a.Local), float64(a.Total), x})
		}
		var weight, meanX, meanY float64
		for _, p := range points {
			weight += p.t
			meanX += p.t * p.x
			meanY += p.l
		}
		meanX /= weight
		meanY /= weight
		var spread, both float64
		for _, p := range points {
			spread += p.t * (p.x - meanX) * (p.x - meanX)
			both += (p.x - meanX) * (p.l - p.t*meanY)
		}
		slope := both / spread
		var slopeSquares, biasSquares, rateSquares float64
		for _, p := range points {
			residual := p.l - p.t*(meanY+slope*(p.x-meanX))
			slopeSquares += (p.x - meanX) * (p.x - meanX) * residual * residual
			biasSquares += math.Pow(p.l-p.t*p.x-p.t*(meanY-meanX), 2)
			rateSquares += math.Pow(p.l-p.t*meanY, 2)
		}
		count := float64(n)
		near := func(what string, got, want float64) {
			if math.Abs(got-want) > 1e-9*math.Abs(want)+1e-12 {
				t.Errorf("%d requests: %s is %v, want %v", n, what, got, want)
			}
		}
		gotSlope, gotSlopeError := c.Slope()
		gotBias, gotBiasError := c.Bias()
		near("slope", gotSlope, slope)
		near("slope's error", gotSlopeError, math.Sqrt(slopeSquares*count/(count-2))/spread)
		near("bias", gotBias, meanY-meanX)
		near("bias' error", gotBiasError, math.Sqrt(biasSquares*count/(count-1))/weight)
		near("rate", r.Value(), meanY)
		near("rate's error", r.StandardError(), math.Sqrt(rateSquares*count/(count-1))/weight)
	}
}

func TestTooFewRequests(t *testing.T) {
	var s Sketch
	x := 0.5
	if !math.IsNaN(s.Overall.Value()) || !math.IsNaN(s.RemoteRanksPerToken()) || !math.IsNaN(s.Forecast.Predicted()) {
		t.Error("nothing has a rate")
	}
	for n := 1; n <= 3; n++ {
		s.Add(Observation{Count: Count{Activations: Activations{1, 4}}, Forecast: &Forecast{Predicted: x}})
		slope, _ := s.Forecast.Slope()
		if known := !math.IsNaN(s.Overall.StandardError()); known != (n > 1) || !math.IsNaN(slope) {
			t.Errorf("%d requests, all alike: standard error %v, slope %v", n, s.Overall.StandardError(), slope)
		}
	}
}

// The standard error of the capture overhead matches its deviation, and an overhead of 5% is rarely found to be above
// 5%.
func TestCaptureCost(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	for _, cost := range []float64{1, 1.05, 1.2} {
		const runs = 400
		above := 0
		var sum, squares, errors float64
		for range runs {
			var c CaptureCost
			for i := range 4000 {
				tokens := math.Exp(5 + 0.5*random.NormFloat64())
				seconds := tokens * 0.01 * math.Exp(0.3*random.NormFloat64())
				if i%10 == 0 {
					c.Asked.Add(cost*seconds, tokens)
				} else {
					c.Plain.Add(seconds, tokens)
				}
			}
			ratio, standardError, known := c.Ratio()
			if !known || c.Validate() != nil {
				t.Fatalf("not known: %+v", c)
			}
			sum, squares, errors = sum+ratio, squares+ratio*ratio, errors+standardError
			if c.Above(1.05) {
				above++
			}
		}
		mean := sum / runs
		scatter := math.Sqrt((squares - mean*sum) / (runs - 1))
		t.Logf("cost %.2f: ratio %.3f, scatter %.4f, standard error %.4f, above in %d of %d", cost, mean, scatter, errors/runs, above, runs)
		if math.Abs(mean-cost) > 0.005 || errors/runs < 0.88*scatter || errors/runs > 1.12*scatter {
			t.Errorf("cost %v: mean %v, scatter %v, standard error %v", cost, mean, scatter, errors/runs)
		}
		if cost <= 1.05 && above > runs/20 || cost == 1.2 && above < runs*9/10 {
			t.Errorf("cost %v is found above 1.05 in %d of %d runs", cost, above, runs)
		}
	}
	var few CaptureCost
	for range 99 {
		few.Asked.Add(2, 1)
		few.Plain.Add(1, 1)
	}
	if few.Above(1.05) {
		t.Error("99 requests prove a cost")
	}
	few.Asked.Add(2, 1)
	few.Plain.Add(1, 1)
	if !few.Above(1.05) {
		t.Error("100 equal requests prove nothing")
	}
}
