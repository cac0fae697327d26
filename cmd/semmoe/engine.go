package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/refengine/server"
)

func newEngineCommand() *cobra.Command {
	o := refengine.DefaultOptions()
	cmd := &cobra.Command{
		Annotations: map[string]string{drains: "true"},
		Use:         "engine --model-path DIR",
		Short:       "Serve a Qwen3-MoE checkpoint on the CPU with the part of SGLang's surface that the operator uses",
		Args:        usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refengine.Run(withLogger(cmd.Context(), "engine"), o); err != nil {
				return modelError{err}
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.ModelPath, "model-path", o.ModelPath, "directory of the checkpoint (required)")
	flags.StringVar(&o.ServedModelName, "served-model-name", o.ServedModelName, "model name in the API (default the model path)")
	flags.StringVar(&o.Host, "host", o.Host, "address to listen on")
	flags.IntVar(&o.Port, "port", o.Port, "port to listen on")
	flags.IntVar(&o.TPSize, "tp-size", o.TPSize, "number of devices; must equal --ep-size")
	flags.IntVar(&o.DPSize, "dp-size", o.DPSize, "data-parallel ranks of attention; with --enable-dp-attention it must equal --ep-size")
	flags.IntVar(&o.EPSize, "ep-size", o.EPSize, "expert-parallel ranks; must divide the experts and redundant experts of a layer")
	flags.IntVar(&o.Nodes, "nnodes", o.Nodes, "number of processes that the engine is spread over; must divide --tp-size")
	flags.IntVar(&o.NodeRank, "node-rank", o.NodeRank, "which of them this is: 0 serves, the others answer /health alone")
	flags.StringVar(&o.DistInitAddr, "dist-init-addr", o.DistInitAddr, "host:port of node 0, where the others join it")
	flags.BoolVar(&o.EnableDPAttention, "enable-dp-attention", o.EnableDPAttention, "serve each request on one rank")
	flags.StringVar(&o.AllToAllBackend, "moe-a2a-backend", o.AllToAllBackend, "how tokens reach other ranks: "+strings.Join(refengine.AllToAllBackends, ", ")+"; ranks are logical here, so that each computes the same")
	flags.StringVar(&o.InitExpertLocation, "init-expert-location", o.InitExpertLocation, "expert map: trivial, the path of a .json file, or JSON")
	flags.StringVar(&o.DispatchAlgorithm, "ep-dispatch-algorithm", o.DispatchAlgorithm, "which copy of an expert computes: "+refengine.DispatchStatic+", one on the token's own rank where there is one")
	flags.IntVar(&o.RedundantExperts, "ep-num-redundant-experts", o.RedundantExperts, "further slots of each layer for copies of experts")
	flags.StringVar(&o.ShufflePlan, "shuffle-plan", o.ShufflePlan, "directory of a plan for attention tp: its placement is the expert map, its forecast (table, lookahead or lookahead-raw)\nchooses the rank of each token in each layer")
	flags.BoolVar(&o.EnableReturnRoutedExperts, "enable-return-routed-experts", o.EnableReturnRoutedExperts, "let requests ask for the experts of each token")
	flags.IntVar(&o.MaxRunning, "max-running-requests", o.MaxRunning, "requests that are computed together")
	flags.IntVar(&o.MaxQueued, "max-queued-requests", o.MaxQueued, "requests that may wait; further ones are refused with 503")
	flags.IntVar(&o.ContextLength, "context-length", o.ContextLength, "most tokens of a request, prompt and answer (default the model's)")
	flags.IntVar(&o.ChunkedPrefillSize, "chunked-prefill-size", o.ChunkedPrefillSize, "prompt tokens that a step computes at most")
	flags.IntVar(&o.Threads, "threads", o.Threads, "threads that compute")
	flags.StringVar(&o.Dialect, "dialect", o.Dialect, "engine and release whose HTTP surface is served, as strict and as deaf: "+strings.Join(server.Dialects(), ", ")+" (default the reference engine's own)")
	flags.StringVar(&o.Fault, "fault", o.Fault, "for tests: "+refengine.FaultIgnoreMapAtDispatch+" loads weights by the expert map, and dispatches as if there were none; "+refengine.FaultSlowExpertMap+" delays each step where there is a map; "+refengine.FaultIgnoreRank+"ROUTE picks the rank of requests to the route, whatever they ask for")
	return cmd
}
