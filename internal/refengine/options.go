package refengine

import (
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/server"
)

// FaultIgnoreMapAtDispatch is a fault that SGLang has shipped: weights are loaded by the expert map, and tokens dispatched
// as if there were none.
const FaultIgnoreMapAtDispatch = "ignore-expert-map-at-dispatch"

// FaultIgnoreRank and a route of server.RankRoutes are a fault that engines have on some routes: header and body may name any rank, and the
// engine picks one.
const FaultIgnoreRank = "ignore-rank:"

// FaultSlowExpertMap is a fault of an engine that runs slower with an expert map than without one.
const FaultSlowExpertMap = "slow-expert-map"

// slowStep is by how much FaultSlowExpertMap delays each step.
const slowStep = 50 * time.Millisecond

// Options are those of the command line, with SGLang's meaning.
type Options struct {
	ModelPath string
	Host      string
	Port      int
	// TPSize counts the devices, DPSize the data-parallel ranks of attention, EPSize the expert-parallel ranks.
	TPSize, DPSize, EPSize int
	EnableDPAttention      bool
	// Nodes is the number of processes that one engine is spread over, NodeRank which of them this is: 0 serves, the others hold the
	// group together. They meet at DistInitAddr, host:port of node 0.
	Nodes, NodeRank int
	DistInitAddr    string
	// AllToAllBackend is one of AllToAllBackends. Ranks are logical, and nothing has to be sent: it is taken so that a command line of
	// SGLang's starts this engine, too.
	AllToAllBackend string
	// InitExpertLocation is "trivial", the path of a .json file, or JSON; see locality.Parse.
	InitExpertLocation string
	RedundantExperts   int
	// DispatchAlgorithm is empty or DispatchStatic: an activation is computed by a copy on its own rank where there is one.
	DispatchAlgorithm string
	// ShufflePlan is the directory of a plan whose placement and tables choose the rank of each token in each layer.
	ShufflePlan               string
	EnableReturnRoutedExperts bool
	// Dialect is the engine and the release whose HTTP surface is served, one of server.Dialects; empty for the reference engine's own.
	Dialect string
	// EnableMetrics serves /metrics in dialects that serve it only where they are asked to.
	EnableMetrics         bool
	ServedModelName       string
	MaxRunning, MaxQueued int
	ContextLength         int
	ChunkedPrefillSize    int
	Threads               int
	// Fault is empty, or FaultIgnoreMapAtDispatch, FaultSlowExpertMap or FaultIgnoreRank with a route, to test what notices it.
	Fault string
}

// Faults lists the values of Options.Fault.
func Faults() []string {
	faults := []string{FaultIgnoreMapAtDispatch, FaultSlowExpertMap}
	for _, route := range server.RankRoutes {
		faults = append(faults, FaultIgnoreRank+route)
	}
	return faults
}

// AllToAllBackends are those that SGLang knows; the first is its default.
var AllToAllBackends = []string{"none", "deepep", "mooncake", "mori", "nixl", "flashinfer", "ascend_fuseep"}

// DispatchStatic is SGLang's choice among copies that prefers one on the same rank, and the only one that this engine knows.
const DispatchStatic = "static"

// DefaultOptions returns the options of an engine of one rank.
func DefaultOptions() Options {
	return Options{
		Host: "127.0.0.1", Port: 30000, TPSize: 1, DPSize: 1, EPSize: 1, Nodes: 1, AllToAllBackend: AllToAllBackends[0], InitExpertLocation: locality.Trivial,
		MaxRunning: 64, MaxQueued: 1024, ChunkedPrefillSize: 512, Threads: runtime.GOMAXPROCS(0),
	}
}

// Validate checks what can be checked without the model.
func (o Options) Validate() error {
	if o.ModelPath == "" {
		return checkpoint.Invalidf("--model-path is missing: give the directory of the checkpoint")
	}
	for _, option := range []struct {
		name       string
		value      int
		least, top int
	}{
		{"--port", o.Port, 0, 65535},
		{"--tp-size", o.TPSize, 1, 1 << 16},
		{"--dp-size", o.DPSize, 1, 1 << 16},
		{"--ep-size", o.EPSize, 1, 1 << 16},
		{"--nnodes", o.Nodes, 1, 1 << 10},
		{"--node-rank", o.NodeRank, 0, o.Nodes - 1},
		{"--ep-num-redundant-experts", o.RedundantExperts, 0, 1 << 16},
		{"--max-running-requests", o.MaxRunning, 1, 1 << 16},
		{"--max-queued-requests", o.MaxQueued, 1, 1 << 24},
		{"--context-length", o.ContextLength, 0, 1 << 24},
		{"--chunked-prefill-size", o.ChunkedPrefillSize, 1, 1 << 16},
		{"--threads", o.Threads, 1, 1 << 10},
	} {
		if option.value < option.least || option.value > option.top {
			return checkpoint.Invalidf("%s is %d; allowed is %d to %d", option.name, option.value, option.least, option.top)
		}
	}
	if !slices.Contains(AllToAllBackends, o.AllToAllBackend) {
		return checkpoint.Invalidf("--moe-a2a-backend is %q; allowed is %s", o.AllToAllBackend, strings.Join(AllToAllBackends, ", "))
	}
	if o.DispatchAlgorithm != "" && o.DispatchAlgorithm != DispatchStatic {
		return checkpoint.Invalidf("--ep-dispatch-algorithm is %q; allowed is %s", o.DispatchAlgorithm, DispatchStatic)
	}
	if o.Fault != "" && !slices.Contains(Faults(), o.Fault) {
		return checkpoint.Invalidf("--fault is %q; allowed is %s, or nothing", o.Fault, strings.Join(Faults(), ", "))
	}
	if _, err := server.FindDialect(o.Dialect); err != nil {
		return checkpoint.Invalidf("--dialect %v", err)
	}
	return o.checkParallelism()
}

func (o Options) checkParallelism() error {
	switch {
	case o.ShufflePlan != "" && o.EnableDPAttention:
		return checkpoint.Invalidf("--shuffle-plan and --enable-dp-attention exclude each other: with the latter a request has one rank for all layers")
	case o.ShufflePlan != "" && (o.InitExpertLocation != locality.Trivial || o.RedundantExperts != 0):
		return checkpoint.Invalidf("--shuffle-plan says where experts are: leave --init-expert-location and --ep-num-redundant-experts out")
	case o.TPSize != o.EPSize:
		return checkpoint.Invalidf("--tp-size %d and --ep-size %d differ: --tp-size counts the devices, and each holds a part of the experts, so both must be equal", o.TPSize, o.EPSize)
	case o.EnableDPAttention && o.DPSize != o.EPSize:
		return checkpoint.Invalidf("--dp-size %d and --ep-size %d differ: with --enable-dp-attention both must be equal, so that data-parallel rank d is expert-parallel rank d", o.DPSize, o.EPSize)
	case o.TPSize%o.Nodes != 0:
		return checkpoint.Invalidf("--tp-size %d is no multiple of --nnodes %d: every node has as many devices", o.TPSize, o.Nodes)
	case o.Nodes > 1 && o.DistInitAddr == "":
		return checkpoint.Invalidf("--dist-init-addr is missing: with --nnodes %d it says where the nodes meet, host:port of node 0", o.Nodes)
	case !o.EnableDPAttention && o.DPSize != 1:
		return checkpoint.Invalidf("--dp-size %d without --enable-dp-attention is not supported: add --enable-dp-attention or use --dp-size 1", o.DPSize)
	}
	return nil
}

// servedName is the model path unless a name is given, as in SGLang.
func (o Options) servedName() string {
	if o.ServedModelName != "" {
		return o.ServedModelName
	}
	return o.ModelPath
}
