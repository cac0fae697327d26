package cost

import "github.com/semmoe/operator/solver/cost/hardware"

// Machines are what a MoE layer runs on, as a hardware profile has them: the exchange among its ranks, and the grouped products of one.
type Machines struct {
	// Profile is the name of the hardware profile.
	Profile string
	// Link is the all-to-all, by the bytes that the busiest rank sends or receives.
	Link    hardware.Exchange
	Grouped hardware.GEMM
	// Nominal is set where the exchange is not measured, but that of a network card at its nominal rate.
	Nominal bool
}

// NodeOf is for ranks that exchange as those did that the profile was measured on.
func NodeOf(p *hardware.Profile) Machines {
	return Machines{Profile: p.Name, Link: p.AllToAll, Grouped: p.Grouped}
}

// MachinesOf is for that many ranks. Where they have several nodes, and the profile is of ranks that had one, the exchange is that of network cards:
// what was measured within a node would promise several times their rate. Where ranks of one node exchange more slowly than that, those of
// several do too.
func MachinesOf(p *hardware.Profile, ranks, ranksPerNode int) Machines {
	m := NodeOf(p)
	if adapter := rdma400(p); ranks > ranksPerNode && p.Ranks <= ranksPerNode && m.Link.Rate() > adapter.Rate() {
		m.Link, m.Nominal = adapter, true
	}
	return m
}

// Spread is the profile for that many ranks: where they have several nodes, all ranks and groups of them exchange as those of MachinesOf, and
// their collectives send as much more slowly than within a node.
func Spread(p *hardware.Profile, ranks, ranksPerNode int) *hardware.Profile {
	m := MachinesOf(p, ranks, ranksPerNode)
	if !m.Nominal {
		return p
	}
	spread, slower := *p, p.AllToAll.Rate()/m.Link.Rate()
	spread.AllToAll, spread.A2E = m.Link, nil
	for _, collective := range []*hardware.Exchange{&spread.AllReduce, &spread.ReduceScatter, &spread.AllGather} {
		*collective = collective.Slower(slower)
	}
	return &spread
}

// rdma400 is one 400 Gb/s adapter for each rank, at its nominal rate; dispatch kernels have been measured at 43 to 58 GB/s over such, which is
// the error. The time without data has not been measured: it is that of the profile's exchange.
func rdma400(p *hardware.Profile) hardware.Exchange {
	return hardware.Exchange{Line: hardware.Line{Start: p.AllToAll.Start, PerMicrosecond: 50e3}, Fit: hardware.Fit{HeldOutMedianError: 0.16}}
}

// NodeMessage is what a message to another node costs in messages to another rank: the rates' ratio, as both carry the same
// token. It is never below 1: that ranks of one node exchange slowly makes messages to others no cheaper.
func NodeMessage(p *hardware.Profile) float64 {
	adapter := rdma400(p)
	return max(1, p.AllToAll.Rate()/adapter.Rate())
}

// layerMicroseconds is the time of a MoE layer's dispatch and combine, bf16 each way, when a rank holds that many tokens
// and the busiest rank exchanges the given multiple of a rank's activations.
func layerMicroseconds(link *hardware.Exchange, tokensPerRank, exchange float64, topK, hiddenSize int) float64 {
	const bf16 = 2
	bytes := tokensPerRank * exchange * float64(topK) * float64(hiddenSize) * bf16
	return 2 * link.Microseconds(bytes)
}
