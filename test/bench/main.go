// Command bench measures the solver, the reference engine and what the request router in front of it costs, in one run on
// this machine, and prints one JSON object. With the argument "solver" it measures the solver alone, with "router" the request
// router in front of an engine that answers at once, with "reshuffle" the reshuffling of a checkpoint of 8 GiB, which needs three
// times that much disk and is measured only then; with "metis", and a routing trace if it is not to be the one in
// solver/testdata, our search against METIS; with "replan" (and -help) what re-plans recover from few tokens after the kinds of
// text have changed; with "hindsight" (and -help) how far dispatch of requests stays below what could be reached if all arrivals were
// known; with "time" (and -help) the modelled layer times of plans by our search and by published algorithms. It judges nothing: the goals stand next to the figures.
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
)

const (
	checkpoint = "internal/refengine/testdata/tiny-qwen3moe"
	vocabulary = 4096
	ranks      = 4

	// decodeGoal and prefillGoal are tokens per second on two cores that the reference engine must reach.
	decodeGoal  = 1000
	prefillGoal = 4000
)

type result struct {
	Processors int `json:"processors"`
	// Decode: tokens generated per second, all requests together, of 16 at a time with short prompts.
	DecodeTokensPerSecond float64 `json:"decode_tokens_per_second"`
	DecodeToGoal          float64 `json:"decode_to_goal"`
	// Prefill: prompt tokens per second, of 4 requests at a time with prompts of 512 tokens.
	PrefillTokensPerSecond float64 `json:"prefill_tokens_per_second"`
	PrefillToGoal          float64 `json:"prefill_to_goal"`
	// Through the router, the same decoding.
	RoutedDecodeTokensPerSecond float64 `json:"routed_decode_tokens_per_second"`
	RoutedToDirect              float64 `json:"routed_to_direct"`
	// Router is the request router in front of an engine that answers at once.
	Router *routerResult `json:"router"`
	// Solver holds solves at the scale of large models.
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
	// Before all else has filled caches and memory.
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

// startEngine runs the reference engine in this process and returns its address once it serves.
func startEngine(ctx context.Context) (string, error) {
	options := refengine.DefaultOptions()
	options.ModelPath = checkpoint
	options.TPSize, options.EPSize, options.DPSize, options.EnableDPAttention = ranks, ranks, ranks, true
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	options.Port = listener.Addr().(*net.TCPAddr).Port
	listener.Close()
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
	return "", errors.New("the engine does not serve within a minute")
}

// load sends requests, some at a time, each with a random prompt of its own, and returns the time that all took.
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
