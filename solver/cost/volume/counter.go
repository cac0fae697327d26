// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"iter"
	"slices"
)

// Counted objectives, in the order of placement.MessageObjectives.
const (
	activation = iota
	rankDedup
	nodeDedup
	hierarchical
	objectives
)

// Topology defines which ranks share a node: RanksPerNode consecutive ranks. The last node may have fewer.
type Topology struct{ Ranks, RanksPerNode int }

// nodes returns the number of nodes.
func (t Topology) nodes() int { return (t.Ranks-1)/t.RanksPerNode + 1 }

// gateway returns the rank of a node that receives the messages of rank from to the node: the rank with the same
// position within its node, whose network card is on the same rail.
func (t Topology) gateway(from, node int) int {
	return min(node*t.RanksPerNode+from%t.RanksPerNode, t.Ranks-1)
}

// Flow is the traffic on the links of one class in one exchange, in messages or bytes.
type Flow struct {
	// Total is the sum over all ranks, MaxSend the maximum that a rank sends, MaxRecv the maximum that a rank receives.
	Total   float64 `json:"total"`
	MaxSend float64 `json:"max_send"`
	MaxRecv float64 `json:"max_recv"`
	// Padded is the total if every pair of ranks reserves the size of the busiest pair: an exchange of equal parts,
	// which needs no counts in advance.
	Padded float64 `json:"padded"`
}

func (f Flow) scaled(by float64) Flow {
	return Flow{Total: by * f.Total, MaxSend: by * f.MaxSend, MaxRecv: by * f.MaxRecv, Padded: by * f.Padded}
}

func (f *Flow) add(g Flow, weight float64) {
	f.Total += weight * g.Total
	f.MaxSend += weight * g.MaxSend
	f.MaxRecv += weight * g.MaxRecv
	f.Padded += weight * g.Padded
}

// Links are the flows within nodes and between nodes. A class without traffic is omitted from files.
type Links struct {
	Node    Flow `json:"node,omitzero"`
	Network Flow `json:"network,omitzero"`
}

func (l Links) scaled(by float64) Links {
	return Links{Node: l.Node.scaled(by), Network: l.Network.scaled(by)}
}

// back returns the flows of the reverse direction.
func (l Links) back() Links {
	for _, f := range []*Flow{&l.Node, &l.Network} {
		f.MaxSend, f.MaxRecv = f.MaxRecv, f.MaxSend
	}
	return l
}

// Messages are the messages of one dispatch, by objective in the order of placement.MessageObjectives.
type Messages [objectives]Links

// Add adds the messages of another dispatch with a weight.
func (m *Messages) Add(other *Messages, weight float64) {
	for i := range m {
		m[i].Node.add(other[i].Node, weight)
		m[i].Network.add(other[i].Network, weight)
	}
}

// Counter counts the messages of one MoE layer, batch by batch. Use NewCounter to create one.
type Counter struct {
	topology    Topology
	batchTokens int
	// tokens is the number of tokens in the open batch.
	tokens int
	// pairs are the messages of the open batch from rank to rank [objective][ranks × ranks]. Above maxPairs, sends
	// lists the pair of each message instead [objective][messages], so its size depends on the tokens, not on the
	// square of the ranks.
	pairs [objectives][]int32
	sends [objectives][]int32
	// batches is the number of closed batches, sum is the sum over them.
	batches int
	sum     Messages
	// token numbers the tokens. seen and seenNode contain the last token with an expert on each rank and node.
	token          int
	seen, seenNode []int
}

// maxPairs is the maximum number of pairs of ranks with one counter each: those of 128 ranks.
const maxPairs = 1 << 14

// NewCounter returns a counter for batches of the given number of tokens over all ranks, at least 1.
func NewCounter(t Topology, batchTokens int) *Counter {
	c := &Counter{topology: t, batchTokens: batchTokens, seen: make([]int, t.Ranks), seenNode: make([]int, t.nodes())}
	if n := t.Ranks * t.Ranks; n <= maxPairs {
		for i := range c.pairs {
			c.pairs[i] = make([]int32, n)
		}
	}
	return c
}

// Add counts a token of rank own. on contains the rank that computes each of its activations.
func (c *Counter) Add(own int, on []int) {
	c.token++
	c.tokens++
	for _, rank := range on {
		if rank == own {
			continue
		}
		c.send(activation, own, rank)
		if c.seen[rank] == c.token {
			continue
		}
		c.seen[rank] = c.token
		c.send(rankDedup, own, rank)
		c.route(own, rank)
	}
	if c.tokens == c.batchTokens {
		c.close()
	}
}

// route sends a token to a rank through the rank's node, to which it is sent once.
func (c *Counter) route(own, rank int) {
	node := rank / c.topology.RanksPerNode
	if node == own/c.topology.RanksPerNode {
		c.send(hierarchical, own, rank)
		return
	}
	gateway := c.topology.gateway(own, node)
	if c.seenNode[node] != c.token {
		c.seenNode[node] = c.token
		c.send(nodeDedup, own, gateway)
		c.send(hierarchical, own, gateway)
	}
	if rank != gateway {
		c.send(hierarchical, gateway, rank)
	}
}

func (c *Counter) send(objective, from, to int) {
	pair := from*c.topology.Ranks + to
	if pairs := c.pairs[objective]; pairs != nil {
		pairs[pair]++
		return
	}
	c.sends[objective] = append(c.sends[objective], int32(pair))
}

func (c *Counter) close() {
	m := c.open()
	c.sum.Add(&m, 1)
	c.batches++
	c.tokens = 0
	for i := range c.pairs {
		clear(c.pairs[i])
		c.sends[i] = c.sends[i][:0]
	}
}

// open returns the messages of the open batch.
func (c *Counter) open() (m Messages) {
	for i := range m {
		m[i] = c.topology.links(c.messages(i))
	}
	return m
}

// messages returns the pairs of ranks with messages in the open batch, and the numbers of messages.
func (c *Counter) messages(objective int) iter.Seq2[int, int] {
	return func(yield func(pair, n int) bool) {
		for pair, n := range c.pairs[objective] {
			if n > 0 && !yield(pair, int(n)) {
				return
			}
		}
		sends := c.sends[objective]
		slices.Sort(sends)
		for begin := 0; begin < len(sends); {
			end := begin + 1
			for end < len(sends) && sends[end] == sends[begin] {
				end++
			}
			if !yield(int(sends[begin]), end-begin) {
				return
			}
			begin = end
		}
	}
}

// peers returns the number of pairs of different ranks within nodes, and between nodes.
func (t Topology) peers() [2]int {
	full := t.nodes() - 1 // all nodes but the last one
	last := t.Ranks - full*t.RanksPerNode
	within := full*t.RanksPerNode*(t.RanksPerNode-1) + last*(last-1)
	return [2]int{within, t.Ranks*(t.Ranks-1) - within}
}

// links groups the messages from rank to rank by the class of their link.
func (t Topology) links(messages iter.Seq2[int, int]) Links {
	const node, network = 0, 1
	var sent, received [2][]int
	for class := range sent {
		sent[class], received[class] = make([]int, t.Ranks), make([]int, t.Ranks)
	}
	var most [2]int
	peers := t.peers()
	for pair, n := range messages {
		from, to, class := pair/t.Ranks, pair%t.Ranks, network
		if from == to {
			continue
		}
		if from/t.RanksPerNode == to/t.RanksPerNode {
			class = node
		}
		sent[class][from] += n
		received[class][to] += n
		most[class] = max(most[class], n)
	}
	flow := func(class int) Flow {
		total := 0
		for _, n := range sent[class] {
			total += n
		}
		return Flow{
			Total: float64(total), MaxSend: float64(slices.Max(sent[class])), MaxRecv: float64(slices.Max(received[class])),
			Padded: float64(most[class] * peers[class]),
		}
	}
	return Links{Node: flow(node), Network: flow(network)}
}

// Batches returns the number of whole batches.
func (c *Counter) Batches() int { return c.batches }

// Tokens returns the number of tokens in the open batch.
func (c *Counter) Tokens() int { return c.tokens }

// Messages returns the mean over whole batches, or the messages of the open batch if there is no whole one.
func (c *Counter) Messages() Messages {
	if c.batches == 0 {
		return c.open()
	}
	var mean Messages
	mean.Add(&c.sum, 1/float64(c.batches))
	return mean
}
