// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"math/rand/v2"
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestCopiesAreValidAndGain solves random instances: every expert is placed, none is twice on a rank (Validate, in
// solve), all slots are filled, and copies never reduce locality on the profile.
func TestCopiesAreValidAndGain(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for i := range instances(copyInstances) {
		shape := tracetest.Shape{
			Experts: []int{4, 6, 8, 12}[random.IntN(4)], TopK: 1 + random.IntN(3), Layers: 1 + random.IntN(2), Vocabulary: 10 + random.IntN(40),
			Domains: 1 + random.IntN(3), DocumentsPerDomain: 2, RequestsPerDocument: 2, TokensPerRequest: 15, Noise: random.IntN(100),
		}
		attention := modes[i%2]
		ranks := 2
		if random.IntN(2) == 0 && shape.Experts%4 == 0 {
			ranks = 4
		}
		p := problem(t, tracetest.Generate(shape, uint64(i)), attention, ranks)
		plain := solve(t, p)
		p.RedundantSlots = 1 + random.IntN(shape.Experts-shape.Experts/ranks)
		for _, p.Algorithm = range []placement.Algorithm{placement.Auto, placement.EPLB, placement.ContiguousAlgorithm} {
			got := solve(t, p)
			if want := shape.Experts/ranks + p.RedundantSlots; got.Placement.SlotsPerRank != want {
				t.Fatalf("instance %d, %s: %d slots per rank, want %d", i, p.Algorithm, got.Placement.SlotsPerRank, want)
			}
			// The value is a dual bound: it exceeds the optimum until the prices converge.
			if p.Algorithm == placement.Auto && got.TrainLAR < plain.TrainLAR*(1-5e-3) {
				t.Errorf("instance %d, %s: %v with %d copies per rank, %v without", i, attention, got.TrainLAR, p.RedundantSlots, plain.TrainLAR)
			}
		}
	}
}

// TestEveryExpertEverywhere has a slot for every expert on every rank, so all activations are local.
func TestEveryExpertEverywhere(t *testing.T) {
	for _, attention := range modes {
		p := problem(t, tracetest.Generate(tracetest.Small, 1), attention, 4)
		p.RedundantSlots = 12
		if got := solve(t, p).TrainLAR; got < 1-1e-5 {
			t.Errorf("%s: %v", attention, got)
		}
	}
}
