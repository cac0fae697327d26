package simulate

import (
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
)

// Link is a class of links: what two ranks exchange over that share a group of this size, and none of a smaller class.
type Link struct {
	// Name is for people.
	Name string
	// RanksPerGroup is the number of consecutive ranks that the links of the class join.
	RanksPerGroup int
	// Exchange is by the bytes that the busiest rank sends or receives over the class.
	Exchange hardware.Exchange
}

// Topology is how ranks are joined.
type Topology struct {
	// Name is for people.
	Name string
	// Ranks is the number of ranks.
	Ranks int
	// Links are the classes, from the smallest group to the one that joins all ranks.
	Links []Link
}

// Check names what cannot be.
func (t *Topology) Check() error {
	if t.Ranks < 1 {
		return fmt.Errorf("%d ranks; at least 1 is needed", t.Ranks)
	}
	before := 0
	for _, l := range t.Links {
		if l.RanksPerGroup <= before || before > 0 && l.RanksPerGroup%before != 0 {
			return fmt.Errorf("links %q join %d ranks; they must join a multiple of the %d that those before them join", l.Name, l.RanksPerGroup, before)
		}
		if err := l.Exchange.Check(); err != nil {
			return fmt.Errorf("links %q: %w", l.Name, err)
		}
		before = l.RanksPerGroup
	}
	if before < t.Ranks {
		return fmt.Errorf("the links join %d of %d ranks; the last ones must join all", before, t.Ranks)
	}
	return nil
}

// OneNode has all ranks on one node, joined as those that the profile was measured on.
func OneNode(ranks int, p *hardware.Profile) Topology {
	return Topology{Name: "one node", Ranks: ranks, Links: []Link{{"node", ranks, p.AllToAll}}}
}

const (
	// IslandRanks GPUs of a server without NVLink share a PCIe root: a rank exchanges 63 GB/s within it, which is PCIe 5.0 with 16 lanes, and
	// 20.8 GB/s with those beyond it. The second is what such servers are said to reach; nothing here has measured either.
	IslandRanks = 4
	// islandRate and crossingRate are in bytes per microsecond.
	islandRate, crossingRate = 63e3, 20.8e3
)

// Islands has islands of 4 ranks on PCIe. An exchange without bytes takes as long as on the profile's machines: it has not been measured on these.
func Islands(ranks int, p *hardware.Profile) Topology {
	t := Topology{Name: "PCIe islands", Ranks: ranks, Links: []Link{{"island", IslandRanks, nominal(p, islandRate)}}}
	if ranks > IslandRanks {
		t.Links = append(t.Links, Link{"between islands", groupsOf(IslandRanks, ranks), nominal(p, crossingRate)})
	}
	return t
}

// adapterRate is that of a 400 Gb/s adapter for each rank, at its nominal rate, in bytes per microsecond: dispatch kernels have been measured at
// 43 to 58 GB/s over such.
const adapterRate = 50e3

// Nodes has nodes of as many ranks, joined as those of the profile, with a 400 Gb/s adapter for each rank between them.
func Nodes(ranks, ranksPerNode int, p *hardware.Profile) Topology {
	t := Topology{Name: "nodes", Ranks: ranks, Links: []Link{{"node", ranksPerNode, p.AllToAll}}}
	if ranks > ranksPerNode {
		t.Links = append(t.Links, Link{"between nodes", groupsOf(ranksPerNode, ranks), nominal(p, adapterRate)})
	}
	return t
}

// nominal is an exchange at a rate that was not measured, and that starts as the profile's.
func nominal(p *hardware.Profile, rate float64) hardware.Exchange {
	return hardware.Exchange{Line: hardware.Line{Start: p.AllToAll.Start, PerMicrosecond: rate}}
}

// groupsOf is the number of ranks, rounded up to whole groups.
func groupsOf(size, ranks int) int { return (ranks + size - 1) / size * size }

// slowest is the exchange over the class of links with the lowest rate.
func (t *Topology) slowest() *hardware.Exchange {
	slow := &t.Links[0].Exchange
	for i := range t.Links[1:] {
		if exchange := &t.Links[1+i].Exchange; exchange.Rate() < slow.Rate() {
			slow = exchange
		}
	}
	return slow
}

// Exchange is the time of an all-to-all in which ranks send each other that many messages [from × to] of as many bytes each: of the
// slowest class of links, whose time is that of the rank which sends or receives most over them. Classes work at the same time, and
// all of them start. What stays on a rank costs nothing here.
func (t *Topology) Exchange(messages []int, bytes float64) float64 {
	slowest := 0.0
	for class, link := range t.Links {
		slowest = max(slowest, link.Exchange.Microseconds(float64(t.busiest(messages, class))*bytes))
	}
	return slowest
}

// busiest is the largest number of messages that a rank sends or receives over a class of links.
func (t *Topology) busiest(messages []int, class int) int {
	most := 0
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
		most = max(most, sent, received)
	}
	return most
}
