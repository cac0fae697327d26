// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/placement"
)

// Six ranks, two to a node. Rank 0 sends a token to ranks 1, 3 (twice) and 5; rank 2 one to 0, 3 and itself.
func TestMessagesByHand(t *testing.T) {
	c := NewCounter(Topology{Ranks: 6, RanksPerNode: 2}, 2)
	c.Add(0, []int{1, 3, 3, 5})
	c.Add(2, []int{0, 3, 2, 2})
	got := c.Messages()
	want := Messages{
		// 0→1, 0→3 twice, 0→5; 2→0, 2→3.
		activation: {Node: Flow{2, 1, 1, 6}, Network: Flow{4, 3, 2, 48}},
		rankDedup:  {Node: Flow{2, 1, 1, 6}, Network: Flow{3, 2, 1, 24}},
		// 0 goes to nodes 1 and 2 by ranks 2 and 4, 2 to node 0 by rank 0.
		nodeDedup: {Network: Flow{3, 2, 1, 24}},
		// In addition to nodeDedup: 0→1 and 2→3 within nodes, then 2→3 and 4→5 onwards. The pair 2→3 has two messages.
		hierarchical: {Node: Flow{4, 2, 2, 12}, Network: Flow{3, 2, 1, 24}},
	}
	if diff := cmp.Diff(want, got); diff != "" || c.Batches() != 1 {
		t.Errorf("%d batches (-want +got):\n%s", c.Batches(), diff)
	}
	c.Add(0, []int{1, 1, 1, 1}) // a batch that is not whole does not count
	if diff := cmp.Diff(want, c.Messages()); diff != "" {
		t.Errorf("with a part of a batch (-want +got):\n%s", diff)
	}
	few := NewCounter(Topology{Ranks: 6, RanksPerNode: 2}, 100)
	few.Add(0, []int{1, 1, 1, 1})
	if got := few.Messages()[activation]; got.Node.Total != 4 || few.Batches() != 0 {
		t.Errorf("an incomplete batch counts as %+v", got)
	}
}

func TestBytesByHand(t *testing.T) {
	m := Messages{activation: {Node: Flow{4, 3, 2, 10}}, hierarchical: {Node: Flow{2, 1, 2, 8}, Network: Flow{1, 1, 1, 6}}}
	volumes := m.Volumes(Row{HiddenSize: 200, TopK: 8}, 4, 16)
	first, last := volumes[activation], volumes[hierarchical]
	for name, f := range map[string]struct{ got, want Flow }{
		"activation: dispatch bf16":     {first.DispatchBF16.Node, Flow{4 * 416, 3 * 416, 2 * 416, 10 * 416}},
		"activation: dispatch fp8":      {first.DispatchFP8.Node, Flow{4 * 224, 3 * 224, 2 * 224, 10 * 224}},
		"activation: combine":           {first.Combine.Node, Flow{4 * 400, 2 * 400, 3 * 400, 10 * 400}},
		"hierarchical: dispatch fp8":    {last.DispatchFP8.Network, Flow{312, 312, 312, 6 * 312}},
		"hierarchical: combine, node":   {last.Combine.Node, Flow{800, 800, 400, 3200}},
		"hierarchical: dispatch, links": {last.DispatchBF16.Network, Flow{504, 504, 504, 6 * 504}},
	} {
		if f.got != f.want {
			t.Errorf("%s: %+v; wanted is %+v", name, f.got, f.want)
		}
	}
	if first.HeaderBytes != 4*16 || last.HeaderBytes != 3*104 || first.CountBytes != 4*3*16*4 {
		t.Errorf("headers of %v and %v bytes, counts of %v", first.HeaderBytes, last.HeaderBytes, first.CountBytes)
	}
	if first.Objective != placement.Activation || last.Objective != placement.Hierarchical {
		t.Errorf("objectives %s and %s", first.Objective, last.Objective)
	}
}

// What holds for any routing: on random tokens, ranks and nodes.
func TestInvariants(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		ranks := 1 + random.IntN(12)
		topology := Topology{Ranks: ranks, RanksPerNode: 1 + random.IntN(ranks)}
		tokens, topK := 1+random.IntN(40), 1+random.IntN(8)
		c, shuffled := NewCounter(topology, tokens), NewCounter(topology, tokens)
		type token struct {
			own int
			on  []int
		}
		var batch []token
		for range tokens {
			next := token{random.IntN(ranks), make([]int, topK)}
			for k := range next.on {
				next.on[k] = random.IntN(ranks)
			}
			batch = append(batch, next)
			c.Add(next.own, next.on)
		}
		random.Shuffle(tokens, func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
		for _, next := range batch {
			slices.Reverse(next.on)
			shuffled.Add(next.own, next.on)
		}
		m := c.Messages()
		if diff := cmp.Diff(m, shuffled.Messages()); diff != "" {
			t.Fatalf("the order of the tokens matters:\n%s", diff)
		}
		check(t, topology, tokens, topK, &m)
	}
}

// TestManyRanks counts the same with a list of messages, as for many ranks, as with a number for each pair of ranks, over several batches.
func TestManyRanks(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	for range 100 {
		ranks := 1 + random.IntN(12)
		topology := Topology{Ranks: ranks, RanksPerNode: 1 + random.IntN(ranks+3)}
		few, many := NewCounter(topology, 10), NewCounter(topology, 10)
		many.pairs = [objectives][]int32{}
		for range 1 + random.IntN(35) {
			own, on := random.IntN(ranks), make([]int, 1+random.IntN(8))
			for k := range on {
				on[k] = random.IntN(ranks)
			}
			few.Add(own, on)
			many.Add(own, on)
		}
		if diff := cmp.Diff(few.Messages(), many.Messages()); diff != "" || few.Batches() != many.Batches() {
			t.Fatalf("%+v: %d and %d batches:\n%s", topology, few.Batches(), many.Batches(), diff)
		}
	}
	if c := NewCounter(Topology{Ranks: 129, RanksPerNode: 8}, 10); c.pairs[activation] != nil {
		t.Error("129 ranks have a number for each pair")
	}
}

func check(t *testing.T, topology Topology, tokens, topK int, m *Messages) {
	t.Helper()
	for i, l := range m {
		for _, f := range []Flow{l.Node, l.Network} {
			ranks := float64(topology.Ranks)
			if f.MaxSend > f.Total || f.MaxRecv > f.Total || f.Total > ranks*f.MaxSend || f.Total > ranks*f.MaxRecv || f.Padded < f.Total {
				t.Fatalf("%+v, %s: %+v", topology, placement.MessageObjectives[i], f)
			}
		}
	}
	most := float64(tokens * topK)
	all := func(l Links) float64 { return l.Node.Total + l.Network.Total }
	switch {
	case all(m[activation]) > most || all(m[rankDedup]) > all(m[activation]),
		m[rankDedup].Node.Total > m[activation].Node.Total || m[rankDedup].Network.Total > m[activation].Network.Total,
		m[nodeDedup].Network.Total > m[rankDedup].Network.Total || m[nodeDedup].Node.Total != 0,
		m[hierarchical].Network != m[nodeDedup].Network || m[hierarchical].Node.Total < m[rankDedup].Node.Total,
		all(m[hierarchical]) > all(m[rankDedup])+m[nodeDedup].Network.Total,
		topology.nodes() == 1 && (m[hierarchical] != m[rankDedup] || m[activation].Network.Total != 0):
		t.Fatalf("%+v: %+v", topology, m)
	}
}

// What is sent is received, for each class of links: by the sums of rows and columns of any messages from rank to rank.
func TestSentIsReceived(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		topology := Topology{Ranks: 1 + random.IntN(9), RanksPerNode: 1 + random.IntN(4)}
		n := topology.Ranks
		pairs, back := make([]int, n*n), make([]int, n*n)
		for at := range pairs {
			pairs[at] = random.IntN(5)
			back[at%n*n+at/n] = pairs[at]
		}
		// The messages of the way back are the transposed ones, of which the same is counted.
		if got, want := topology.links(slices.All(back)), topology.links(slices.All(pairs)).back(); got != want {
			t.Fatalf("%+v: the way back is %+v; wanted is %+v", topology, got, want)
		}
	}
}
