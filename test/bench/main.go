// SPDX-License-Identifier: Apache-2.0

// Command bench runs benchmarks on this machine and prints the results as one JSON object. Without an argument, it
// measures the solver, the reference engine, and the cost of the request router in front of the engine. The first
// argument selects another benchmark:
//
//   - solver: only the solver.
//   - router: only the request router, in front of an engine that answers immediately. It is compared with the programs
//     that are installed of sglang-router, vllm-router, nginx, haproxy and envoy; router peers [TOKENS...] is only this comparison.
//     router pickers [TOKENS...] compares the endpoint picker with the program epp of llm-d-router, if it is installed.
//     BENCH_PROFILES names a directory for processor profiles of the routers.
//   - reshuffle: reshuffling a checkpoint of 8 GiB. It needs 24 GiB of disk, and runs only on request.
//   - tensors: inspecting and reshuffling a checkpoint of 300,000 small tensors.
//   - metis [TRACE]: our search compared with METIS. The default trace is in solver/testdata.
//   - replan: the local activation rate that re-plans from few tokens recover after the kinds of text have changed.
//   - hindsight: the gap between dispatch of requests and the best assignment with all arrivals known.
//   - time: the modelled layer times of plans by our search and by published algorithms.
//
// The last three print their flags with -help. The output contains goals next to the figures, but no verdict.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/test/ports"
)

const (
	checkpoint = "internal/refengine/testdata/tiny-qwen3moe"
	vocabulary = 4096
	ranks      = 4

	// decodeGoal and prefillGoal are the goals of the reference engine on two cores, in tokens per second.
	decodeGoal  = 1000
	prefillGoal = 4000
)

type result struct {
	Processors int `json:"processors"`
	// Decode: generated tokens per second over all requests, with 16 concurrent requests with short prompts.
	DecodeTokensPerSecond float64 `json:"decode_tokens_per_second"`
	DecodeToGoal          float64 `json:"decode_to_goal"`
	// Prefill: prompt tokens per second, with 4 concurrent requests with prompts of 512 tokens.
	PrefillTokensPerSecond float64 `json:"prefill_tokens_per_second"`
	PrefillToGoal          float64 `json:"prefill_to_goal"`
	// Routed decode: the same decoding through the request router.
	RoutedDecodeTokensPerSecond float64 `json:"routed_decode_tokens_per_second"`
	RoutedToDirect              float64 `json:"routed_to_direct"`
	// Router is the cost of the request router in front of an engine that answers immediately.
	Router *routerResult `json:"router"`
	// Solver holds the results of solves at the scale of large models.
	Solver []solverResult `json:"solver"`
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	if len(os.Args) == 2 && os.Args[1] == "reshuffle" {
		r, err := benchReshuffle(ctx)
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	if len(os.Args) == 2 && os.Args[1] == "tensors" {
		r, err := benchTensors(ctx)
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	if len(os.Args) >= 2 && os.Args[1] == "metis" {
		path := metisTrace
		if len(os.Args) > 2 {
			path = os.Args[2]
		}
		r, err := benchMETIS(ctx, path)
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	if len(os.Args) >= 2 && os.Args[1] == "replan" {
		r, err := benchReplan(ctx, os.Args[2:])
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	if len(os.Args) >= 2 && os.Args[1] == "time" {
		r, err := benchTime(ctx, os.Args[2:])
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	if len(os.Args) >= 2 && os.Args[1] == "hindsight" {
		r, err := benchHindsight(ctx, os.Args[2:])
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	if len(os.Args) >= 2 && os.Args[1] == processArgument {
		return runProcess(ctx, os.Args[2:])
	}
	if len(os.Args) >= 3 && os.Args[1] == "router" && os.Args[2] == "peers" {
		r, err := benchSideBySide(ctx, os.Args[3:])
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	if len(os.Args) >= 3 && os.Args[1] == "router" && os.Args[2] == "pickers" {
		r, err := benchPickers(ctx, os.Args[3:])
		if err != nil {
			return err
		}
		return out.Encode(r)
	}
	// The router runs first, before other benchmarks fill caches and memory.
	var routed *routerResult
	if len(os.Args) < 2 || os.Args[1] == "router" {
		var err error
		if routed, err = benchRouter(ctx); err != nil {
			return err
		}
	}
	if len(os.Args) == 2 && os.Args[1] == "router" {
		return out.Encode(routed)
	}
	solver, err := benchSolver(ctx)
	if err != nil {
		return err
	}
	if len(os.Args) == 2 && os.Args[1] == "solver" {
		return out.Encode(solver)
	}
	address, err := startEngine(ctx)
	if err != nil {
		return err
	}
	pool := router.NewPool()
	pool.Set([]discovery.Backend{{Pod: "engine", Address: address, Ranks: ranks}})
	handler, _ := router.NewProxy(pool, prometheus.NewRegistry(), logr.Discard(),
		router.ProxyOptions{RankHeader: "X-Data-Parallel-Rank", MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	proxy := httptest.NewServer(handler)
	defer proxy.Close()

	r := result{Processors: runtime.GOMAXPROCS(0), Solver: solver, Router: routed}
	direct := "http://" + address
	if _, err := load(ctx, direct, 16, 16, 8, 8); err != nil { // warm up
		return err
	}
	decode := func(url string) (float64, error) {
		taken, err := load(ctx, url, 64, 16, 8, 128)
		return 64 * 128 / taken.Seconds(), err
	}
	if r.DecodeTokensPerSecond, err = decode(direct); err != nil {
		return err
	}
	if r.RoutedDecodeTokensPerSecond, err = decode(proxy.URL); err != nil {
		return err
	}
	taken, err := load(ctx, direct, 48, 4, 512, 1)
	if err != nil {
		return err
	}
	r.PrefillTokensPerSecond = 48 * 512 / taken.Seconds()
	r.DecodeToGoal = r.DecodeTokensPerSecond / decodeGoal
	r.PrefillToGoal = r.PrefillTokensPerSecond / prefillGoal
	r.RoutedToDirect = r.RoutedDecodeTokensPerSecond / r.DecodeTokensPerSecond
	return out.Encode(r)
}

// startEngine runs the reference engine in this process, waits until it serves, and returns its address.
func startEngine(ctx context.Context) (string, error) {
	options := refengine.DefaultOptions()
	options.ModelPath = checkpoint
	options.TPSize, options.EPSize, options.DPSize, options.EnableDPAttention = ranks, ranks, ranks, true
	var err error
	if options.Port, _, err = ports.Hold(); err != nil {
		return "", err
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(options.Port))
	ended := make(chan error, 1)
	go func() { ended <- refengine.Run(ctx, options) }()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		select {
		case err := <-ended:
			return "", fmt.Errorf("the engine ended: %w", err)
		default:
		}
		if response, err := http.Get("http://" + address + "/health"); err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return address, nil
			}
		}
	}
	return "", errors.New("the engine does not serve within 1 minute")
}

// load sends requests with different random prompts, a number of them concurrently, and returns the total time.
func load(ctx context.Context, url string, requests, concurrency, promptTokens, newTokens int) (time.Duration, error) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: concurrency}}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(concurrency)
	random := rand.New(rand.NewPCG(1, 1))
	begin := time.Now()
	for range requests {
		ids := make([]int, promptTokens)
		for i := range ids {
			ids[i] = 1 + random.IntN(vocabulary-1)
		}
		body, err := json.Marshal(map[string]any{
			"input_ids":       ids,
			"sampling_params": map[string]any{"temperature": 0, "max_new_tokens": newTokens, "ignore_eos": true},
		})
		if err != nil {
			return 0, err
		}
		group.Go(func() error {
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/generate", bytes.NewReader(body))
			if err != nil {
				return err
			}
			response, err := client.Do(request)
			if err != nil {
				return err
			}
			defer response.Body.Close()
			answer, err := io.ReadAll(response.Body)
			if err == nil && response.StatusCode != http.StatusOK {
				err = fmt.Errorf("%s: %s", response.Status, answer)
			}
			return err
		})
	}
	err := group.Wait()
	return time.Since(begin), err
}
