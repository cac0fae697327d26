// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"fmt"
	"math"
)

// Ratio contains the sums over requests from which the ratio of local to all activations and its standard error are
// computed.
type Ratio struct {
	Requests int64 `json:"requests"`
	Activations
	// LocalSquares, LocalTotal and TotalSquares are the sums of local², local x total and total².
	LocalSquares float64 `json:"localSquares"`
	LocalTotal   float64 `json:"localTotal"`
	TotalSquares float64 `json:"totalSquares"`
}

// Add adds a request.
func (r *Ratio) Add(a Activations) {
	local, total := float64(a.Local), float64(a.Total)
	r.Merge(Ratio{Requests: 1, Activations: a, LocalSquares: local * local, LocalTotal: local * total, TotalSquares: total * total})
}

// Merge adds the requests of another ratio.
func (r *Ratio) Merge(other Ratio) {
	r.Requests += other.Requests
	r.Local += other.Local
	r.Total += other.Total
	r.LocalSquares += other.LocalSquares
	r.LocalTotal += other.LocalTotal
	r.TotalSquares += other.TotalSquares
}

// Value returns the local activation rate; NaN without an activation.
func (r Ratio) Value() float64 { return r.Rate() }

// StandardError returns the standard error of Value as an estimate of the rate of the traffic that the requests sample,
// by the delta method for a ratio of sums: the square root of n/(n-1) times the sum of (local - rate x total)², divided
// by the sum of total. It is NaN for fewer than two requests. There is no finite-population correction, because the
// rate is compared between windows.
func (r Ratio) StandardError() float64 {
	return ratioError(r.Requests, r.Value(), float64(r.Total), r.LocalSquares, r.LocalTotal, r.TotalSquares)
}

// ratioError returns the standard error of a ratio y/x of sums over n requests, from the sums of x, y², xy and x².
func ratioError(n int64, ratio, x, ySquares, xy, xSquares float64) float64 {
	if n < 2 || x == 0 {
		return math.NaN()
	}
	residuals := max(0, ySquares-2*ratio*xy+ratio*ratio*xSquares) // rounding can make the difference slightly negative
	return math.Sqrt(residuals*float64(n)/float64(n-1)) / math.Abs(x)
}

// Validate rejects sums that no requests can have.
func (r Ratio) Validate() error {
	switch {
	case r.Requests < 0 || r.Local < 0 || r.Total < r.Local:
		return fmt.Errorf("requests, local and total are %d, %d and %d: none can be negative, nor local more than total", r.Requests, r.Local, r.Total)
	case r.Requests == 0 && r.Total != 0:
		return fmt.Errorf("total is %d of no request", r.Total)
	}
	return finite(map[string]float64{"localSquares": r.LocalSquares, "localTotal": r.LocalTotal, "totalSquares": r.TotalSquares}, true)
}

// finite rejects values that are not finite, and, with positive, negative values.
func finite(values map[string]float64, positive bool) error {
	for name, value := range values {
		if math.IsNaN(value) || math.IsInf(value, 0) || positive && value < 0 {
			return fmt.Errorf("%s is %v", name, value)
		}
	}
	return nil
}
