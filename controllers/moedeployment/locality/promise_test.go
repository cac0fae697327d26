// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// TestPromiseAt verifies that a prediction applies to the batch sizes that engines report, where it depends on them.
func TestPromiseAt(t *testing.T) {
	plain := &semmoev1.PlanForecast{LARMilli: 522, LARSummary: "52.2%"}
	byBatch := &semmoev1.PlanForecast{LARMilli: 522, LARSummary: "52.2%", LARByBatch: []semmoev1.BatchLAR{{BatchTokens: 32, LARMilli: 460}, {BatchTokens: 512, LARMilli: 500}}}
	for name, test := range map[string]struct {
		forecast *semmoev1.PlanForecast
		reported *semmoev1.BatchTokensStatus
		milli    int32
		summary  string
	}{
		"no sizes by batch":  {plain, &semmoev1.BatchTokensStatus{Observed: []int32{128}}, 522, "52.2%"},
		"no status":          {byBatch, nil, 522, "52.2%"},
		"nothing observed":   {byBatch, &semmoev1.BatchTokensStatus{Sizes: []int32{32}}, 522, "52.2%"},
		"between two sizes":  {byBatch, &semmoev1.BatchTokensStatus{Observed: []int32{128}}, 480, "48.0%"},
		"over all tokens":    {byBatch, &semmoev1.BatchTokensStatus{Observed: []int32{32, 512}}, 498, "49.8%"},
		"above the largest":  {byBatch, &semmoev1.BatchTokensStatus{Observed: []int32{65536}}, 500, "50.0%"},
		"no tokens":          {byBatch, &semmoev1.BatchTokensStatus{Observed: []int32{0, 0}}, 460, "46.0%"},
		"below the smallest": {byBatch, &semmoev1.BatchTokensStatus{Observed: []int32{1}}, 460, "46.0%"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := PromiseAt(test.forecast, test.reported); got.LARMilli != test.milli || got.LARSummary != test.summary {
				t.Errorf("%d, %s; want %d, %s", got.LARMilli, got.LARSummary, test.milli, test.summary)
			}
		})
	}
	if PromiseAt(nil, &semmoev1.BatchTokensStatus{Observed: []int32{1}}) != nil {
		t.Error("a forecast for a plan without one")
	}
}
