package lar

import (
	"errors"
	"math"
)

// Calibration holds the sums over scored requests that tell whether forecasts are right: with l local of t activations and
// the forecast share x, the sums of powers of x times t, l, l², l t and t².
type Calibration struct {
	Requests     int64      `json:"requests"`
	Total        [3]float64 `json:"total"`
	Local        [2]float64 `json:"local"`
	LocalSquares [3]float64 `json:"localSquares"`
	LocalTotal   [4]float64 `json:"localTotal"`
	TotalSquares [5]float64 `json:"totalSquares"`
}

// Add counts a request and the share that was forecast for it.
func (c *Calibration) Add(a Activations, predicted float64) {
	c.Requests++
	local, total := float64(a.Local), float64(a.Total)
	powers := func(sums []float64, value float64) {
		for i := range sums {
			sums[i] += value
			value *= predicted
		}
	}
	powers(c.Total[:], total)
	powers(c.Local[:], local)
	powers(c.LocalSquares[:], local*local)
	powers(c.LocalTotal[:], local*total)
	powers(c.TotalSquares[:], total*total)
}

// Merge adds the requests of another calibration.
func (c *Calibration) Merge(other Calibration) {
	c.Requests += other.Requests
	add := func(into, from []float64) {
		for i, value := range from {
			into[i] += value
		}
	}
	add(c.Total[:], other.Total[:])
	add(c.Local[:], other.Local[:])
	add(c.LocalSquares[:], other.LocalSquares[:])
	add(c.LocalTotal[:], other.LocalTotal[:])
	add(c.TotalSquares[:], other.TotalSquares[:])
}

// Predicted is the local activation rate that was forecast for the scored requests; NaN without one.
func (c Calibration) Predicted() float64 { return c.Total[1] / c.Total[0] }

// Bias is how far the observed rate of the scored requests is above the forecast one, with its standard error by the delta
// method; NaN where it cannot be told.
func (c Calibration) Bias() (bias, standardError float64) {
	bias = (c.Local[0] - c.Total[1]) / c.Total[0]
	squares := c.LocalSquares[0] - 2*c.LocalTotal[1] + c.TotalSquares[2]
	return bias, ratioError(c.Requests, bias, c.Total[0], squares, c.LocalTotal[0]-c.TotalSquares[1], c.TotalSquares[0])
}

// leastSpread is the variance of forecasts, weighted by activations, from which a slope can be told from rounding: a standard
// deviation of a tenth of a thousandth.
const leastSpread = 1e-8

// Slope is by how much the observed share of requests rises with the forecast one: the least-squares line weighted by
// activations, 1 where forecasts are right. Its standard error takes no variance for granted (White's, with n/(n-2)). Both
// are NaN below three requests, or where all forecasts are alike.
func (c Calibration) Slope() (slope, standardError float64) {
	mean := c.Predicted()
	spread := c.Total[2] - mean*c.Total[1]
	if c.Requests < 3 || !(spread >= leastSpread*c.Total[0]) {
		return math.NaN(), math.NaN()
	}
	slope = (c.Local[1] - mean*c.Local[0]) / spread
	offset := c.Local[0]/c.Total[0] - slope*mean
	// residuals is the sum of x^k (l - t (offset + slope x))².
	residuals := func(k int) float64 {
		return c.LocalSquares[k] - 2*offset*c.LocalTotal[k] - 2*slope*c.LocalTotal[k+1] +
			offset*offset*c.TotalSquares[k] + 2*offset*slope*c.TotalSquares[k+1] + slope*slope*c.TotalSquares[k+2]
	}
	squares := residuals(2) - 2*mean*residuals(1) + mean*mean*residuals(0)
	n := float64(c.Requests)
	return slope, math.Sqrt(max(0, squares)*n/(n-2)) / spread
}

// Validate refuses sums that no requests have.
func (c Calibration) Validate() error {
	if c.Requests < 0 {
		return errors.New("requests are negative")
	}
	for _, sums := range [][]float64{c.Total[:], c.Local[:], c.LocalSquares[:], c.LocalTotal[:], c.TotalSquares[:]} {
		for _, value := range sums {
			if err := finite(map[string]float64{"a sum": value}, true); err != nil {
				return err
			}
		}
	}
	return nil
}
