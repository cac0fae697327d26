// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/server"
)

// FaultIgnoreMapAtDispatch injects a bug of an SGLang release: weights are loaded with the expert map, but tokens are
// dispatched without it.
const FaultIgnoreMapAtDispatch = "ignore-expert-map-at-dispatch"

// FaultIgnoreRank, followed by a route of server.RankRoutes, injects a bug that engines have on some routes: the engine
// ignores the rank in header and body, and selects one itself.
const FaultIgnoreRank = "ignore-rank:"

// FaultSlowExpertMap injects a slowdown if an expert map is used.
const FaultSlowExpertMap = "slow-expert-map"

// FaultSlowSteps, followed by a duration such as 50ms, injects a slowdown of each step by this duration, at most
// maxSlowStep.
const FaultSlowSteps = "slow-steps:"

// slowStep is the delay of each step with FaultSlowExpertMap.
const slowStep = 50 * time.Millisecond

// maxSlowStep is the maximum delay of each step.
const maxSlowStep = time.Minute

// Options are the command line options. They have the same meaning as in SGLang.
type Options struct {
	ModelPath string
	// LayoutAs is the model type as which a checkpoint of an unknown type runs. It is empty for the model's own type.
	LayoutAs string
	Host     string
	Port     int
	// CertFile and KeyFile are the PEM files for TLS; empty for plain text. As in SGLang, nodes other than 0 serve plain
	// text in any case.
	CertFile, KeyFile string
	// TPSize is the number of devices, DPSize the number of data-parallel attention ranks, and EPSize the number of
	// expert-parallel ranks.
	TPSize, DPSize, EPSize int
	EnableDPAttention      bool
	// Nodes is the number of processes of one engine. NodeRank is the number of this process: 0 serves, and the others
	// only belong to the group. They connect to DistInitAddr, host:port of node 0.
	Nodes, NodeRank int
	DistInitAddr    string
	// AllToAllBackend is one of AllToAllBackends. It has no effect, because ranks are logical. It is accepted so that
	// this engine starts with a command line for SGLang.
	AllToAllBackend string
	// InitExpertLocation is "trivial", the path of a .json file, or JSON; see locality.Parse.
	InitExpertLocation string
	RedundantExperts   int
	// DispatchAlgorithm is empty or DispatchStatic, which prefers a copy of an expert on the same rank.
	DispatchAlgorithm string
	// Getenv returns environment variables. With tensor-parallel attention, some of them name the plan whose tables
	// select the rank of each token in each layer (package shuffle).
	Getenv                    func(string) string
	EnableReturnRoutedExperts bool
	// Dialect selects the HTTP API of an engine and a release, one of server.Dialects. If it is empty, the API of the
	// reference engine is served.
	Dialect string
	// APIKeys are the keys of which requests must contain one as a bearer token; empty for none.
	APIKeys []string
	// EnableMetrics enables /metrics in dialects that disable it by default.
	EnableMetrics         bool
	ServedModelName       string
	MaxRunning, MaxQueued int
	ContextLength         int
	ChunkedPrefillSize    int
	Threads               int
	// Fault is empty, or an injected fault for tests of its detection: FaultIgnoreMapAtDispatch, FaultSlowExpertMap,
	// FaultSlowSteps with a duration, or FaultIgnoreRank with a route.
	Fault string
}

// Faults lists the values of Options.Fault. A value that ends with a colon is followed by a duration.
func Faults() []string {
	faults := []string{FaultIgnoreMapAtDispatch, FaultSlowExpertMap, FaultSlowSteps}
	for _, route := range server.RankRoutes {
		faults = append(faults, FaultIgnoreRank+route)
	}
	return faults
}

// stepDelay returns the delay of each step by the injected fault.
func (o Options) stepDelay() time.Duration {
	if o.Fault == FaultSlowExpertMap && o.InitExpertLocation != locality.Trivial {
		return slowStep
	}
	duration, _ := strings.CutPrefix(o.Fault, FaultSlowSteps)
	delay, _ := time.ParseDuration(duration) // Validate rejects invalid ones; other faults are no durations
	return delay
}

// AllToAllBackends are the all-to-all backends of SGLang. The first one is the default.
var AllToAllBackends = []string{"none", "deepep", "mooncake", "mori", "nixl", "flashinfer", "ascend_fuseep"}

// DispatchStatic is the dispatch algorithm of SGLang that prefers a copy on the same rank. This engine supports no
// other.
const DispatchStatic = "static"

// DefaultOptions returns the options of an engine of one rank.
func DefaultOptions() Options {
	return Options{
		Host: "127.0.0.1", Port: 30000, TPSize: 1, DPSize: 1, EPSize: 1, Nodes: 1, AllToAllBackend: AllToAllBackends[0], InitExpertLocation: locality.Trivial,
		MaxRunning: 64, MaxQueued: 1024, ChunkedPrefillSize: 512, Threads: runtime.GOMAXPROCS(0), Getenv: os.Getenv,
	}
}

// Validate validates the options as far as possible without the model.
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
	if duration, slow := strings.CutPrefix(o.Fault, FaultSlowSteps); slow {
		if delay, err := time.ParseDuration(duration); err != nil || delay <= 0 || delay > maxSlowStep {
			return checkpoint.Invalidf("--fault is %q; allowed after %s is a duration of at most %s, for example 50ms", o.Fault, FaultSlowSteps, maxSlowStep)
		}
	} else if o.Fault != "" && !slices.Contains(Faults(), o.Fault) {
		return checkpoint.Invalidf("--fault is %q; allowed is %s, or nothing", o.Fault, strings.Join(Faults(), ", "))
	}
	dialect, err := server.FindDialect(o.Dialect)
	if err != nil {
		return checkpoint.Invalidf("--dialect %v", err)
	}
	if len(o.APIKeys) > 0 && !dialect.HasKeys() {
		return checkpoint.Invalidf("--api-key is not supported by --dialect %s: this engine has no API keys", o.Dialect)
	}
	if (o.CertFile == "") != (o.KeyFile == "") {
		return checkpoint.Invalidf("--ssl-certfile is %q and --ssl-keyfile %q: give both, or neither", o.CertFile, o.KeyFile)
	}
	if slices.Contains(o.APIKeys, "") {
		return checkpoint.Invalidf("--api-key is empty: give a text, or leave the flag out")
	}
	return o.checkParallelism()
}

func (o Options) checkParallelism() error {
	switch {
	case o.TPSize != o.EPSize:
		return checkpoint.Invalidf("--tp-size %d and --ep-size %d differ: --tp-size counts the devices, and each holds a part of the experts, so both must be equal", o.TPSize, o.EPSize)
	case o.EnableDPAttention && o.DPSize != o.EPSize:
		return checkpoint.Invalidf("--dp-size %d and --ep-size %d differ: with --enable-dp-attention both must be equal, so that data-parallel rank d is expert-parallel rank d", o.DPSize, o.EPSize)
	case o.TPSize%o.Nodes != 0:
		return checkpoint.Invalidf("--tp-size %d is no multiple of --nnodes %d: every node has as many devices", o.TPSize, o.Nodes)
	case o.Nodes > 1 && o.DistInitAddr == "":
		return checkpoint.Invalidf("--dist-init-addr is missing: --nnodes %d needs the host:port of node 0", o.Nodes)
	case !o.EnableDPAttention && o.DPSize != 1:
		return checkpoint.Invalidf("--dp-size %d without --enable-dp-attention is not supported: add --enable-dp-attention or use --dp-size 1", o.DPSize)
	}
	return nil
}

// servedName returns the served model name. The default is the model path, as in SGLang.
func (o Options) servedName() string {
	if o.ServedModelName != "" {
		return o.ServedModelName
	}
	return o.ModelPath
}
