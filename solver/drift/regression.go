package drift

// Slopes are by how much the local share rises with what is known of a request before it is served.
type Slopes struct {
	// Best is by the forecast of requests on their best rank.
	Best float64 `json:"best"`
	// Predicted and Highest are by those of requests on other ranks: the forecast there, and that on the best rank.
	Predicted float64 `json:"predicted"`
	Highest   float64 `json:"highest"`
	// Known and Pairs are by the shares of known tokens and pairs where requests have no rank: what a forecast is worth depends on how
	// much of the request it knows.
	Known float64 `json:"known"`
	Pairs float64 `json:"pairs"`
	// Text is by what the tokens of requests say (Calibration.Text).
	Text float64 `json:"text,omitempty"`
}

// regressors is the number of slopes.
const regressors = 6

func (s *Slopes) vector() [regressors]float64 {
	return [regressors]float64{s.Best, s.Predicted, s.Highest, s.Known, s.Pairs, s.Text}
}

// regression holds the sums of a regression of y on several x, all of them about their means.
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

// slopes are 0 for what does not vary, or varies together with those before it. (Gauss-Jordan elimination)
func (r *regression) slopes() Slopes {
	const together = 1e-6
	xx, xy := r.xx, r.xy
	var taken [regressors]bool
	for i := range xx {
		if taken[i] = xx[i][i] > together*r.xx[i][i]; !taken[i] {
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
