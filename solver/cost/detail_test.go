// SPDX-License-Identifier: Apache-2.0

package cost_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// evaluateInTurn scores the contiguous placement with forecasts that assign requests to ranks round-robin.
func evaluateInTurn(t *testing.T, tr *trace.Trace, attention placement.Attention, o cost.Options) cost.Report {
	t.Helper()
	const ranks = 4
	p := placement.Contiguous(tr.Model.Layers, tr.Model.Experts, ranks)
	f := forced{token: func(_, position int) int { return position % ranks }, request: func(request int) int { return int(tr.Domains[request]) % ranks }}
	var report cost.Report
	var err error
	if attention == placement.DataParallel {
		report, err = cost.DataParallel(t.Context(), tr, p, forcedRequests{f}, o)
	} else {
		report, err = cost.TensorParallel(t.Context(), tr, p, forcedTokens{f}, o)
	}
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestDetailSumsToTheReport(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := options(tr)
		o.Detail = true
		r := evaluateInTurn(t, tr, attention, o)
		near := func(what string, got, want, within float64) {
			if !(math.Abs(got-want) <= within) {
				t.Errorf("attention %s: %s is %v; the report has %v", attention, what, got, want)
			}
		}
		oracle, upper, served := 0.0, 0.0, 0.0
		for l, layer := range r.Detail.Layers {
			oracle += layer.OracleLAR / 3
			upper += layer.UpperBound / 3
			lar, activations, tokens := 0.0, 0.0, 0.0
			for _, kind := range layer.Kinds {
				lar += kind.Activations * kind.LAR
				activations += kind.Activations
				sum := 0.0
				for _, share := range kind.Ranks {
					sum += share
				}
				near("the sum of a kind's shares", sum, 1, 1e-9)
			}
			near("a layer's local rate over kinds", lar, r.PerLayer[l].LAR, 1e-9)
			near("the sum of the kinds' activations", activations, 1, 1e-9)
			most := 0.0
			for rank, load := range layer.Served {
				most = max(most, load)
				tokens += layer.Tokens[rank]
			}
			near("the sum of token loads", tokens, 4, 1e-9)
			served += most / 3
			if layer.UpperBound < r.PerLayer[l].LAR {
				t.Errorf("attention %s: layer %d has the bound %v below its rate %v", attention, l, layer.UpperBound, r.PerLayer[l].LAR)
			}
		}
		// One assignment of whole requests is close to the mean of the oracles of all orders, which may split requests.
		slack := 1e-9
		if attention == placement.DataParallel {
			slack = 0.02
		}
		near("the layers' oracle", oracle, r.OracleLAR, slack)
		if upper < r.UpperBound-1e-9 {
			t.Errorf("attention %s: the layers' bound is %v; that of the report is %v, above it", attention, upper, r.UpperBound)
		}
		if attention == placement.TensorParallel {
			near("the busiest rank's experts", served, r.ExpertImbalance, 1e-9)
		}
		o.Detail = false
		if without := evaluateInTurn(t, tr, attention, o); without.Detail != nil || without.LAR != r.LAR {
			t.Errorf("attention %s: without details the report has %v, and the rate %v; with, %v", attention, without.Detail, without.LAR, r.LAR)
		}
	}
}

func TestBaselineDetailMatchesLAR(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o := options(tr)
		o.Cap = 10
		want := evaluateInTurn(t, tr, attention, o).BaselineLAR
		o.Detail = true
		got, err := cost.EvaluateBaseline(t.Context(), tr, attention, 4, o)
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(got.LAR-want) > 1e-12 || got.UpperBound != 0 || got.Detail == nil {
			t.Errorf("attention %s: the rate is %v, the bound %v; wanted is the baseline %v and no bound", attention, got.LAR, got.UpperBound, want)
		}
		if got, err = cost.EvaluateBaseline(t.Context(), tr, attention, 5, o); err != nil || len(got.Detail.Layers[0].Tokens) != 4 {
			t.Errorf("attention %s: 16 experts on 5 ranks: %d ranks, error %v; wanted are the 4 that divide them", attention, len(got.Detail.Layers[0].Tokens), err)
		}
		o.Policy, o.Requests = dispatch.Price, nil
		if _, err := cost.EvaluateBaseline(t.Context(), tr, attention, 4, o); err == nil {
			t.Errorf("attention %s: no request was accepted", attention)
		}
	}
}

// Batches and nodes larger than the trace act as one batch and one node.
func TestBatchAndNodeLargerThanTrace(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		var reports []cost.Report
		for _, size := range []int{len(tr.Tokens) + 1, math.MaxInt - 2} {
			o := options(tr)
			o.BatchTokens, o.RanksPerNode, o.Volume = size, size, true
			got, err := cost.EvaluateBaseline(t.Context(), tr, attention, 4, o)
			if err != nil {
				t.Fatal(err)
			}
			got.ModelledUS, got.Volume.BatchTokens, got.Volume.RanksPerNode = nil, 0, 0 // depend on the sizes
			reports = append(reports, got)
		}
		if diff := cmp.Diff(reports[0], reports[1]); diff != "" {
			t.Errorf("attention %s: %s", attention, diff)
		}
	}
}

func TestExpertWeights(t *testing.T) {
	for name, c := range map[string]struct {
		hidden int
		config string
		want   int64
	}{
		"known":           {2048, `{"moe_intermediate_size":768,"intermediate_size":6144}`, 3 * 2048 * 768},
		"one size":        {4096, `{"intermediate_size":14336}`, 3 * 4096 * 14336},
		"no expert size":  {2048, `{}`, 0},
		"no hidden size":  {0, `{"moe_intermediate_size":768}`, 0},
		"foreign config":  {2048, `-`, 0},
		"negative config": {2048, `{"moe_intermediate_size":-1}`, 0},
	} {
		if got := cost.ExpertWeights(&trace.Model{HiddenSize: c.hidden, Config: c.config}); got != c.want {
			t.Errorf("%s: %d weights; wanted are %d", name, got, c.want)
		}
	}
}
