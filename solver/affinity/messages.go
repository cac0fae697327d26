// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"math"
	"slices"
)

// Messages is the cost of an all-to-all that sends a token to a rank once, for any number of the token's experts there:
// one message to each other rank that holds experts of the token, and one to each other node. The zero value is an
// all-to-all that sends every activation separately.
type Messages struct {
	// Rank and Node are the costs of a message to another rank and to another node.
	Rank, Node float32
	// RanksPerNode is the number of consecutive ranks on a node; at least 1 if Rank or Node is not zero.
	RanksPerNode int
}

// None reports whether activations are counted instead of messages.
func (m Messages) None() bool { return m.Rank == 0 && m.Node == 0 }

// Count converts a token's activations per rank into the cost of the messages that the token saves by being on that
// rank.
func (m Messages) Count(activations []float32) {
	for node := range slices.Chunk(activations, m.RanksPerNode) {
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

// Expect converts the expected shares of a token's activations per rank into the expected cost of saved messages,
// assuming that each of its topK experts is drawn independently with these shares. Forecasts always predict shares, for
// any objective: the number of activations on a rank carries more information than their presence.
func (m Messages) Expect(shares []float32, topK int) {
	for node := range slices.Chunk(shares, m.RanksPerNode) {
		onNode := float32(0)
		for _, share := range node {
			onNode += share
		}
		saved := m.Node * some(onNode, topK)
		for rank, share := range node {
			node[rank] = m.Rank*some(share, topK) + saved
		}
	}
}

// some returns the probability that at least one of topK draws has the given share.
func some(share float32, topK int) float32 {
	return 1 - float32(math.Pow(float64(1-min(max(share, 0), 1)), float64(topK)))
}

// Spread gives each rank of a table a part of its node's score, weighted by the costs of messages to ranks and nodes.
// Requests are scored by sums over tokens, for which shares are sufficient. Without a cost of nodes the table does not
// change.
func (t *RankTable) Spread(m Messages) {
	if m.Node == 0 {
		return
	}
	whole := m.Rank + m.Node*float32(m.RanksPerNode)
	for row := range slices.Chunk(t.Score, t.Ranks) {
		for node := range slices.Chunk(row, m.RanksPerNode) {
			onNode := float32(0)
			for _, score := range node {
				onNode += float32(score)
			}
			for rank, score := range node {
				node[rank] = quantise((m.Rank*float32(score) + m.Node*onNode) / (whole * ScoreScale))
			}
		}
	}
}
