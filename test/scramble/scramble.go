// Package scramble makes routing traces of which plans come that are bad, and do not know it.
package scramble

import (
	"math/rand/v2"

	"github.com/semmoe/operator/solver/trace"
)

// Experts gives the experts of each layer other numbers, chosen by the seed. A plan that is made from the trace promises as much as
// one of the true trace, since experts fire together as before; in service it keeps nothing of that, since they are others.
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
	t.LookAhead = nil // it tells the true numbers
}
