// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"errors"
	"math"
)

// Calibration contains sums over scored requests for checking forecasts: with l local of t activations and forecast
// share x, the sums of powers of x times t, l, l², l t and t².
type Calibration struct {
	Requests     int64      `json:"requests"`
	Total        [3]float64 `json:"total"`
	Local        [2]float64 `json:"local"`
	LocalSquares [3]float64 `json:"localSquares"`
	LocalTotal   [4]float64 `json:"localTotal"`
	TotalSquares [5]float64 `json:"totalSquares"`
}

// Add adds a request with its forecast share.
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

// Predicted returns the forecast local activation rate of the scored requests; NaN without a request.
func (c Calibration) Predicted() float64 { return c.Total[1] / c.Total[0] }

// Bias returns the observed minus the forecast rate of the scored requests, with its standard error by the delta
// method; NaN if undefined.
func (c Calibration) Bias() (bias, standardError float64) {
	bias = (c.Local[0] - c.Total[1]) / c.Total[0]
	squares := c.LocalSquares[0] - 2*c.LocalTotal[1] + c.TotalSquares[2]
	return bias, ratioError(c.Requests, bias, c.Total[0], squares, c.LocalTotal[0]-c.TotalSquares[1], c.TotalSquares[0])
}

// minVariance is the minimum variance of forecasts, weighted by activations, at which a slope exceeds rounding errors:
// a standard deviation of 0.0001.
const minVariance = 1e-8

// Slope returns the increase of the observed share per increase of the forecast share: the least-squares slope weighted
// by activations, which is 1 for correct forecasts. Its standard error is heteroskedasticity-consistent (White's, with
// n/(n-2)). Both are NaN for fewer than three requests, or if all forecasts are equal.
func (c Calibration) Slope() (slope, standardError float64) {
	mean := c.Predicted()
	spread := c.Total[2] - mean*c.Total[1]
	if c.Requests < 3 || !(spread >= minVariance*c.Total[0]) {
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

// Validate rejects sums that no requests can have.
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
