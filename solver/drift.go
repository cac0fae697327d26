package solver

import (
	"context"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// maxDriftRequests bounds what a drift test is calibrated with. From enoughDriftRequests on, so does enoughDriftRows, in rows of
	// activations (tokens times MoE layers): more tell little more, and cost seconds. A test from fewer requests is slow, however long they
	// are.
	maxDriftRequests    = 2000
	enoughDriftRequests = 500
	enoughDriftRows     = 6 << 20
	// forecastKinds is the number of kinds by forecast.
	forecastKinds = 8
)

// CalibrateDrift makes the drift test of a plan from requests of the trace that the plan was not solved from; of many, from a seeded
// sample. It is nil where there are too few, or too few within drift.MaxRows. The load cap is that of the request
// routers that are to serve by the plan; 0 is drift.LoadCap.
func CalibrateDrift(ctx context.Context, t *trace.Trace, p *Plan, heldOut []int, loadCap float64) (*drift.Calibration, error) {
	requests := trace.Shuffled(heldOut, p.Seed)
	requests = requests[:driftSample(t, requests)]
	slices.Sort(requests)
	if len(requests) < drift.LeastRequests {
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

// driftSample is how many of the first requests are enough.
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

// HeldOut are the requests that the plan's split holds back: those of the named domains, and all others.
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

// DriftRequests are requests of a trace as the plan serves them, to calibrate its drift test with or to try it on. Their kinds are
// the trace's domains. Where it has none they are alike in their best rank, or in their forecast where requests have no rank.
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

// matches checks that a trace is of the plan's model.
func (p *Plan) matches(t *trace.Trace) error {
	if err := cost.Matches(t, p.Placement); err != nil {
		return err
	}
	if p.Vocabulary != t.Model.Vocabulary {
		return fmt.Errorf("the plan's tables are for a vocabulary of %d, the trace's is %d", p.Vocabulary, t.Model.Vocabulary)
	}
	return nil
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
