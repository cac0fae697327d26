// SPDX-License-Identifier: Apache-2.0

package cost_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// forced scores one rank with 1 and the others with 0: the scheduler has no choice, as long as the load allows it.
type forced struct {
	token   func(layer, position int) int
	request func(request int) int
}

func (f forced) score(dst []float32, rank int) {
	clear(dst)
	dst[rank] = 1
}

type forcedTokens struct{ forced }

func (f forcedTokens) Score(dst []float32, layer, position int) {
	f.score(dst, f.token(layer, position))
}

type forcedRequests struct{ forced }

func (f forcedRequests) Score(dst []float32, request int) { f.score(dst, f.request(request)) }

// machines are ranks of one node, as measured.
var machines = cost.NodeOf(hardware.DefaultProfile())

func options(tr *trace.Trace) cost.Options {
	return cost.Options{
		Requests: tr.AllRequests(), Seed: 1, BatchTokens: 64, Shards: cost.EqualShards, Policy: dispatch.Price, Cap: 1.15, Orders: 3,
		RanksPerNode: 2, Machines: machines, Weights: dispatch.DefaultWeights,
	}
}

// byHand returns a trace of four tokens in two requests, small enough to score on paper.
func byHand() (*trace.Trace, *placement.Placement) {
	tr := &trace.Trace{
		Model:  trace.Model{Experts: 4, TopK: 2, Vocabulary: 4, Layers: []int{1}, HiddenLayers: 2, HiddenSize: 1000},
		Tokens: []int32{0, 1, 2, 3}, Offsets: []int64{0, 2, 4}, Documents: []int32{0, 1},
		Experts: []uint16{0, 1, 0, 2, 2, 3, 3, 1},
	}
	// Rank 0 contains experts 0 and 2, rank 1 contains 1 and 3.
	return tr, &placement.Placement{Ranks: 2, Experts: 4, SlotsPerRank: 2, Layers: []placement.Layer{{Layer: 1, Slots: []int{0, 2, 1, 3}}}}
}

var approximately = cmpopts.EquateApprox(0, 1e-9)

func TestTensorParallelByHand(t *testing.T) {
	tr, p := byHand()
	own := []int{0, 0, 1, 1}
	o := options(tr)
	o.RanksPerNode = 1
	got, err := cost.TensorParallel(t.Context(), tr, p, forcedTokens{forced{token: func(_, position int) int { return own[position] }}}, o)
	if err != nil {
		t.Fatal(err)
	}
	// Local: one of {0,1}, both of {0,2}, one of {2,3}, both of {3,1}.
	one := 1.0
	// Each rank sends one activation and receives one; a fair share is four of eight.
	us := 2 * machines.Link.Microseconds(64/2*0.25*2*1000*2)
	want := cost.Report{
		LAR: 6. / 8, OracleLAR: 6. / 8, TokenImbalance: 1, TokenImbalanceMedian: 1, BatchImbalance: &one,
		ExpertImbalance: 1, ExpertWindowImbalance: 1, RemoteRanksPerToken: 0.5, RemoteNodesPerToken: 0.5, NodeLAR: 6. / 8, MaxSend: 0.25, MaxRecv: 0.25, ModelledUS: &us, Hardware: hardware.Default,
		PerLayer: []cost.LayerReport{{Layer: 1, LAR: 6. / 8, TokenImbalance: 1, ExpertImbalance: 1}},
	}
	if diff := cmp.Diff(want, got, approximately, cmpopts.IgnoreFields(cost.Report{}, "BaselineLAR", "UpperBound", "Gap")); diff != "" {
		t.Error(diff)
	}
}

func TestDataParallelByHand(t *testing.T) {
	tr, p := byHand()
	o := options(tr)
	o.RanksPerNode, o.Cap = 1, 10
	got, err := cost.DataParallel(t.Context(), tr, p, forcedRequests{forced{request: func(r int) int { return r }}}, o)
	if err != nil {
		t.Fatal(err)
	}
	if got.LAR != 0.75 || *got.WindowImbalance != 1 || got.BatchImbalance != nil || got.NodeLAR != 0.75 || got.RemoteRanksPerToken != 0.5 {
		t.Errorf("%+v", got)
	}
	// Over contiguous experts {0,1} and {2,3} request 0 has 3 of 4 activations on rank 0, request 1 has 3 of 4 on rank
	// 1.
	want := 0.0
	for order := range uint64(o.Orders) {
		if trace.Shuffled(o.Requests, o.Seed+order)[0] == 0 {
			want += 0.75 / float64(o.Orders)
		} else {
			want += 0.25 / float64(o.Orders)
		}
	}
	if math.Abs(got.BaselineLAR-want) > 1e-9 {
		t.Errorf("baseline %v; want %v", got.BaselineLAR, want)
	}
}

// TestGapByHand sends every token to rank 0, where {0,1}, {0,2}, {2,3} and {3,1} have 1, 2, 1 and 0 local activations.
// The best ranks have 1, 2, 1 and 2. Each request has 3 activations on one rank and 1 on the other.
func TestGapByHand(t *testing.T) {
	tr, p := byHand()
	zero := forced{token: func(int, int) int { return 0 }, request: func(int) int { return 0 }}
	for _, shards := range []cost.ShardRule{cost.FreeShards, cost.EqualShards} {
		o := options(tr)
		o.Shards = shards
		got, err := cost.TensorParallel(t.Context(), tr, p, forcedTokens{zero}, o)
		if err != nil {
			t.Fatal(err)
		}
		want := &cost.Gap{Placement: got.UpperBound - 6./8, Forecast: 2. / 8, Balance: 4./8 - got.LAR}
		if diff := cmp.Diff(want, got.Gap, approximately); diff != "" {
			t.Errorf("%s: %s", shards, diff)
		}
		if shards == cost.FreeShards && math.Abs(got.Gap.Balance) > 1e-9 {
			t.Errorf("free shards of four tokens give up %v for balance", got.Gap.Balance)
		}
	}
	o := options(tr)
	got, err := cost.DataParallel(t.Context(), tr, p, forcedRequests{zero}, o)
	if err != nil {
		t.Fatal(err)
	}
	want := &cost.Gap{Placement: got.LAR + got.Gap.Placement + got.Gap.Forecast + got.Gap.Balance - 6./8, Forecast: 2. / 8, Balance: 4./8 - got.LAR}
	if diff := cmp.Diff(want, got.Gap, approximately); diff != "" {
		t.Error(diff)
	}
	o.WithoutBounds = true
	if got, err = cost.DataParallel(t.Context(), tr, p, forcedRequests{zero}, o); err != nil || got.Gap != nil {
		t.Errorf("without bounds: gap %+v, error %v", got.Gap, err)
	}
}

// naive is an independent, slow count with maps instead of incremental sums.
func naive(tr *trace.Trace, p *placement.Placement, layer int, positions []int, perNode int, own func(position int) int) (lar, remoteRanks, remoteNodes float64) {
	local, all, distinct, distinctNodes := 0, 0, 0, 0
	for _, position := range positions {
		elsewhere, nodes := map[int]bool{}, map[int]bool{}
		for _, expert := range tr.Row(position, layer) {
			all++
			here, other := false, -1
			for slot, e := range p.Layers[layer].Slots {
				if e == int(expert) {
					if slot/p.SlotsPerRank == own(position) {
						here = true
					}
					other = slot / p.SlotsPerRank
				}
			}
			if here {
				local++
			} else {
				elsewhere[other] = true
				nodes[other/perNode] = true
			}
		}
		delete(nodes, own(position)/perNode)
		distinct += len(elsewhere)
		distinctNodes += len(nodes)
	}
	n := float64(len(positions))
	return float64(local) / float64(all), float64(distinct) / n, float64(distinctNodes) / n
}

func randomPlacement(tr *trace.Trace, ranks int, random *rand.Rand) *placement.Placement {
	p := placement.Contiguous(tr.Model.Layers, tr.Model.Experts, ranks)
	for _, layer := range p.Layers {
		random.Shuffle(len(layer.Slots), func(i, j int) { layer.Slots[i], layer.Slots[j] = layer.Slots[j], layer.Slots[i] })
	}
	return p
}

func FuzzCountsAgreeWithANaiveCount(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(seed, uint8(seed%4), uint8(seed*40))
	}
	f.Fuzz(func(t *testing.T, seed uint64, size, noise uint8) {
		shape := tracetest.Small
		shape.Noise = int(noise) % 101
		tr := tracetest.Generate(shape, seed)
		random := rand.New(rand.NewPCG(seed, 1))
		ranks := []int{1, 2, 4, 16}[size%4]
		p := randomPlacement(tr, ranks, random)
		o := options(tr)
		o.Orders = 1
		table := make([]float32, tr.Requests()*ranks)
		for i := range table {
			table[i] = random.Float32()
		}
		recorder := &recordingForecast{table: table, ranks: ranks}
		report, err := cost.DataParallel(t.Context(), tr, p, recorder, o)
		if err != nil {
			t.Fatal(err)
		}
		checkInvariants(t, report, ranks)
		// Replay the scheduler to learn the ranks, then count them again.
		scheduler, err := dispatch.NewScheduler(dispatch.Options{
			Policy: o.Policy, Ranks: ranks, Cap: o.Cap, Weights: o.Weights, Costs: cost.ShapeOf(&tr.Model).Costs(o.Machines),
		})
		if err != nil {
			t.Fatal(err)
		}
		own := make([]int, len(tr.Tokens))
		var positions []int
		for _, r := range trace.Shuffled(o.Requests, o.Seed) {
			places := make([]dispatch.Place, ranks)
			for rank := range places {
				places[rank] = dispatch.Place{Rank: rank, Outstanding: int64(scheduler.Load(rank))}
			}
			request := dispatch.Request{Scores: table[r*ranks : (r+1)*ranks], Tokens: tr.Length(r)}
			decision := scheduler.Decide(&request, places)
			scheduler.Take(&request, &decision)
			rank := decision.Rank
			for position := int(tr.Offsets[r]); position < int(tr.Offsets[r+1]); position++ {
				own[position] = rank
				positions = append(positions, position)
			}
		}
		sumLAR, sumRemote, sumNodes := 0.0, 0.0, 0.0
		for l, layer := range report.PerLayer {
			lar, remote, nodes := naive(tr, p, l, positions, o.RanksPerNode, func(position int) int { return own[position] })
			if math.Abs(lar-layer.LAR) > 1e-9 {
				t.Fatalf("layer %d: local activation rate %v; counted naively %v", l, layer.LAR, lar)
			}
			sumLAR, sumRemote, sumNodes = sumLAR+lar/3, sumRemote+remote/3, sumNodes+nodes/3
		}
		if math.Abs(sumLAR-report.LAR) > 1e-9 || math.Abs(sumRemote-report.RemoteRanksPerToken) > 1e-9 || math.Abs(sumNodes-report.RemoteNodesPerToken) > 1e-9 {
			t.Fatalf("%+v; counted naively %v, %v remote ranks, %v nodes", report, sumLAR, sumRemote, sumNodes)
		}
	})
}

type recordingForecast struct {
	table []float32
	ranks int
}

func (f *recordingForecast) Score(dst []float32, request int) {
	copy(dst, f.table[request*f.ranks:(request+1)*f.ranks])
}

type randomTokens struct{ ranks int }

func (f randomTokens) Score(dst []float32, layer, position int) {
	random := rand.New(rand.NewPCG(uint64(layer), uint64(position)))
	for i := range dst {
		dst[i] = random.Float32()
	}
}

// checkInvariants checks the invariants of every report.
func checkInvariants(t *testing.T, r cost.Report, ranks int) {
	t.Helper()
	if r.LAR > r.OracleLAR+1e-9 || r.OracleLAR > r.UpperBound+1e-9 || r.UpperBound > 1+1e-9 {
		t.Errorf("lar %v, oracle %v, bound %v; want them to ascend", r.LAR, r.OracleLAR, r.UpperBound)
	}
	if r.Gap.Placement < -1e-9 || r.Gap.Forecast < -1e-9 || r.LAR+r.Gap.Placement+r.Gap.Forecast+r.Gap.Balance < r.UpperBound-1e-9 {
		t.Errorf("lar %v, bound %v, gap %+v; want parts that add up to at least their distance", r.LAR, r.UpperBound, *r.Gap)
	}
	if r.NodeLAR < r.LAR-1e-9 || r.MaxSend < 1-r.LAR-1e-9 || r.MaxRecv < 1-r.LAR-1e-9 {
		t.Errorf("lar %v, node %v, send %v, receive %v", r.LAR, r.NodeLAR, r.MaxSend, r.MaxRecv)
	}
	for name, imbalance := range map[string]float64{
		"token": r.TokenImbalance, "median": r.TokenImbalanceMedian, "expert": r.ExpertImbalance, "expert window": r.ExpertWindowImbalance,
	} {
		if imbalance < 1-1e-9 || name != "median" && imbalance > float64(ranks)+1e-9 {
			t.Errorf("%s imbalance is %v", name, imbalance)
		}
	}
}

func TestTensorParallelOnEveryShape(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 4)
	random := rand.New(rand.NewPCG(1, 1))
	for _, ranks := range []int{1, 2, 8} {
		for _, shards := range []cost.ShardRule{cost.EqualShards, cost.FreeShards} {
			o := options(tr)
			o.Shards = shards
			report, err := cost.TensorParallel(t.Context(), tr, randomPlacement(tr, ranks, random), randomTokens{ranks}, o)
			if err != nil {
				t.Fatal(err)
			}
			checkInvariants(t, report, ranks)
			if shards == cost.EqualShards && *report.BatchImbalance > 1.05 {
				t.Errorf("EP %d: equal shards have batch imbalance %v", ranks, *report.BatchImbalance)
			}
			if math.Abs(report.BaselineLAR-1/float64(ranks)) > 0.05 {
				t.Errorf("EP %d: baseline %v", ranks, report.BaselineLAR)
			}
		}
	}
}

// TestRankCapacity gives half of the tokens to one of four ranks: they are assigned there, and imbalance is relative to
// this share.
func TestRankCapacity(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 4)
	p := randomPlacement(tr, 4, rand.New(rand.NewPCG(2, 2)))
	o := options(tr)
	o.RankCapacity = []float64{1, 3, 1, 1}
	report, err := cost.TensorParallel(t.Context(), tr, p, randomTokens{4}, o)
	if err != nil {
		t.Fatal(err)
	}
	checkInvariants(t, report, 4)
	if report.TokenImbalance > 1.05 || *report.BatchImbalance > 1.2 {
		t.Errorf("token imbalance %v, in batches %v, relative to the ranks' shares", report.TokenImbalance, *report.BatchImbalance)
	}
	for _, o.Policy = range dispatch.Policies {
		report, err := cost.DataParallel(t.Context(), tr, p, forcedRequests{forced{request: func(r int) int { return r % 4 }}}, o)
		if o.Policy.Weighs() != (err == nil) {
			t.Errorf("%s: error %v", o.Policy, err)
		}
		if err == nil && report.TokenImbalance > 1.5 {
			t.Errorf("%s: token imbalance %v relative to the ranks' shares", o.Policy, report.TokenImbalance)
		}
	}
	o.RankCapacity = []float64{1, 2}
	if _, err := cost.TensorParallel(t.Context(), tr, p, randomTokens{4}, o); err == nil || !strings.Contains(err.Error(), "2 rank capacities for 4 ranks") {
		t.Errorf("error %v", err)
	}
}

func TestEveryPolicyIsScored(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 4)
	p := placement.Contiguous(tr.Model.Layers, tr.Model.Experts, 4)
	for _, policy := range dispatch.Policies {
		o := options(tr)
		o.Policy = policy
		report, err := cost.DataParallel(t.Context(), tr, p, forcedRequests{forced{request: func(r int) int { return r % 4 }}}, o)
		if err != nil {
			t.Fatal(err)
		}
		checkInvariants(t, report, 4)
		if policy == dispatch.RoundRobin && math.Abs(report.LAR-report.BaselineLAR) > 1e-9 {
			t.Errorf("contiguous with round-robin has %v, the baseline %v", report.LAR, report.BaselineLAR)
		}
	}
}

func TestAnyCopyOnTheRankCounts(t *testing.T) {
	tr, _ := byHand()
	// Both ranks contain all experts.
	p := &placement.Placement{Ranks: 2, Experts: 4, SlotsPerRank: 4, Layers: []placement.Layer{{Layer: 1, Slots: []int{0, 1, 2, 3, 3, 2, 1, 0}}}}
	tensor, err := cost.TensorParallel(t.Context(), tr, p, randomTokens{2}, options(tr))
	if err != nil {
		t.Fatal(err)
	}
	data, err := cost.DataParallel(t.Context(), tr, p, forcedRequests{forced{request: func(r int) int { return r }}}, options(tr))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []cost.Report{tensor, data} {
		if r.LAR != 1 || r.OracleLAR != 1 || r.UpperBound != 1 || r.RemoteRanksPerToken != 0 || r.MaxSend != 0 {
			t.Errorf("%+v", r)
		}
	}
}

func TestRemoteCopiesAreUsedRoundRobin(t *testing.T) {
	tr := tracetest.Generate(tracetest.Shape{
		Experts: 2, TopK: 1, Layers: 1, Vocabulary: 4, Domains: 1, DocumentsPerDomain: 2, RequestsPerDocument: 10, TokensPerRequest: 50, Noise: 100,
	}, 1)
	for i := range tr.Experts {
		tr.Experts[i] = 0
	}
	// Expert 0 is on ranks 0 and 1. All tokens are on rank 2, on a different node.
	p := &placement.Placement{Ranks: 3, Experts: 2, SlotsPerRank: 1, Layers: []placement.Layer{{Layer: 1, Slots: []int{0, 0, 1}}}}
	o := options(tr)
	o.Cap = 100
	report, err := cost.DataParallel(t.Context(), tr, p, forcedRequests{forced{request: func(int) int { return 2 }}}, o)
	if err != nil {
		t.Fatal(err)
	}
	// Prices send some requests to ranks 0 and 1; of the rest both copies serve half.
	if report.ExpertImbalance > 1.8 {
		t.Errorf("expert imbalance %v: one copy does all the work", report.ExpertImbalance)
	}
}

func TestModelledTimeFallsWithLocality(t *testing.T) {
	tr, p := byHand()
	local := func(_, position int) int { return []int{0, 0, 1, 1}[position] }
	remote := func(layer, position int) int { return 1 - local(layer, position) }
	var us []float64
	for _, own := range []func(layer, position int) int{local, remote} {
		report, err := cost.TensorParallel(t.Context(), tr, p, forcedTokens{forced{token: own}}, options(tr))
		if err != nil {
			t.Fatal(err)
		}
		us = append(us, *report.ModelledUS)
	}
	if us[0] >= us[1] {
		t.Errorf("local %v µs, remote %v µs", us[0], us[1])
	}
	tr.Model.HiddenSize = 0
	report, err := cost.TensorParallel(t.Context(), tr, p, forcedTokens{forced{token: local}}, options(tr))
	if err != nil || report.ModelledUS != nil {
		t.Errorf("without a hidden size: %v µs, error %v", report.ModelledUS, err)
	}
}

func TestEvaluationRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*cost.Options, *placement.Placement, *trace.Trace)
		want   string
	}{
		"no requests":     {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.Requests = nil }, "no request"},
		"no batch":        {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.BatchTokens = 0 }, "batch tokens is 0"},
		"no node":         {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.RanksPerNode = 0 }, "ranks per node is 0"},
		"no order":        {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.Orders = 0 }, "orders is 0"},
		"score percent":   {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.ScorePercent = 101 }, "score percent is 101"},
		"partial scores":  {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.ScorePercent = 10 }, "cannot score a part"},
		"cache tokens":    {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.CacheTokens = -1 }, "cache tokens is -1"},
		"no policy":       {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.Policy = "" }, "allowed is price"},
		"bad placement":   {func(_ *cost.Options, p *placement.Placement, _ *trace.Trace) { p.Layers[0].Slots[0] = 9 }, "expert 9"},
		"other experts":   {func(_ *cost.Options, _ *placement.Placement, tr *trace.Trace) { tr.Model.Experts = 5 }, "the placement has 4 experts"},
		"other layers":    {func(_ *cost.Options, _ *placement.Placement, tr *trace.Trace) { tr.Model.Layers = []int{0} }, "is layer 1 of the model"},
		"unknown to both": {func(o *cost.Options, _ *placement.Placement, _ *trace.Trace) { o.BatchTokens = -5 }, "batch tokens is -5"},
	} {
		tr, p := byHand()
		o := options(tr)
		test.change(&o, p, tr)
		_, err := cost.DataParallel(t.Context(), tr, p, forcedRequests{forced{request: func(int) int { return 0 }}}, o)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	tr, p := byHand()
	o := options(tr)
	o.Shards = "some"
	if _, err := cost.TensorParallel(t.Context(), tr, p, randomTokens{2}, o); err == nil || !strings.Contains(err.Error(), "allowed is equal, free") {
		t.Errorf("error %v", err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := cost.TensorParallel(cancelled, tr, p, randomTokens{2}, options(tr)); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v; want that of the context", err)
	}
}

// Ranks cache computed prefixes. Figures count the other tokens, and Reuse contains the figures without caching.
func TestCachedTokensAreNotCounted(t *testing.T) {
	shape := tracetest.Small
	shape.RequestsPerDocument, shape.TokensPerRequest = 3, 400
	from := tracetest.Generate(shape, 5)
	p := randomPlacement(from, 4, rand.New(rand.NewPCG(6, 6)))
	for _, w := range []trace.Workload{trace.SharedPrefix, trace.MultiTurn} {
		tr, requests := w.Build(from, from.AllRequests(), 1)
		o := options(tr)
		o.Requests, o.Workload, o.ScorePercent = requests, w, 10
		forecast := partialForced{forcedRequests{forced{request: func(r int) int { return int(tr.Domains[r]) % 4 }}}, tr}
		hits := map[dispatch.Policy]float64{}
		for _, o.Policy = range dispatch.Policies {
			report, err := cost.DataParallel(t.Context(), tr, p, forecast, o)
			if o.Policy == dispatch.Late && w == trace.MultiTurn {
				if err == nil || !strings.Contains(err.Error(), "may reorder the turns of a conversation") {
					t.Errorf("%s, %s: error %v", w, o.Policy, err)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			reuse := report.Reuse
			if reuse == nil || reuse.PrefixHitTokens <= 0 || reuse.PrefixHitTokens >= 1 || reuse.AllTokensLAR <= 0 || reuse.AllTokensWindowImbalance < 1 {
				t.Fatalf("%s, %s: %+v", w, o.Policy, reuse)
			}
			if report.OracleLAR != 0 || report.UpperBound != 0 || report.LAR <= 0 || report.LAR >= 1 {
				t.Errorf("%s, %s: lar %v, oracle %v, bound %v", w, o.Policy, report.LAR, report.OracleLAR, report.UpperBound)
			}
			if partial := report.PartialScores; partial == nil || partial.Percent != 10 || partial.RestLAR <= 0 || partial.WindowImbalance < 1 {
				t.Errorf("%s, %s: partial scores %+v", w, o.Policy, partial)
			}
			if (report.Decision == nil) != (o.Policy == dispatch.Window) {
				t.Errorf("%s, %s: decision %+v", w, o.Policy, report.Decision)
			}
			hits[o.Policy] = reuse.PrefixHitTokens
		}
		if hits[dispatch.Price] <= hits[dispatch.RoundRobin] || hits[dispatch.Prefix] <= hits[dispatch.RoundRobin] {
			t.Errorf("%s: hits %v; want those of price and prefix above those of round-robin", w, hits)
		}
		o.Policy, o.CacheTokens = dispatch.Price, dispatch.PrefixBlock
		small, err := cost.DataParallel(t.Context(), tr, p, forecast, o)
		if err != nil || small.Reuse.PrefixHitTokens >= hits[dispatch.Price] {
			t.Errorf("%s: caches of one block hit %+v, %v", w, small.Reuse, err)
		}
	}
}

// partialForced scores a part of a request like the whole request.
type partialForced struct {
	forcedRequests
	of *trace.Trace
}

func (f partialForced) ScoreFirst(dst []float32, request, tokens int) {
	if tokens < 1 || tokens > f.of.Length(request) {
		panic("a part of a request that it does not have")
	}
	f.Score(dst, request)
}

// The costs of DeepSeek-V3 and of a model without known sizes.
func TestCostsByHand(t *testing.T) {
	near := func(got, want float64) bool { return math.Abs(got-want) < 1e-6*want }
	known := cost.Shape{MoELayers: 58, TopK: 8, HiddenSize: 7168, ActiveParameters: 37e9}.Costs(machines)
	if !near(known.Exchange, 58*8*7168*2*2/machines.Link.Rate()) || !near(known.Compute, 2*37e9/machines.Grouped.FlopsPerMicrosecond) {
		t.Errorf("costs %+v", known)
	}
	if unknown := (cost.Shape{}).Costs(machines); !near(unknown.Exchange, 8*4096*4/machines.Link.Rate()) || !near(unknown.Compute, 2*12*4096*4096/machines.Grouped.FlopsPerMicrosecond) {
		t.Errorf("costs of an unknown model %+v", unknown)
	}
	model := trace.Model{Layers: []int{1, 2}, HiddenLayers: 3, HiddenSize: 10, TopK: 4, Config: `{"intermediate_size":30,"moe_intermediate_size":5,"n_shared_experts":1}`}
	if got := cost.ShapeOf(&model).ActiveParameters; got != 3*4*100+3*10*30+2*3*10*5*5 {
		t.Errorf("%d active parameters", got)
	}
	model.Config = `{"intermediate_size":30,"moe_intermediate_size":[5,2],"n_shared_experts":1,"scale":NaN}`
	if got := cost.ShapeOf(&model).ActiveParameters; got != 3*4*100+3*10*30+2*3*10*5*5 {
		t.Errorf("%d active parameters, of experts in two sizes", got)
	}
	for _, config := range []string{`not json`, `{"intermediate_size":1e18}`, `{"moe_intermediate_size":5,"n_shared_experts":-1e9}`} {
		model.Config = config
		if got := cost.ShapeOf(&model).ActiveParameters; got != 0 {
			t.Errorf("%d active parameters by the configuration %s", got, config)
		}
	}
}

// The memory for bounds has one number for each request and rank, and a row of some layers at a time, not one number
// for each request, layer and expert.
func TestBoundsOfManyShortRequestsAreSmall(t *testing.T) {
	const experts, layers, requests = 128, 10, 20_000
	random := rand.New(rand.NewPCG(1, 1))
	tr := &trace.Trace{Offsets: []int64{0}, Model: trace.Model{Experts: experts, TopK: 1, Vocabulary: 1, HiddenLayers: layers}}
	for l := range layers {
		tr.Model.Layers = append(tr.Model.Layers, l)
	}
	for r := range requests {
		tr.Tokens, tr.Documents = append(tr.Tokens, 0), append(tr.Documents, int32(r))
		tr.Offsets = append(tr.Offsets, int64(len(tr.Tokens)))
		for range layers {
			tr.Experts = append(tr.Experts, uint16(random.IntN(experts)))
		}
	}
	p := placement.Contiguous(tr.Model.Layers, experts, 4)
	forecast := forcedRequests{forced{request: func(r int) int { return r % 4 }}}
	allocated := func(o cost.Options) uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := cost.DataParallel(t.Context(), tr, p, forecast, o); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	o := options(tr)
	o.Orders = 1
	with := allocated(o)
	o.WithoutBounds = true
	if bounds, dense := int64(with)-int64(allocated(o)), int64(requests*layers*experts*4); bounds > dense/4 {
		t.Errorf("bounds take %d bytes; counts of all requests are %d", bounds, dense)
	}
}
