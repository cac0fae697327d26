package cost

import "slices"

// tally counts what happens in one MoE layer.
type tally struct {
	// hosts are the ranks that hold each expert, home the only one where there are no copies.
	hosts        [][]int
	home         []int
	ranksPerNode int
	tokens       []int
	served       []int
	sent         []int
	received     []int
	local        int
	onNode       int
	remoteRanks  int
	activations  int
	// seen marks, per rank, the last token that counted it as remote.
	seen []int
	// turn deals the activations of a distant expert with several copies out to them.
	turn int
}

func newTally(hosts [][]int, ranks, ranksPerNode int) *tally {
	t := &tally{
		hosts: hosts, home: make([]int, len(hosts)), ranksPerNode: ranksPerNode,
		tokens: make([]int, ranks), served: make([]int, ranks), sent: make([]int, ranks), received: make([]int, ranks), seen: make([]int, ranks),
	}
	for expert, ranks := range hosts {
		t.home[expert] = ranks[0]
		if len(ranks) > 1 {
			t.home[expert] = -1
		}
	}
	return t
}

// add counts one token on its rank with the experts that it activates.
func (t *tally) add(experts []uint16, own int) {
	t.tokens[own]++
	t.turn++
	t.activations += len(experts)
	node := own / t.ranksPerNode
	local := 0
	for _, expert := range experts {
		rank := t.home[expert]
		if rank < 0 {
			rank = t.serve(int(expert), own)
		}
		t.served[rank]++
		if rank == own {
			local++
			continue
		}
		if rank/t.ranksPerNode == node {
			t.onNode++
		}
		t.received[rank]++
		if t.seen[rank] != t.turn {
			t.seen[rank] = t.turn
			t.remoteRanks++
		}
	}
	t.local += local
	t.onNode += local
	t.sent[own] += len(experts) - local
}

// serve is the rank that computes an expert with several copies for a token on rank own.
func (t *tally) serve(expert, own int) int {
	hosts := t.hosts[expert]
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
		tokenImbalance:       imbalance(t.tokens),
		tokenImbalanceMedian: imbalanceMedian(t.tokens),
		expertImbalance:      imbalance(t.served),
		maxSend:              float64(slices.Max(t.sent)) / share,
		maxRecv:              float64(slices.Max(t.received)) / share,
	}
	f.exchange = max(f.maxSend, f.maxRecv)
	return f
}

// imbalance is max/mean; an idle set of ranks is balanced.
func imbalance(load []int) float64 {
	total := 0
	for _, n := range load {
		total += n
	}
	if total == 0 {
		return 1
	}
	return float64(slices.Max(load)) * float64(len(load)) / float64(total)
}

// imbalanceMedian is max/median. Where half of the ranks are idle it is taken against a load of one.
func imbalanceMedian(load []int) float64 {
	sorted := slices.Sorted(slices.Values(load))
	n := len(sorted)
	median := float64(sorted[(n-1)/2]+sorted[n/2]) / 2
	if sorted[n-1] == 0 {
		return 1
	}
	return float64(sorted[n-1]) / max(median, 1)
}
