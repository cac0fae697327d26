// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/dispatch"
)

// The window stores no more requests than its length, and its sums equal recomputed sums.
func TestWindow(t *testing.T) {
	const ranks, layers = 4, 3
	for _, requests := range []int{1, dispatch.Arrivals - 1, dispatch.Arrivals, 3*dispatch.Arrivals + 5} {
		random := rand.New(rand.NewPCG(1, uint64(requests)))
		w := newWindow(&Options{}, requests, ranks, layers)
		var all [][]int32
		for range requests {
			load := w.next()
			if slices.Max(load) != 0 || slices.Min(load) != 0 {
				t.Fatalf("of %d requests one begins with the load %v", requests, load)
			}
			for i := range load {
				if random.IntN(requests) <= len(all) { // requests are sparse at first
					load[i] = random.Int32N(100)
				}
			}
			all = append(all, slices.Clone(load))
			w.measure()
		}
		size := min(dispatch.Arrivals, requests)
		if len(w.kept) != size {
			t.Errorf("of %d requests %d are kept", requests, len(w.kept))
		}
		tokens, experts := 0.0, 0.0
		for end := size; end <= requests; end++ {
			sum := make([]int, (layers+1)*ranks)
			for _, load := range all[end-size : end] {
				for i, n := range load {
					sum[i] += int(n)
				}
			}
			tokens += imbalance(sum[:ranks])
			for l := 1; l <= layers; l++ {
				experts += imbalance(sum[l*ranks:(l+1)*ranks]) / layers
			}
		}
		windows := float64(requests - size + 1)
		if gotTokens, gotExperts := w.means(); gotTokens != tokens/windows || gotExperts != experts/windows {
			t.Errorf("%d requests: imbalance %v, of experts %v; want %v and %v", requests, gotTokens, gotExperts, tokens/windows, experts/windows)
		}
	}
}
