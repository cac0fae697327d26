// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"fmt"
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// objectiveRate returns the rate that an objective optimizes in a report.
func objectiveRate(of placement.Objective, r *cost.Report) float64 {
	switch of {
	case placement.RankDedup:
		return r.RemoteRanksPerToken
	case placement.NodeDedup:
		return r.RemoteNodesPerToken
	case placement.Hierarchical:
		return r.RemoteRanksPerToken + cost.NodeMessage(hardware.DefaultProfile())*r.RemoteNodesPerToken
	default:
		return -r.LAR
	}
}

var messages = []placement.Objective{placement.RankDedup, placement.NodeDedup, placement.Hierarchical}

// TestContiguousKeepsConstraintsUnderObjectives checks that required moves also take the objective into account.
func TestContiguousKeepsConstraintsUnderObjectives(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		for _, objective := range messages {
			o := options(attention, 4)
			o.Algorithm, o.Objective, o.RanksPerNode = placement.ContiguousAlgorithm, objective, 2
			o.Constraints.Pins = []placement.Pin{{Layer: 1, Expert: 0, Rank: 3}}
			p := solve(t, tr, o).Plan.Placement
			if hosts := p.Hosts(0)[0]; len(hosts) != 1 || hosts[0] != 3 {
				t.Errorf("%s, %s: expert 0 is on %v; it is pinned to rank 3", attention, objective, hosts)
			}
			if moved := placement.Moves(placement.Contiguous([]int{1, 2, 3}, 16, 4), p); moved != 2 {
				t.Errorf("%s, %s: %d experts have moved; it takes two", attention, objective, moved)
			}
		}
	}
}

// TestMessagesAreNeverAboveContiguous solves for gates that choose groups, which suit contiguous experts: as many
// groups as ranks, as many as nodes, and groups over several ranks. On held-out requests, with the same tables and
// dispatch, no objective is above that of the default placement.
func TestMessagesAreNeverAboveContiguous(t *testing.T) {
	figures(t)
	shape := tracetest.Shape{
		Experts: 32, TopK: 4, Layers: 2, Vocabulary: 100, Domains: 4, DocumentsPerDomain: 16, RequestsPerDocument: 3, TokensPerRequest: 50,
		Noise: 10,
	}
	for seed, groups := range []int{8, 4, 2} {
		shape.Groups = groups
		tr := tracetest.Generate(shape, uint64(seed))
		for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
			for _, objective := range messages {
				t.Run(fmt.Sprintf("%d groups, %s, %s", groups, attention, objective), func(t *testing.T) {
					t.Parallel()
					o := options(attention, 8)
					o.Objective, o.RanksPerNode = objective, 2
					solved := solve(t, tr, o)
					o.Algorithm = placement.ContiguousAlgorithm
					plain := solve(t, tr, o)
					got, of := objectiveRate(objective, &solved.Report), objectiveRate(objective, &plain.Report)
					if got > of {
						t.Errorf("%d groups, %s, %s: %v; contiguous is %v", groups, attention, objective, got, of)
					}
					t.Logf("%d groups, %s, %s: %.3f, contiguous %.3f; %s", groups, attention, objective, got, of, solved.FallBack)
				})
			}
		}
	}
}

// TestObjectivesOnRealRouting checks, on a part of a recorded trace, that every objective is below that of the default
// placement and of a placement for activations.
func TestObjectivesOnRealRouting(t *testing.T) {
	figures(t)
	tr := real(t)
	for attention, objectives := range map[placement.Attention][]placement.Objective{
		placement.TensorParallel: {placement.RankDedup, placement.Hierarchical}, placement.DataParallel: {placement.RankDedup, placement.NodeDedup},
	} {
		t.Run(string(attention), func(t *testing.T) {
			t.Parallel()
			of := func(t *testing.T, asked placement.Objective, by placement.Algorithm) *cost.Report {
				o := options(attention, 8)
				o.Objective, o.RanksPerNode, o.TrainPercent, o.Algorithm = asked, 2, 50, by
				return &solve(t, tr, o).Report
			}
			contiguous, local := of(t, placement.Activation, placement.ContiguousAlgorithm), of(t, placement.Activation, placement.Auto)
			for _, objective := range objectives {
				t.Run(string(objective), func(t *testing.T) {
					t.Parallel()
					got, plain, other := objectiveRate(objective, of(t, objective, placement.Auto)), objectiveRate(objective, contiguous), objectiveRate(objective, local)
					if got > 0.95*plain || got > other {
						t.Errorf("%.4f; contiguous %.4f, placed for activations %.4f", got, plain, other)
					}
					t.Logf("%.4f; contiguous %.4f, placed for activations %.4f", got, plain, other)
				})
			}
		})
	}
}

// TestConstraintsReachThePlan solves with constraints that leave the search no choice: the plan has the placement in
// service, its capacities, and the unmet limits.
func TestConstraintsReachThePlan(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	none := 0
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		o := options(attention, 4)
		o.Current = placement.RoundRobin(tr.Model.Layers, 16, 4)
		o.Constraints = placement.Constraints{MoveBudget: &none, ExpertLoadLimit: 100, TokenLoadLimit: 100, RankCapacity: []float64{1, 1, 2, 1}}
		s := solve(t, tr, o)
		if moves := placement.Moves(o.Current, s.Plan.Placement); moves > 0 {
			t.Errorf("%s: %d experts move under a budget of none", attention, moves)
		}
		if len(s.Unmet) == 0 || len(s.Plan.RankCapacity) != 4 {
			t.Errorf("%s: unmet %v, capacity %v", attention, s.Unmet, s.Plan.RankCapacity)
		}
	}
	o := options(placement.TensorParallel, 4)
	o.Objective, o.RanksPerNode = placement.NodeDedup, 8
	if _, err := solver.Solve(t.Context(), tr, o); err == nil {
		t.Error("distinct nodes are counted on one node")
	}
}

// TestMovesThatCostTooMuchAreNotMade sets a cost above every gain: the plan falls back to the placement in service, not
// to the default one, which requires many moves. Without a cost it falls back to the default one.
func TestMovesThatCostTooMuchAreNotMade(t *testing.T) {
	shape := tracetest.Small
	shape.Noise = 100
	tr := tracetest.Generate(shape, 1)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		o := options(attention, 4)
		o.Current = placement.RoundRobin(tr.Model.Layers, 16, 4)
		if free := solve(t, tr, o); free.FallBack == "" || placement.Moves(o.Current, free.Plan.Placement) == 0 {
			t.Fatalf("%s: noise has something to gain: %q", attention, free.FallBack)
		}
		o.Constraints.MigrationCost = 1e9
		dear := solve(t, tr, o)
		if moves := placement.Moves(o.Current, dear.Plan.Placement); moves > 0 || dear.FallBack == "" || dear.Plan.Algorithm != placement.Auto {
			t.Errorf("%s: %d experts move although nothing is worth it; by %s, %s", attention, moves, dear.Plan.Algorithm, dear.FallBack)
		}
	}
}
