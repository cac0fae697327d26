// SPDX-License-Identifier: Apache-2.0

// Command engines is a test double of SGLang, vLLM, vllm-ascend and TensorRT-LLM: the reference engine with the command
// line and the HTTP API of a release.
//
//	engines vllm-0.22.0 vllm serve MODEL --data-parallel-size 2 ...
//
// The directory flags contains the flags of each release, rules.go the arguments with which a release fails at start,
// and internal/refengine/server the HTTP API.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/sglang"
	"github.com/semmoe/operator/internal/engine/trtllm"
	"github.com/semmoe/operator/internal/engine/vllmascend"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/refengine/server"
)

// usageStatus is the exit status of argparse and click for invalid arguments.
const usageStatus = 2

// usageError is an error in parsing the arguments.
type usageError struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		if errors.As(err, &usageError{}) {
			os.Exit(usageStatus)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return usageError{fmt.Errorf("usage: engines DIALECT COMMAND...: the dialects are %s", strings.Join(server.Dialects(), ", "))}
	}
	o, err := options(args[0], args[1:])
	if err != nil {
		return err
	}
	return refengine.Run(ctx, o)
}

// surface describes how an engine is started, and how its arguments are converted to options of the reference engine.
type surface struct {
	commands        [][]string
	click, flexible bool
	options         func(*arguments) (refengine.Options, error)
}

var surfaces = map[string]surface{
	"sglang":       {commands: [][]string{{"python3", "-m", "sglang.launch_server"}}, options: sglangOptions},
	"vllm":         {commands: [][]string{{"vllm", "serve"}}, flexible: true, options: vllmOptions},
	"vllm-ascend":  {commands: [][]string{{"vllm", "serve"}}, flexible: true, options: ascendOptions},
	"tensorrt-llm": {commands: [][]string{{"trtllm-serve", "serve"}, {"trtllm-serve"}}, click: true, options: trtllmOptionsOf},
}

// options converts the command line of an engine to options of the reference engine. It returns the engine's error for
// a command line that the engine rejects.
func options(dialect string, command []string) (refengine.Options, error) {
	none := refengine.Options{}
	d, err := server.FindDialect(dialect)
	if err != nil || dialect == "" {
		return none, usageError{fmt.Errorf("dialect %w", err)}
	}
	name := strings.TrimSuffix(dialect, "-"+d.Release.String())
	s := surfaces[name]
	at := slices.IndexFunc(s.commands, func(c []string) bool { return len(command) >= len(c) && slices.Equal(command[:len(c)], c) })
	if at < 0 {
		return none, usageError{fmt.Errorf("command %v does not start engine %s", command, name)}
	}
	line, err := readCommandLine(list(dialect), s.click, s.flexible)
	if err != nil {
		return none, err
	}
	a, err := line.parse(command[len(s.commands[at]):])
	if err != nil {
		return none, usageError{err}
	}
	if err := checkRules(name, d.Release, a); err != nil {
		return none, err
	}
	o, err := s.options(a)
	o.Dialect, o.Threads = dialect, 1
	return o, err
}

// list returns the name of the flag list of a dialect. vllm-ascend has the flags of vLLM.
func list(dialect string) string {
	if release, ok := strings.CutPrefix(dialect, "vllm-ascend-"); ok {
		return "vllm-" + release
	}
	return dialect
}

func sglangOptions(a *arguments) (refengine.Options, error) {
	o := refengine.DefaultOptions()
	if len(a.rest) > 0 {
		return o, usageError{fmt.Errorf("unrecognized arguments: %s", strings.Join(a.rest, " "))}
	}
	if !a.given("--model-path") {
		return o, usageError{errors.New("the following arguments are required: --model-path/--model")}
	}
	o.ModelPath = a.text("--model-path", "")
	o.ServedModelName, o.Host, o.Port = a.text("--served-model-name", ""), a.text("--host", o.Host), a.number("--port", o.Port)
	o.TPSize, o.DPSize, o.EPSize = a.number("--tp-size", 1), a.number("--dp-size", 1), a.number("--ep-size", 1)
	o.EnableDPAttention = a.given("--enable-dp-attention") && o.DPSize > 1
	o.Nodes, o.NodeRank, o.DistInitAddr = a.number("--nnodes", 1), a.number("--node-rank", 0), a.text("--dist-init-addr", "")
	o.InitExpertLocation, o.RedundantExperts = a.text("--init-expert-location", o.InitExpertLocation), a.number("--ep-num-redundant-experts", 0)
	o.EnableReturnRoutedExperts, o.EnableMetrics = a.given("--enable-return-routed-experts"), a.given("--enable-metrics")
	o.ContextLength, o.MaxRunning = a.number("--context-length", 0), a.number("--max-running-requests", o.MaxRunning)
	o.APIKeys, o.CertFile, o.KeyFile = a.texts("--api-key"), a.text("--ssl-certfile", ""), a.text("--ssl-keyfile", "")
	return o, nil
}

// rpcPort is the default of --data-parallel-rpc-port.
const rpcPort = 29550

func vllmOptions(a *arguments) (refengine.Options, error) {
	o := refengine.DefaultOptions()
	if len(a.rest) != 1 {
		return o, usageError{fmt.Errorf("unrecognized arguments: want one model, got %v", a.rest)}
	}
	o.ModelPath = a.rest[0]
	o.ServedModelName, o.Host, o.Port = a.text("--served-model-name", ""), a.text("--host", "0.0.0.0"), a.number("--port", 8000)
	tensor, data := a.number("--tensor-parallel-size", 1), a.number("--data-parallel-size", 1)
	if !a.given("--enable-expert-parallel") || tensor > 1 && data > 1 || a.text("--expert-placement-strategy", "linear") != "linear" {
		return o, errors.New("this double supports only expert parallelism with either tensor or data parallel attention, and linear expert placement")
	}
	o.TPSize, o.EPSize, o.DPSize, o.EnableDPAttention = tensor*data, tensor*data, data, data > 1
	o.Nodes, o.NodeRank = a.number("--nnodes", 1), a.number("--node-rank", 0)
	if o.Nodes > 1 {
		o.DistInitAddr = net.JoinHostPort(a.text("--master-addr", "127.0.0.1"), strconv.Itoa(rpcPort))
		fmt.Printf("Inferred data_parallel_rank %d from node_rank %d\n", o.NodeRank*(data/o.Nodes), o.NodeRank)
	}
	o.EnableReturnRoutedExperts = a.given("--enable-return-routed-experts")
	o.ContextLength, o.MaxRunning = a.number("--max-model-len", 0), a.number("--max-num-seqs", o.MaxRunning)
	o.APIKeys, o.CertFile, o.KeyFile = a.texts("--api-key"), a.text("--ssl-certfile", ""), a.text("--ssl-keyfile", "")
	return o, nil
}

func ascendOptions(a *arguments) (refengine.Options, error) {
	o, err := vllmOptions(a)
	if err != nil {
		return o, err
	}
	config, err := a.object("--additional-config")
	if err != nil {
		return o, err
	}
	eplb, _ := config["eplb_config"].(map[string]any)
	if path, ok := eplb["expert_map_path"].(string); ok {
		err = setMap(vllmascend.Adapter().ExpertMap, path, &o)
	}
	return o, err
}

func trtllmOptionsOf(a *arguments) (refengine.Options, error) {
	o := refengine.DefaultOptions()
	if len(a.rest) != 1 {
		return o, usageError{fmt.Errorf("want one MODEL, got %v", a.rest)}
	}
	extra, err := readOptionsFile(a)
	if err != nil {
		return o, err
	}
	o.ModelPath = a.rest[0]
	o.ServedModelName, o.Host, o.Port = a.text("--served_model_name", ""), a.text("--host", "localhost"), a.number("--port", 8000)
	o.TPSize, o.EPSize = a.number("--tp_size", 1), a.number("--ep_size", 1)
	if o.EnableDPAttention = extra.AttentionDP || a.given("--enable_attention_dp"); o.EnableDPAttention {
		o.DPSize = o.TPSize
	}
	o.ContextLength = a.number("--max_seq_len", 0)
	if path, ok := extra.MoE.LoadBalancer.(string); ok {
		err = setMap(trtllm.Adapter().ExpertMap, path, &o)
	}
	return o, err
}

// maxMapBytes is the maximum size of an expert map.
const maxMapBytes = 64 << 20

// setMap converts an engine's expert map to the format of the reference engine.
func setMap(from *engine.ExpertMap, path string, o *refengine.Options) error {
	text, err := regularfile.Read(path, maxMapBytes)
	if err != nil {
		return err
	}
	model, err := checkpoint.Open(o.ModelPath)
	if err != nil {
		return err
	}
	defer model.Close()
	shape := engine.Shape{HiddenLayers: model.Config.Layers, MoELayers: model.Config.MoELayers, Experts: model.Config.Experts, Ranks: o.EPSize}
	p, err := from.Decode(text, shape)
	if err != nil {
		return err
	}
	o.RedundantExperts = p.Ranks*p.SlotsPerRank - p.Experts
	text, err = sglang.Adapter().ExpertMap.Encode(engine.Layout{Placement: p, HiddenLayers: shape.HiddenLayers})
	o.InitExpertLocation = string(text)
	return err
}
