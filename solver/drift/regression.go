// SPDX-License-Identifier: Apache-2.0

package drift

// Slopes are the coefficients of the expected local share on quantities known before a request is served.
type Slopes struct {
	// Best is the slope on the forecast of requests that are served on their best rank.
	Best float64 `json:"best"`
	// Predicted and Highest apply to requests on other ranks: the slopes on the forecast of that rank and on the
	// forecast of the best rank.
	Predicted float64 `json:"predicted"`
	Highest   float64 `json:"highest"`
	// Known and Pairs are the slopes on the shares of known tokens and pairs of requests without ranks: a forecast is
	// more reliable the more of the request it covers.
	Known float64 `json:"known"`
	Pairs float64 `json:"pairs"`
	// Text is the slope on the text term (Calibration.Text).
	Text float64 `json:"text,omitempty"`
}

// regressors is the number of slopes.
const regressors = 6

func (s *Slopes) vector() [regressors]float64 {
	return [regressors]float64{s.Best, s.Predicted, s.Highest, s.Known, s.Pairs, s.Text}
}

// regression accumulates the sums of a weighted least-squares regression of y on x, all about their means.
type regression struct {
	xx [regressors][regressors]float64
	xy [regressors]float64
}

func (r *regression) add(weight float64, x [regressors]float64, y float64) {
	for i := range x {
		for j := range x {
			r.xx[i][j] += weight * x[i] * x[j]
		}
		r.xy[i] += weight * x[i] * y
	}
}

// slopes solves the normal equations by Gauss-Jordan elimination. The slope of a regressor is 0 if the regressor does
// not vary or is collinear with earlier regressors.
func (r *regression) slopes() Slopes {
	const collinear = 1e-6
	xx, xy := r.xx, r.xy
	var taken [regressors]bool
	for i := range xx {
		if taken[i] = xx[i][i] > collinear*r.xx[i][i]; !taken[i] {
			continue
		}
		for j := range xx {
			if j == i {
				continue
			}
			by := xx[j][i] / xx[i][i]
			for k := range xx[j] {
				xx[j][k] -= by * xx[i][k]
			}
			xy[j] -= by * xy[i]
		}
	}
	var slope [regressors]float64
	for i := range slope {
		if taken[i] {
			slope[i] = xy[i] / xx[i][i]
		}
	}
	return Slopes{Best: slope[0], Predicted: slope[1], Highest: slope[2], Known: slope[3], Pairs: slope[4], Text: slope[5]}
}
