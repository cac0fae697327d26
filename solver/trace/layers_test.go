// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/trace/tracetest"
)

func TestWithLayers(t *testing.T) {
	whole := tracetest.Generate(tracetest.Small, 1)
	tracetest.AddLookAhead(whole, 4, 10, 1)
	part := whole.WithLayers([]int{0, 2})
	if want := []int{whole.Model.Layers[0], whole.Model.Layers[2]}; !slices.Equal(part.Model.Layers, want) || part.LookAhead != nil {
		t.Fatalf("layers %d, look-ahead %v; want layers %d without look-ahead", part.Model.Layers, part.LookAhead, want)
	}
	for position := range whole.Tokens {
		for l, of := range []int{0, 2} {
			if got, want := part.Row(position, l), whole.Row(position, of); !slices.Equal(got, want) {
				t.Fatalf("position %d, layer %d: experts %d; want %d", position, of, got, want)
			}
		}
	}
	if len(whole.Model.Layers) != tracetest.Small.Layers {
		t.Error("the whole trace has changed")
	}
}
