// SPDX-License-Identifier: Apache-2.0

package counts

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestLayersAreThoseOfTheTrace checks that counts give the solver the same input as the trace that they were made from.
func TestLayersAreThoseOfTheTrace(t *testing.T) {
	recorded := tracetest.Generate(tracetest.Small, 3)
	m := recorded.Model
	c := New(Model{MoELayers: m.Layers, Experts: m.Experts, ExpertsPerToken: m.TopK, Vocabulary: m.Vocabulary})
	c.Add(recorded.Tokens, recorded.Experts)
	want, err := affinity.CountTokens(context.Background(), recorded, recorded.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, c.Layers(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("counts (-of the trace +of counts):\n%s", diff)
	}
	empty := New(c.Model).Layers()
	if len(empty) != len(m.Layers) || empty[0].Tokens() != 0 {
		t.Errorf("empty counts have %d layers", len(empty))
	}
}
