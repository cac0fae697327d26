// SPDX-License-Identifier: Apache-2.0

package cost_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// Volumes of a single batch agree with the report's rates.
func TestVolumeAgreesWithTheRates(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		o := options(tr)
		o.Volume, o.BatchTokens, o.Orders = true, len(tr.Tokens), 1
		r, err := cost.EvaluateBaseline(t.Context(), tr, attention, 4, o)
		if err != nil {
			t.Fatal(err)
		}
		v, tokens := r.Volume, float64(len(tr.Tokens))
		activations := tokens * float64(tr.Model.TopK)
		all := func(i int) float64 {
			return v.Objectives[i].Messages.Node.Total + v.Objectives[i].Messages.Network.Total
		}
		for name, f := range map[string]struct{ got, want float64 }{
			"remote activations":   {all(0), (1 - r.LAR) * activations},
			"of them to nodes":     {v.Objectives[0].Messages.Network.Total, (1 - r.NodeLAR) * activations},
			"remote ranks":         {all(1), r.RemoteRanksPerToken * tokens},
			"remote nodes":         {all(2), r.RemoteNodesPerToken * tokens},
			"messages by nodes":    {v.Objectives[3].Messages.Network.Total, r.RemoteNodesPerToken * tokens},
			"batches":              {float64(v.Batches), 1},
			"tokens of a batch":    {float64(v.BatchTokens), tokens},
			"bytes of an answer":   {v.Objectives[1].Combine.Node.Total, v.Objectives[1].Messages.Node.Total * 2 * float64(tr.Model.HiddenSize)},
			"ranks":                {float64(v.Ranks), 4},
			"ranks that share":     {float64(v.RanksPerNode), 2},
			"size of what is sent": {float64(v.HiddenSize), float64(tr.Model.HiddenSize)},
		} {
			if math.Abs(f.got-f.want) > 1e-6*f.want {
				t.Errorf("attention %s: %s: %v; wanted are %v", attention, name, f.got, f.want)
			}
		}
		o.BatchTokens = 10 * len(tr.Tokens)
		larger, err := cost.EvaluateBaseline(t.Context(), tr, attention, 4, o)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(v, larger.Volume); diff != "" {
			t.Errorf("attention %s: with fewer tokens than a batch has (-want +got):\n%s", attention, diff)
		}
		o.BatchTokens = 64
		small, err := cost.EvaluateBaseline(t.Context(), tr, attention, 4, o)
		if err != nil {
			t.Fatal(err)
		}
		if small.Volume.Batches != len(tr.Tokens)/64 || small.Volume.Objectives[0].Messages.Node.MaxSend > 64*float64(tr.Model.TopK) {
			t.Errorf("attention %s: %d batches of 64 of %v tokens: %+v", attention, small.Volume.Batches, tokens, small.Volume.Objectives[0].Messages)
		}
	}
}
