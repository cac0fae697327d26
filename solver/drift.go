// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// maxDriftRequests bounds the number of requests that calibrate a drift test. From enoughDriftRequests on,
	// enoughDriftRows also applies, in rows of activations (tokens × MoE layers): further rows add little precision and
	// cost seconds. A test from fewer requests is slow to detect drift, regardless of their length.
	maxDriftRequests    = 2000
	enoughDriftRequests = 500
	enoughDriftRows     = 6 << 20
	// forecastKinds is the number of kinds into which requests are grouped by forecast.
	forecastKinds = 8
)

// CalibrateDrift calibrates the drift test of a plan on requests of the trace that the plan was not solved from, or on
// a seeded sample of them. It returns nil if there are too few requests, or too few within drift.MaxRows. loadCap is
// the load cap of the request routers; 0 means drift.LoadCap.
func CalibrateDrift(ctx context.Context, t *trace.Trace, p *Plan, heldOut []int, loadCap float64) (*drift.Calibration, error) {
	requests := trace.Shuffled(heldOut, p.Seed)
	requests = requests[:driftSample(t, requests)]
	slices.Sort(requests)
	if len(requests) < drift.MinRequests {
		return nil, nil
	}
	served, err := DriftRequests(ctx, t, p, requests)
	if err != nil {
		return nil, err
	}
	o := drift.DefaultOptions()
	o.Seed, o.Chance, o.Cap = p.Seed, 1/float64(p.Placement.Ranks), loadCap
	return drift.Calibrate(ctx, served, o)
}

// driftSample returns how many of the first requests suffice.
func driftSample(t *trace.Trace, requests []int) int {
	rows := 0
	for n, r := range requests {
		more := t.Length(r) * len(t.Model.Layers)
		if n == maxDriftRequests || n >= enoughDriftRequests && rows >= enoughDriftRows || rows+more > drift.MaxRows {
			return n
		}
		rows += more
	}
	return len(requests)
}

// HeldOut returns the requests in the test part of the plan's split, separated into the named domains and all others.
func HeldOut(t *trace.Trace, p *Plan, domains []uint8) (others, named []int, err error) {
	_, test, err := trace.Split(t, p.TrainPercent, p.Seed)
	if err != nil {
		return nil, nil, err
	}
	for _, r := range test {
		if t.Domains != nil && slices.Contains(domains, t.Domains[r]) {
			named = append(named, r)
		} else {
			others = append(others, r)
		}
	}
	return others, named, nil
}

// DriftRequests returns requests of a trace as the plan serves them, to calibrate or to test its drift test. Their
// kinds are the trace's domains. Without domains, requests are grouped by their best rank, or by their forecast if
// requests have no rank.
func DriftRequests(ctx context.Context, t *trace.Trace, p *Plan, requests []int) ([]drift.Request, error) {
	if err := p.matches(t); err != nil {
		return nil, err
	}
	o := DefaultEvaluation()
	o.Requests, o.Seed, o.RankCapacity, o.Machines = requests, p.Seed, p.RankCapacity, cost.NodeOf(p.Machines())
	var shares []cost.RequestShare
	var err error
	if p.Attention == placement.DataParallel {
		shares, err = cost.DataParallelShares(ctx, t, p.Placement, p.Ranks.Forecast(t), o)
	} else {
		var tokens cost.TokenForecast
		if tokens, err = p.tokenForecast(t); err != nil {
			return nil, err
		}
		shares, err = cost.TensorParallelShares(ctx, t, p.Placement, tokens, o)
	}
	if err != nil {
		return nil, err
	}
	served := make([]drift.Request, len(requests))
	for i, r := range requests {
		served[i] = drift.Request{Document: int(t.Documents[r]), Tokens: t.Length(r), Known: 1, Pairs: 1, Predicted: shares[i].Predicted, Local: shares[i].Local}
		if p.Seen != nil {
			served[i].Known, served[i].Pairs = p.Seen.Shares(t.Request(r))
		}
		if p.Attention == placement.TensorParallel {
			served[i].Bag = drift.Bag(t.Request(r))
		}
	}
	nameKinds(served, t, requests)
	return served, nil
}

// nameKinds sets the kinds of requests of a trace.
func nameKinds(served []drift.Request, t *trace.Trace, requests []int) {
	var bounds []float32
	for i := range served {
		bounds = append(bounds, slices.Max(served[i].Predicted))
	}
	slices.Sort(bounds)
	for i, r := range requests {
		s := &served[i]
		switch {
		case t.Domains != nil:
			s.Kind = int(t.Domains[r])
		case len(s.Predicted) > 1:
			s.Kind = slices.Index(s.Predicted, slices.Max(s.Predicted))
		default:
			at, _ := slices.BinarySearch(bounds, s.Predicted[0])
			s.Kind = at * forecastKinds / len(bounds)
		}
	}
}
