package affinity

import (
	"math"
	"slices"
)

// Messages weighs what an all-to-all carries that sends a token to a rank once, however many of the token's experts are
// there: a message to each other rank that holds experts of the token, and one to each other node. The zero value stands for
// an all-to-all that sends every activation by itself.
type Messages struct {
	// Rank and Node are what a message to another rank, and to another node, costs.
	Rank, Node float32
	// RanksPerNode tells which ranks share a node; at least 1 where Rank or Node is not zero.
	RanksPerNode int
}

// None reports whether activations count, not messages.
func (m Messages) None() bool { return m.Rank == 0 && m.Node == 0 }

// Count turns a token's activations per rank into the cost of the messages that it would not need if it were on that rank.
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

// Expect turns the expected shares of a token's activations per rank into the expected cost of the messages that it would
// not need, as if each of its topK experts were drawn by these shares. Forecasts are of shares whatever the objective: they
// learn more from how many activations a rank has than from whether there is one.
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

// some is the probability that one or more of topK draws are of a share.
func some(share float32, topK int) float32 {
	return 1 - float32(math.Pow(float64(1-min(max(share, 0), 1)), float64(topK)))
}

// Spread gives each rank of a table a part in what its node holds, by what messages to ranks and nodes cost: requests are
// scored by sums over tokens, which tell no more than shares do. Without cost of nodes it changes nothing.
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
