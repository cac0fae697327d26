// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
)

// Link is a class of links: it carries the exchange between two ranks in the same group of this class but in different
// groups of the smaller classes.
type Link struct {
	// Name is the display name.
	Name string
	// RanksPerGroup is the number of consecutive ranks connected by the class.
	RanksPerGroup int
	// Exchange is the time as a function of the bytes that the busiest rank sends or receives over the class.
	Exchange hardware.Exchange
}

// Topology describes the connections of ranks.
type Topology struct {
	// Name is the display name.
	Name string
	// Ranks is the number of ranks.
	Ranks int
	// Links are the classes, from the smallest group to the class that connects all ranks.
	Links []Link
}

// Check returns an error for an invalid topology.
func (t *Topology) Check() error {
	if t.Ranks < 1 {
		return fmt.Errorf("%d ranks; at least 1 is needed", t.Ranks)
	}
	before := 0
	for _, l := range t.Links {
		if l.RanksPerGroup <= before || before > 0 && l.RanksPerGroup%before != 0 {
			return fmt.Errorf("links %q connect %d ranks; the number must be a larger multiple of the previous %d", l.Name, l.RanksPerGroup, before)
		}
		if err := l.Exchange.Check(); err != nil {
			return fmt.Errorf("links %q: %w", l.Name, err)
		}
		before = l.RanksPerGroup
	}
	if before < t.Ranks {
		return fmt.Errorf("the links connect %d of %d ranks; the last class must connect all", before, t.Ranks)
	}
	return nil
}

// OneNode returns a topology with all ranks on one node, connected as in the profile.
func OneNode(ranks int, p *hardware.Profile) Topology {
	return Topology{Name: "one node", Ranks: ranks, Links: []Link{{"node", ranks, p.AllToAll}}}
}

const (
	// IslandRanks is the number of GPUs of a server without NVLink that share a PCIe root. A rank exchanges 63 GB/s
	// within the root, which is PCIe 5.0 with 16 lanes, and 20.8 GB/s beyond it, the published rate of such servers.
	// Neither rate was measured in this project.
	IslandRanks = 4
	// islandRate and crossingRate are in bytes per microsecond.
	islandRate, crossingRate = 63e3, 20.8e3
)

// Islands returns a topology with PCIe islands of 4 ranks. The start-up time of an exchange is the profile's, because
// it was not measured on islands.
func Islands(ranks int, p *hardware.Profile) Topology {
	t := Topology{Name: "PCIe islands", Ranks: ranks, Links: []Link{{"island", IslandRanks, nominal(p, islandRate)}}}
	if ranks > IslandRanks {
		t.Links = append(t.Links, Link{"between islands", groupsOf(IslandRanks, ranks), nominal(p, crossingRate)})
	}
	return t
}

// adapterRate is the nominal rate of a 400 Gb/s adapter per rank, in bytes per microsecond. Dispatch kernels have been
// measured at 43 to 58 GB/s over such adapters.
const adapterRate = 50e3

// Nodes returns a topology with nodes of the given number of ranks, connected as in the profile, and with a 400 Gb/s
// adapter per rank between nodes.
func Nodes(ranks, ranksPerNode int, p *hardware.Profile) Topology {
	t := Topology{Name: "nodes", Ranks: ranks, Links: []Link{{"node", ranksPerNode, p.AllToAll}}}
	if ranks > ranksPerNode {
		t.Links = append(t.Links, Link{"between nodes", groupsOf(ranksPerNode, ranks), nominal(p, adapterRate)})
	}
	return t
}

// nominal returns an exchange at a rate that was not measured, with the profile's start-up time.
func nominal(p *hardware.Profile, rate float64) hardware.Exchange {
	return hardware.Exchange{Line: hardware.Line{Start: p.AllToAll.Start, PerMicrosecond: rate}}
}

// groupsOf returns the number of ranks, rounded up to whole groups.
func groupsOf(size, ranks int) int { return (ranks + size - 1) / size * size }

// slowest returns the exchange of the class of links with the lowest rate.
func (t *Topology) slowest() *hardware.Exchange {
	slow := &t.Links[0].Exchange
	for i := range t.Links[1:] {
		if exchange := &t.Links[1+i].Exchange; exchange.Rate() < slow.Rate() {
			slow = exchange
		}
	}
	return slow
}

// Exchange returns the time of an all-to-all with the given numbers of messages [from × to] and bytes per message. It
// is the time of the slowest class of links, which is the time of the rank that sends or receives most over it. Classes
// work concurrently, and all of them have their start-up time. Messages within a rank are free.
func (t *Topology) Exchange(messages []int, bytes float64) float64 {
	slowest := 0.0
	for class, link := range t.Links {
		slowest = max(slowest, link.Exchange.Microseconds(float64(t.busiest(messages, class))*bytes))
	}
	return slowest
}

// busiest returns the largest number of messages that a rank sends or receives over a class of links.
func (t *Topology) busiest(messages []int, class int) int {
	highest := 0
	group := t.Links[class].RanksPerGroup
	inner := 1
	if class > 0 {
		inner = t.Links[class-1].RanksPerGroup
	}
	for rank := range t.Ranks {
		sent, received := 0, 0
		first := rank / group * group
		for other := first; other < min(first+group, t.Ranks); other++ {
			if other/inner == rank/inner {
				continue
			}
			sent += messages[rank*t.Ranks+other]
			received += messages[other*t.Ranks+rank]
		}
		highest = max(highest, sent, received)
	}
	return highest
}
