// SPDX-License-Identifier: Apache-2.0

// Command semmoe-refengine is the reference engine: it serves small Mixture-of-Experts checkpoints on CPUs, for tests,
// demos and profiling without GPUs.
package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/httpserver/buildinfo"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/refengine/server"
)

func main() { cli.Main(newRootCommand()) }

func newRootCommand() *cobra.Command {
	o := refengine.DefaultOptions()
	cmd := &cobra.Command{
		Use:          "semmoe-refengine --model-path DIR",
		Short:        "Serve a Qwen3-MoE checkpoint on the CPU with the subset of SGLang's API that the operator uses",
		Args:         cli.NoArgs,
		Version:      buildinfo.Read().String(),
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cli.Drains(cmd.Context())
			if err := refengine.Run(cli.WithLogger(cmd.Context(), "engine", 0), o); err != nil {
				if checkpoint.IsInvalid(err) {
					err = cli.WithCode(err, cli.ExitInvalidFile)
				}
				return err
			}
			return nil
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	flags := cmd.Flags()
	flags.StringVar(&o.ModelPath, "model-path", o.ModelPath, "directory of the checkpoint (required)")
	flags.StringVar(&o.LayoutAs, "layout-as", o.LayoutAs, "model type as which the checkpoint runs, for a checkpoint of an unknown type (default: its own type)")
	flags.StringVar(&o.ServedModelName, "served-model-name", o.ServedModelName, "model name in the API (default: the model path)")
	flags.StringVar(&o.Host, "host", o.Host, "address to listen on")
	flags.IntVar(&o.Port, "port", o.Port, "port to listen on")
	flags.StringVar(&o.CertFile, "ssl-certfile", o.CertFile, "PEM file with the certificate for TLS (default: plain text)")
	flags.StringVar(&o.KeyFile, "ssl-keyfile", o.KeyFile, "PEM file with the private key of --ssl-certfile")
	flags.IntVar(&o.TPSize, "tp-size", o.TPSize, "number of devices; must equal --ep-size")
	flags.IntVar(&o.DPSize, "dp-size", o.DPSize, "number of data-parallel attention ranks; with --enable-dp-attention it must equal --ep-size")
	flags.IntVar(&o.EPSize, "ep-size", o.EPSize, "number of expert-parallel ranks, a divisor of the experts and of the redundant experts of a layer")
	flags.IntVar(&o.Nodes, "nnodes", o.Nodes, "number of processes of the engine, a divisor of --tp-size")
	flags.IntVar(&o.NodeRank, "node-rank", o.NodeRank, "index of this process among --nnodes: 0 serves, the others only serve /health")
	flags.StringVar(&o.DistInitAddr, "dist-init-addr", o.DistInitAddr, "host:port of node 0, which the other nodes join")
	flags.BoolVar(&o.EnableDPAttention, "enable-dp-attention", o.EnableDPAttention, "attention data parallelism: each request runs on one rank")
	flags.StringVar(&o.AllToAllBackend, "moe-a2a-backend", o.AllToAllBackend, "all-to-all backend: "+strings.Join(refengine.AllToAllBackends, ", ")+"; ranks are logical, so all backends compute the same")
	flags.StringVar(&o.InitExpertLocation, "init-expert-location", o.InitExpertLocation, "expert map: trivial, the path of a .json file, or JSON")
	flags.StringVar(&o.DispatchAlgorithm, "ep-dispatch-algorithm", o.DispatchAlgorithm, "selection of expert copies: "+refengine.DispatchStatic+" (the copy on the token's rank, if any)")
	flags.IntVar(&o.RedundantExperts, "ep-num-redundant-experts", o.RedundantExperts, "number of extra slots per layer for copies of experts")
	flags.BoolVar(&o.EnableReturnRoutedExperts, "enable-return-routed-experts", o.EnableReturnRoutedExperts, "support for requests that return the experts of each token")
	flags.IntVar(&o.MaxRunning, "max-running-requests", o.MaxRunning, "maximum number of concurrently computed requests")
	flags.IntVar(&o.MaxQueued, "max-queued-requests", o.MaxQueued, "maximum number of waiting requests; further requests get status 503")
	flags.IntVar(&o.ContextLength, "context-length", o.ContextLength, "maximum number of tokens of a request, prompt plus output (default: the model's)")
	flags.IntVar(&o.ChunkedPrefillSize, "chunked-prefill-size", o.ChunkedPrefillSize, "maximum number of prompt tokens per step")
	flags.StringArrayVar(&o.APIKeys, "api-key", nil, "`key` that requests must contain as a bearer token, except health checks and metrics; may be given several times (default: none)")
	flags.BoolVar(&o.EnableMetrics, "enable-metrics", o.EnableMetrics, "metrics at /metrics, which dialects of SGLang do not serve by default")
	flags.IntVar(&o.Threads, "threads", o.Threads, "number of compute threads")
	flags.StringVar(&o.Dialect, "dialect", o.Dialect, "engine and release whose HTTP API is emulated, including rejected and ignored fields: "+strings.Join(server.Dialects(), ", ")+" (default: the reference engine's own)")
	flags.StringVar(&o.Fault, "fault", o.Fault, "injected fault for tests: "+refengine.FaultIgnoreMapAtDispatch+" (loads weights by the expert map but ignores it in dispatch), "+refengine.FaultSlowExpertMap+" (delays each step with an expert map), "+refengine.FaultSlowSteps+"DURATION (delays each step) or "+refengine.FaultIgnoreRank+"ROUTE (ignores the requested rank on this route)")
	return cmd
}
