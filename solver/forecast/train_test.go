// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"math/rand/v2"
	"testing"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestSamplesAreBoundedOnManyRanks trains on more positions than the sample limit for 256 ranks.
func TestSamplesAreBoundedOnManyRanks(t *testing.T) {
	const ranks, most = 256, maxCells / 256
	shape := tracetest.Shape{Experts: ranks, TopK: 1, Layers: 1, Vocabulary: 50, Domains: 2, DocumentsPerDomain: 8, RequestsPerDocument: 1, TokensPerRequest: 1000}
	tr := tracetest.Generate(shape, 1)
	m := &Model{Ranks: ranks, Layers: 1, Experts: shape.Experts, TopK: 1, Vocabulary: shape.Vocabulary}
	c := newCorpus(tr)
	m.countPairs(c)
	p := placement.Contiguous(tr.Model.Layers, ranks, ranks)
	s := gatherSamples(m, newCountedRows(m, c, p.Hosts(0), 0), rand.New(rand.NewPCG(1, 1)))
	longest := 0
	for r := range tr.Requests() {
		longest = max(longest, tr.Length(r))
	}
	if n := len(s.positions); n < most || n >= most+longest || n >= len(tr.Tokens) {
		t.Errorf("%d samples of %d positions on %d ranks; want about %d", n, len(tr.Tokens), ranks, most)
	}
}
