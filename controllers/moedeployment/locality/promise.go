// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"math"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/solver"
)

// PromiseAt returns the forecast of a plan with the local activation rate for the batch sizes that engines report. It
// returns the forecast itself if the rate does not depend on them, or if no sizes are reported.
func PromiseAt(forecast *semmoev1.PlanForecast, reported *semmoev1.BatchTokensStatus) *semmoev1.PlanForecast {
	if forecast == nil || len(forecast.LARByBatch) == 0 || reported == nil || len(reported.Observed) == 0 {
		return forecast
	}
	var rates []solver.BatchRate
	for _, r := range forecast.LARByBatch {
		rates = append(rates, solver.BatchRate{BatchTokens: int(r.BatchTokens), LAR: float64(r.LARMilli) / 1000})
	}
	var sizes []int
	for _, tokens := range reported.Observed {
		sizes = append(sizes, max(1, int(tokens))) // other clients can write a status
	}
	at := forecast.DeepCopy()
	at.LARMilli = int32(math.Round(1000 * solver.RateAt(rates, sizes)))
	at.LARSummary = desired.Percent(at.LARMilli)
	return at
}
