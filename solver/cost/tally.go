// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"slices"

	"github.com/semmoe/operator/solver/cost/volume"
	"github.com/semmoe/operator/solver/placement"
)

// tally counts the activations of one MoE layer.
type tally struct {
	// hosts are the ranks with a copy of each expert. home is the only rank of an expert if there are no copies.
	hosts        [][]int
	home         []int
	rule         placement.CopyRule
	options      *Options
	ranksPerNode int
	tokens       []int
	served       []int
	sent         []int
	received     []int
	local        int
	onNode       int
	remoteRanks  int
	activations  int
	remoteNodes  int
	// seen is, for each rank, the last token that counted it as remote. seenNode is the same for each node.
	seen, seenNode []int
	// turn assigns the activations of a remote expert with several copies to the copies round-robin.
	turn int
	// kinds are the counts for each domain; nil if not requested.
	kinds []kindTally
	// messages counts the traffic batch by batch. on contains the ranks that compute the current token's activations.
	// Both are nil if volumes are not requested.
	messages *volume.Counter
	on       []int
}

func newTally(p *placement.Placement, layer, kinds int, o *Options) *tally {
	hosts, ranks := p.Hosts(layer), p.Ranks
	t := &tally{
		hosts: hosts, rule: p.CopyRule, home: make([]int, len(hosts)), options: o, ranksPerNode: o.RanksPerNode,
		tokens: make([]int, ranks), served: make([]int, ranks), sent: make([]int, ranks), received: make([]int, ranks), seen: make([]int, ranks),
		seenNode: make([]int, (ranks-1)/o.RanksPerNode+1),
	}
	for expert, ranks := range hosts {
		t.home[expert] = ranks[0]
		if len(ranks) > 1 {
			t.home[expert] = -1
		}
	}
	if o.Volume {
		t.messages = volume.NewCounter(volume.Topology{Ranks: ranks, RanksPerNode: o.RanksPerNode}, o.BatchTokens)
	}
	if o.Detail {
		t.kinds = make([]kindTally, kinds)
		for kind := range t.kinds {
			t.kinds[kind].tokens = make([]int, ranks)
		}
	}
	return t
}

// add counts one token on its rank with the experts that it activates, and returns the number of local activations.
func (t *tally) add(experts []uint16, own int) int {
	t.tokens[own]++
	t.turn++
	t.activations += len(experts)
	node := own / t.ranksPerNode
	local := 0
	t.on = t.on[:0]
	for _, expert := range experts {
		rank := t.home[expert]
		if rank < 0 {
			rank = t.serve(int(expert), own)
		}
		if t.messages != nil {
			t.on = append(t.on, rank)
		}
		t.served[rank]++
		if rank == own {
			local++
			continue
		}
		if to := rank / t.ranksPerNode; to == node {
			t.onNode++
		} else if t.seenNode[to] != t.turn {
			t.seenNode[to] = t.turn
			t.remoteNodes++
		}
		t.received[rank]++
		if t.seen[rank] != t.turn {
			t.seen[rank] = t.turn
			t.remoteRanks++
		}
	}
	if t.messages != nil {
		t.messages.Add(own, t.on)
	}
	t.local += local
	t.onNode += local
	t.sent[own] += len(experts) - local
	return local
}

// isLocal reports whether rank own computes an expert for its own tokens.
func (t *tally) isLocal(expert, own int) bool {
	return t.rule.Copy(t.hosts[expert], own) == own
}

// serve returns the rank that computes an expert with several copies for a token on rank own.
func (t *tally) serve(expert, own int) int {
	hosts := t.hosts[expert]
	if t.rule != placement.NearestCopy {
		return t.rule.Copy(hosts, own)
	}
	near := -1
	for _, rank := range hosts {
		if rank == own {
			return own
		}
		if near < 0 && rank/t.ranksPerNode == own/t.ranksPerNode {
			near = rank
		}
	}
	if near >= 0 {
		return near
	}
	return hosts[t.turn%len(hosts)]
}

func (t *tally) figures() figures {
	activations, tokens := float64(t.activations), 0
	for _, n := range t.tokens {
		tokens += n
	}
	share := activations / float64(len(t.tokens))
	f := figures{
		lar:                  float64(t.local) / activations,
		nodeLAR:              float64(t.onNode) / activations,
		remoteRanks:          float64(t.remoteRanks) / float64(tokens),
		remoteNodes:          float64(t.remoteNodes) / float64(tokens),
		tokenImbalance:       t.options.tokenImbalance(t.tokens),
		tokenImbalanceMedian: imbalanceMedian(t.options.perCapacity(t.tokens)),
		expertImbalance:      imbalance(t.served),
		maxSend:              float64(slices.Max(t.sent)) / share,
		maxRecv:              float64(slices.Max(t.received)) / share,
	}
	f.exchange = max(f.maxSend, f.maxRecv)
	return f
}

// perCapacity scales loads such that ranks with loads equal to their shares have equal scaled loads.
func (o *Options) perCapacity(load []int) []float64 {
	scaled, sum := make([]float64, len(load)), 0.0
	for _, c := range o.RankCapacity {
		sum += c
	}
	for rank, n := range load {
		scaled[rank] = float64(n)
		if o.RankCapacity != nil {
			scaled[rank] *= sum / (o.RankCapacity[rank] * float64(len(load)))
		}
	}
	return scaled
}

// tokenImbalance returns the maximum token load of a rank relative to its share.
func (o *Options) tokenImbalance(load []int) float64 {
	total := 0
	for _, n := range load {
		total += n
	}
	if total == 0 {
		return 1
	}
	return slices.Max(o.perCapacity(load)) * float64(len(load)) / float64(total)
}

// imbalance returns max/mean, and 1 if all loads are 0.
func imbalance(load []int) float64 { return new(Options).tokenImbalance(load) }

// imbalanceMedian returns max/median. If half of the ranks are idle, the median counts as 1.
func imbalanceMedian(load []float64) float64 {
	sorted := slices.Sorted(slices.Values(load))
	n := len(sorted)
	median := (sorted[(n-1)/2] + sorted[n/2]) / 2
	if sorted[n-1] == 0 {
		return 1
	}
	return sorted[n-1] / max(median, 1)
}
