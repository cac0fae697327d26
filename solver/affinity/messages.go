package affinity

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/trace"
)

// Messages weighs what an all-to-all carries that sends a token to a rank once, however many of the token's experts are there:
// a message to each other rank that holds experts of the token, and one to each other node. The zero value stands for an
// all-to-all that sends every activation by itself.
type Messages struct {
	// Rank and Node are what a message to another rank, and to another node, costs.
	Rank, Node float32
	// RanksPerNode tells which ranks share a node; at least 1 where Rank or Node is not zero.
	RanksPerNode int
}

// None reports whether activations count, not messages.
func (m Messages) None() bool { return m.Rank == 0 && m.Node == 0 }

// Shares fills dst [ranks] with how much a token belongs to each rank: its activations there or, where nodes count, those on the rank and
// those on its node, weighted; scaled to sum to 1. Where a message is saved at all tells less: scores learnt from that forecast even
// the saved messages worse than scores learnt from activations do.
func (m Messages) Shares(dst []float32, experts []uint16, hosts Hosts) {
	clear(dst)
	for _, expert := range experts {
		for _, rank := range hosts[expert] {
			dst[rank]++
		}
	}
	if m.Node > 0 {
		m.spread(dst)
	}
	total := float32(0)
	for _, share := range dst {
		total += share
	}
	for rank := range dst {
		dst[rank] /= total
	}
}

// spread adds to a rank's activations those of its node, each by its weight.
func (m Messages) spread(dst []float32) {
	for node := range slices.Chunk(dst, m.RanksPerNode) {
		onNode := float32(0)
		for _, n := range node {
			onNode += n
		}
		for rank, n := range node {
			node[rank] = m.Rank*n + m.Node*onNode
		}
	}
}

// Count turns a token's activations per rank into the cost of the messages that it would not need if it were on that rank.
func (m Messages) Count(dst []float32) {
	for node := range slices.Chunk(dst, m.RanksPerNode) {
		onNode := float32(0)
		for rank, n := range node {
			node[rank] = 0
			if n > 0 {
				node[rank], onNode = m.Rank, m.Node
			}
		}
		for rank := range node {
			node[rank] += onNode
		}
	}
}

// CountShares sums Shares over the occurrences of each token id of the listed requests, one Counts for each MoE layer, in which
// ranks take the place of experts. hosts are a placement's, layer by layer.
func CountShares(ctx context.Context, t *trace.Trace, requests []int, hosts []Hosts, ranks int, m Messages) ([]Counts, error) {
	positions, start := groupByToken(t, requests)
	layers := make([]Counts, len(t.Model.Layers))
	err := Parallel(ctx, len(layers), func(l int) {
		shares := make([]float32, ranks)
		layers[l] = countRows(ranks, 1, positions, start, func(row []float32, position int) {
			m.Shares(shares, t.Row(position, l), hosts[l])
			for rank, share := range shares {
				row[rank] += share
			}
		})
	})
	return layers, err
}

// EachRank are the hosts under which the experts of CountShares are ranks.
func EachRank(ranks int) Hosts {
	hosts := make(Hosts, ranks)
	for rank := range hosts {
		hosts[rank] = []int{rank}
	}
	return hosts
}
