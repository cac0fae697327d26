// SPDX-License-Identifier: Apache-2.0

package cost_test

import (
	"math"
	"reflect"
	"testing"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/trace"
)

func TestLayerTime(t *testing.T) {
	model := trace.Model{TopK: 8, HiddenSize: 2048, Config: `{"moe_intermediate_size":768}`}
	l := cost.LayerOf(&model, machines, 8, 16)
	if l.ExpertSize != 768 || l.SlotsPerRank != 16 {
		t.Fatalf("%+v", l)
	}
	// 8,192 tokens of a rank at a local rate of .6 took 451 µs one way.
	if got := l.Time(8*8192, .4, 1).Exchange / 2; math.Abs(got/451-1) > 0.1 {
		t.Errorf("an exchange takes %.0f µs", got)
	}
	// 128 × 8 activations of 16 experts are 64 rows for each: up and down projection.
	weights := float64(16 * 2048 * 768)
	if got, want := l.Time(8*128, .4, 1).Compute, machines.Grouped.Microseconds(2*weights, 64)+machines.Grouped.Microseconds(weights, 64); math.Abs(got-want) > 1e-9 {
		t.Errorf("64 rows for each of 16 experts take %v µs; wanted are %v", got, want)
	}
	if none := l.Time(1, 0, 0).Compute; none != 2*machines.Grouped.Floor {
		t.Errorf("without an activation the kernels take %v µs; their floors are %v", none, 2*machines.Grouped.Floor)
	}
	local := l.LocalTime(16384)
	for _, slower := range []cost.LayerTime{l.Time(16384, .5, 1), l.Time(16384, 0, 1.5), l.Time(32768, 0, 1)} {
		if slower.Total() <= local.Total() {
			t.Errorf("%+v is faster than %+v", slower, local)
		}
	}
	report := cost.Report{MaxSend: .3, MaxRecv: .6, ExpertWindowImbalance: 1.2}
	if got := l.TimeOf(4096, &report); got != l.Time(4096, .6, 1.2) {
		t.Errorf("%+v: the busier of sending and receiving counts", got)
	}
	unknown := cost.LayerOf(&trace.Model{TopK: 8}, machines, 8, 16)
	if unknown.HiddenSize != 4096 || unknown.ExpertSize != 1536 {
		t.Errorf("%+v", unknown)
	}
	for config, want := range map[string]int64{
		`{"intermediate_size":20}`:                                    20,
		`{"intermediate_size":20,"moe_intermediate_size":[6,3]}`:      6,
		`{"intermediate_size":[20,20],"moe_intermediate_size":6}`:     6,
		`{"intermediate_size":20,"moe_intermediate_size":null}`:       20,
		`{"intermediate_size":20,"moe_intermediate_size":[]}`:         0,
		`{"intermediate_size":20,"moe_intermediate_size":{"text":6}}`: 0,
		`{"moe_intermediate_size":6,"limit":[0.0,Infinity]}`:          6,
		``: 0,
	} {
		if got := cost.ExpertWeights(&trace.Model{HiddenSize: 10, Config: config}); got != 3*10*want {
			t.Errorf("%d weights of an expert by %s; want those of width %d", got, config, want)
		}
	}
}

// Ranks of several nodes exchange over network cards, unless several nodes were measured.
func TestMachinesFollowTheProfile(t *testing.T) {
	p := *hardware.DefaultProfile()
	node := cost.MachinesOf(&p, 8, 8)
	if node.Nominal || node.Profile != hardware.Default || !reflect.DeepEqual(node.Link, p.AllToAll) {
		t.Errorf("a node is %+v; the profile has %+v", node.Link, p.AllToAll)
	}
	if e := node.Link.Fit.Error(); e < p.AllToAll.Fit.HeldOutMedianError || e > p.AllToAll.Fit.MaxError {
		t.Errorf("the error is %v; the median of held-out points is %v, the largest %v", e, p.AllToAll.Fit.HeldOutMedianError, p.AllToAll.Fit.MaxError)
	}
	nodes := cost.MachinesOf(&p, 16, 8)
	if !nodes.Nominal || nodes.Link.Rate() != 50e3 || nodes.Link.Start != p.AllToAll.Start || nodes.Link.Fit.Error() != 0.16 || nodes.Grouped.FlopsPerMicrosecond != p.Grouped.FlopsPerMicrosecond {
		t.Errorf("two nodes are %+v", nodes)
	}
	if ratio := cost.NodeMessage(&p); math.Abs(ratio-node.Link.Rate()/nodes.Link.Rate()) > 1e-12 {
		t.Errorf("a message to a node costs %v messages to a rank", ratio)
	}
	p.A2E = []hardware.Bipartite{{AttentionRanks: 4, ExpertRanks: 4, Exchange: node.Link}}
	if one := cost.Spread(&p, 8, 8); one != &p {
		t.Errorf("ranks of one node have another profile than it was measured for: %+v", one)
	}
	if two := cost.Spread(&p, 16, 8); !reflect.DeepEqual(two.AllToAll, nodes.Link) || !reflect.DeepEqual(*two.Between(4, 4), nodes.Link) || len(p.A2E) != 1 {
		t.Errorf("between two nodes ranks exchange as %+v, groups as %+v", two.AllToAll, two.Between(4, 4))
	}
	for name, of := range map[string]func(*hardware.Profile) hardware.Exchange{
		"all-reduce":     func(p *hardware.Profile) hardware.Exchange { return p.AllReduce },
		"reduce-scatter": func(p *hardware.Profile) hardware.Exchange { return p.ReduceScatter },
		"all-gather":     func(p *hardware.Profile) hardware.Exchange { return p.AllGather },
	} {
		one, two := of(&p), of(cost.Spread(&p, 16, 8))
		slower := (two.Microseconds(1e8) - two.Microseconds(9e7)) / (one.Microseconds(1e8) - one.Microseconds(9e7))
		if ratio := node.Link.Rate() / nodes.Link.Rate(); math.Abs(slower/ratio-1) > 1e-9 || two.Start != one.Start {
			t.Errorf("%s: bytes take %v times as long between two nodes, want %v", name, slower, ratio)
		}
	}
	slow := *hardware.DefaultProfile()
	slow.AllToAll = hardware.Exchange{Line: hardware.Line{Start: 20, PerMicrosecond: 24e3}}
	if nodes := cost.MachinesOf(&slow, 16, 8); nodes.Nominal || nodes.Link.Rate() != 24e3 || cost.Spread(&slow, 16, 8) != &slow {
		t.Errorf("ranks that exchange slowly within a node do so between nodes at %v", nodes.Link.Rate())
	}
	p.Ranks = 16
	if measured := cost.MachinesOf(&p, 16, 8); measured.Nominal || !reflect.DeepEqual(measured.Link, node.Link) {
		t.Errorf("sixteen ranks that were measured over nodes of eight are %+v", measured.Link)
	}
}

// A message to another node costs no less than one to another rank, however slow the exchange within a node is.
func TestNodeMessage(t *testing.T) {
	slow := *hardware.DefaultProfile()
	slow.AllToAll.PerMicrosecond = 10e3
	if usual := cost.NodeMessage(hardware.DefaultProfile()); usual < 5 || usual > 6 || cost.NodeMessage(&slow) != 1 {
		t.Errorf("%v, and %v on slow links", usual, cost.NodeMessage(&slow))
	}
}
