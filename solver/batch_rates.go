// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"math"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// BatchRate is the local activation rate of a plan in batches of one size.
type BatchRate struct {
	// BatchTokens is the size, in tokens over all ranks.
	BatchTokens int     `json:"batch_tokens"`
	LAR         float64 `json:"lar"`
}

// batchRateSizes are the sizes for BatchRates, from a decode step of few requests to a large prefill step.
var batchRateSizes = []int{32, 256, 2048, 16384}

// BatchRates scores a plan on a sample of the held-out requests in batches of several sizes, ascending. With attention
// TP all ranks get equally many tokens of a batch, which leaves fewer choices in a small one: Solution.Report is for
// batches of 4,096 tokens. It returns nil for attention DP, whose rate does not depend on batches, and for tokens that
// are not shuffled.
func BatchRates(ctx context.Context, t *trace.Trace, s *Solution, o Options) (rates []BatchRate, err error) {
	if s.Plan.Attention != placement.TensorParallel || o.Unshuffled {
		return nil, nil
	}
	part := search{trace: t, options: o, test: s.HeldOut}
	e := part.evaluation()
	e.Orders = rankOrders
	for _, tokens := range batchRateSizes {
		if tokens < s.Plan.Placement.Ranks {
			continue
		}
		e.BatchTokens = tokens
		e.Requests, e.Layers = part.sample(tokens)
		var report cost.Report
		if report, err = Evaluate(ctx, t, s.Plan, e); err != nil {
			return nil, err
		}
		rates = append(rates, BatchRate{tokens, report.LAR})
	}
	return rates, nil
}

// RateAt returns the local activation rate in equally many batches of each of the given sizes. Between two known sizes the
// rate is interpolated on a logarithmic scale, and outside of them it is that of the nearest one. rates and sizes must not
// be empty.
func RateAt(rates []BatchRate, sizes []int) float64 {
	local, all := 0.0, 0.0
	for _, tokens := range sizes {
		local += float64(tokens) * rateAt(rates, tokens)
		all += float64(tokens)
	}
	return local / all
}

func rateAt(rates []BatchRate, tokens int) float64 {
	for i, above := range rates {
		if tokens > above.BatchTokens {
			continue
		}
		if i == 0 {
			return above.LAR
		}
		below := rates[i-1]
		share := math.Log(float64(tokens)/float64(below.BatchTokens)) / math.Log(float64(above.BatchTokens)/float64(below.BatchTokens))
		return below.LAR + share*(above.LAR-below.LAR)
	}
	return rates[len(rates)-1].LAR
}
