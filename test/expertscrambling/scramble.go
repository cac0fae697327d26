// SPDX-License-Identifier: Apache-2.0

// Package expertscrambling renumbers the experts of routing traces. Plans from such traces are bad, but their forecasts are
// good.
package expertscrambling

import (
	"math/rand/v2"

	"github.com/semmoe/operator/solver/trace"
)

// Experts randomly renumbers the experts of each layer in place, by the seed, and removes the look-ahead. A plan from
// the renumbered trace has the same forecast as a plan from the original trace, because co-activation is unchanged. In
// service it has no gain, because its expert numbers are wrong.
func Experts(t *trace.Trace, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 2))
	layers := len(t.Model.Layers)
	renumbered := make([][]int, layers)
	for layer := range renumbered {
		renumbered[layer] = random.Perm(t.Model.Experts)
	}
	for i, expert := range t.Experts {
		t.Experts[i] = uint16(renumbered[i/t.Model.TopK%layers][expert])
	}
	t.LookAhead = nil // it contains the original numbers
}
