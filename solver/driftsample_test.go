// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"testing"

	"github.com/semmoe/operator/solver/trace"
)

// A drift test from few long requests uses as many as can be read in seconds.
func TestDriftSample(t *testing.T) {
	for name, test := range map[string]struct{ requests, tokens, layers, want int }{
		"few":                     {40, 100, 26, 40},
		"many short ones":         {3000, 10, 26, 2000},
		"enough rows":             {2000, 300, 26, 807},
		"enough requests":         {1000, 512, 94, 500},
		"as many rows as allowed": {1000, 2048, 94, 348},
		"too long":                {1000, 20_000, 94, 35},
		"one is too long":         {10, 1 << 20, 94, 0},
	} {
		tr := &trace.Trace{Model: trace.Model{Layers: make([]int, test.layers)}, Offsets: []int64{0}}
		for r := range test.requests {
			tr.Offsets = append(tr.Offsets, int64((r+1)*test.tokens))
		}
		if got := driftSample(tr, tr.AllRequests()); got != test.want {
			t.Errorf("%s: %d of %d requests of %d tokens in %d layers; want %d", name, got, test.requests, test.tokens, test.layers, test.want)
		}
	}
}
