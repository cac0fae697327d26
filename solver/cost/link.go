// SPDX-License-Identifier: Apache-2.0

package cost

import "github.com/semmoe/operator/solver/cost/hardware"

// Machines are the machines of a MoE layer, by a hardware profile: the exchange among ranks, and the grouped GEMMs of
// one rank.
type Machines struct {
	// Profile is the name of the hardware profile.
	Profile string
	// Link is the time of the all-to-all as a function of the bytes that the busiest rank sends or receives.
	Link    hardware.Exchange
	Grouped hardware.GEMM
	// Nominal is set if the exchange is not measured, but modelled as a network card at its nominal rate.
	Nominal bool
}

// NodeOf returns the machines for ranks with the same exchange as in the profile.
func NodeOf(p *hardware.Profile) Machines {
	return Machines{Profile: p.Name, Link: p.AllToAll, Grouped: p.Grouped}
}

// MachinesOf returns the machines for a number of ranks. If the ranks span several nodes and the profile was measured
// within one node, the exchange is that of network cards, because the rate within a node is several times higher. If
// the measured exchange within a node is slower than that, it also applies across nodes.
func MachinesOf(p *hardware.Profile, ranks, ranksPerNode int) Machines {
	m := NodeOf(p)
	if adapter := rdma400(p); ranks > ranksPerNode && p.Ranks <= ranksPerNode && m.Link.Rate() > adapter.Rate() {
		m.Link, m.Nominal = adapter, true
	}
	return m
}

// Spread returns the profile for a number of ranks. If they span several nodes, all exchanges are those of MachinesOf,
// and collectives are slower than within a node by the same factor.
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

// rdma400 models one 400 Gb/s adapter for each rank at its nominal rate. Dispatch kernels were measured at 43 to 58
// GB/s over such adapters, which gives the error. The start-up time was not measured: it is that of the profile's
// exchange.
func rdma400(p *hardware.Profile) hardware.Exchange {
	return hardware.Exchange{Line: hardware.Line{Start: p.AllToAll.Start, PerMicrosecond: 50e3}, Fit: hardware.Fit{HeldOutMedianError: 0.16}}
}

// NodeMessage returns the cost of a message to another node relative to a message to another rank. It is the ratio of
// the rates, since both carry the same token. It is at least 1: a slow exchange within a node does not make messages to
// other nodes cheaper.
func NodeMessage(p *hardware.Profile) float64 {
	adapter := rdma400(p)
	return max(1, p.AllToAll.Rate()/adapter.Rate())
}

// layerMicroseconds returns the time of a MoE layer's dispatch and combine, in bf16, for a number of tokens per rank,
// if the busiest rank exchanges the given multiple of a rank's activations.
func layerMicroseconds(link *hardware.Exchange, tokensPerRank, exchange float64, topK, hiddenSize int) float64 {
	const bf16 = 2
	bytes := tokensPerRank * exchange * float64(topK) * float64(hiddenSize) * bf16
	return 2 * link.Microseconds(bytes)
}
