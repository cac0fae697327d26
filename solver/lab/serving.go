// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/lab/simulate"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// ServingMethod names a serving method for simulations.
type ServingMethod string

// Supported methods.
const (
	// Vanilla is the default of engines: contiguous experts, with requests or tokens assigned round-robin.
	Vanilla ServingMethod = "vanilla"
	// BalancedServing and TunedServing use the placements of EPLB and MoETuner, with round-robin assignment.
	BalancedServing ServingMethod = "eplb"
	TunedServing    ServingMethod = "moetuner"
	// OurServing uses our placement, and dispatches by its forecast.
	OurServing ServingMethod = "semmoe"
)

// ServingMethods lists all methods.
var ServingMethods = []ServingMethod{Vanilla, BalancedServing, TunedServing, OurServing}

// ParseServingMethod returns the method with the given name.
func ParseServingMethod(name string) (ServingMethod, error) {
	for _, m := range ServingMethods {
		if string(m) == name {
			return m, nil
		}
	}
	return "", fmt.Errorf("method %q is unknown; allowed is %v", name, ServingMethods)
}

// algorithm returns the placement algorithm of the method.
func (m ServingMethod) algorithm() placement.Algorithm {
	switch m {
	case BalancedServing:
		return placement.EPLB
	case TunedServing:
		return placement.MoETuner
	case OurServing:
		return placement.Auto
	default:
		return placement.ContiguousAlgorithm
	}
}

// SolveServing solves methods on the same train requests, and returns them with the held-out requests. The methods
// define the algorithm. Forecast, objective, constraints and the policy (attention DP) apply only to OurServing.
func SolveServing(ctx context.Context, t *trace.Trace, methods []ServingMethod, policy dispatch.Policy, o solver.Options) ([]simulate.Method, []int, error) {
	var solved []simulate.Method
	var heldOut []int
	for _, m := range methods {
		own := o
		own.Algorithm = m.algorithm()
		if m != OurServing {
			own.Forecast, own.Objective, own.Constraints, own.Embeddings = solver.Table, placement.Activation, placement.Constraints{}, nil
		}
		allowed := func(a placement.Algorithm) bool {
			return placement.CheckSlots(a, own.Ranks, t.Model.Experts, own.RedundantSlots) == nil
		}
		if allowed(placement.Auto) && !allowed(own.Algorithm) {
			own.RedundantSlots = 0 // the algorithm does not support redundant slots
		}
		steps, err := solver.NewSteps(t, own)
		if err != nil {
			return nil, nil, err
		}
		s := newStudy(t, steps)
		method, err := s.serving(ctx, m, policy)
		if err != nil {
			return nil, nil, err
		}
		solved, heldOut = append(solved, *method), s.test
	}
	return solved, heldOut, nil
}

// serving solves one method.
func (s *study) serving(ctx context.Context, m ServingMethod, policy dispatch.Policy) (*simulate.Method, error) {
	if err := s.steps.Count(ctx); err != nil {
		return nil, err
	}
	p, err := s.placed(ctx)
	if err != nil {
		return nil, err
	}
	method := &simulate.Method{Name: string(m), Placement: p.placement, Policy: dispatch.RoundRobin}
	if m != OurServing {
		return method, nil
	}
	plan, err := s.steps.Plan(ctx, p.placement)
	if err != nil {
		return nil, err
	}
	if s.options.Attention == placement.DataParallel {
		method.Policy, method.Requests = policy, plan.Ranks.Forecast(s.trace)
		return method, nil
	}
	method.Tokens, err = plan.TokenForecast(s.trace)
	return method, err
}
