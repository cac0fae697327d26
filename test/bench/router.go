// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/solver/dispatch"
)

// Goals of the request router on two cores.
const (
	routerCPUGoal     = 2.5 // times the reverse proxy's
	addedMedianGoal   = 1   // milliseconds
	addedP99Goal      = 5
	scoringGoal       = 50 // microseconds
	longPromptGoal    = 60 // milliseconds
	longScoringGoal   = 1
	routerMemoryGoal  = 200 // MiB
	requestsPerSecond = 500
)

// routerResult is the cost of the request router in front of an engine that answers immediately. Router, reverse proxy
// and engine are separate processes.
type routerResult struct {
	Processors int `json:"processors"`
	// CPU is the processor time per request with a new prompt of 1,000 tokens, as the median over rounds in which
	// reverse proxy and router alternate. The proxy only decodes the JSON.
	RouterCPU   float64 `json:"router_cpu_us_per_request"`
	BaselineCPU float64 `json:"baseline_cpu_us_per_request"`
	CPURatio    float64 `json:"router_cpu_to_baseline"`
	CPUGoal     float64 `json:"router_cpu_to_baseline_goal"`
	// ByLength is the same for other lengths of prompts.
	ByLength []lengthCost `json:"cpu_by_prompt_length"`
	// Added is the latency that the router adds to direct requests to the engine, at a fixed rate of 500 requests per
	// second. Latency is measured from the scheduled time of a request.
	AddedMedian float64 `json:"added_p50_ms"`
	MedianGoal  float64 `json:"added_p50_ms_goal"`
	AddedP99    float64 `json:"added_p99_ms"`
	P99Goal     float64 `json:"added_p99_ms_goal"`
	DirectP50   float64 `json:"direct_p50_ms"`
	DirectP99   float64 `json:"direct_p99_ms"`
	// Times for a prompt of 1,000 tokens: looking up its tokens for 64 ranks (scoring), and tokenizing it.
	Scoring     float64 `json:"scoring_us"`
	ScoringGoal float64 `json:"scoring_us_goal"`
	Tokenizing  float64 `json:"tokenizing_us"`
	// Times for a prompt of 100,000 tokens, one request at a time: the added latency, scoring and tokenizing. The
	// router tokenizes the whole prompt, and scores at most 16,384 evenly spaced tokens.
	LongAdded       float64 `json:"long_prompt_added_ms"`
	LongGoal        float64 `json:"long_prompt_added_ms_goal"`
	LongScoring     float64 `json:"long_prompt_scoring_ms"`
	LongScoringGoal float64 `json:"long_prompt_scoring_ms_goal"`
	LongTokenizing  float64 `json:"long_prompt_tokenizing_ms"`
	// Resident memory of a router with 500 pods after 5,000 requests.
	Resident   float64 `json:"router_resident_mib"`
	MemoryGoal float64 `json:"router_resident_mib_goal"`
	Peak       float64 `json:"router_peak_mib"`
	// SideBySide compares the router with other programs.
	SideBySide *sideBySide `json:"side_by_side"`
}

// lengthCost is the processor time per request with prompts of one length, in microseconds.
type lengthCost struct {
	Tokens   int     `json:"tokens"`
	Router   float64 `json:"router_us"`
	Baseline float64 `json:"baseline_us"`
	Ratio    float64 `json:"ratio"`
}

func benchRouter(ctx context.Context) (*routerResult, error) {
	fixture, artifact, tokens, err := newRouterFixture()
	if err != nil {
		return nil, err
	}
	engine, err := startProcess(ctx, engineProcess)
	if err != nil {
		return nil, err
	}
	defer engine.stop() //nolint:errcheck // its measurements are complete
	_, port, err := net.SplitHostPort(engine.address)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "bench-router-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	small, large := filepath.Join(dir, "small"), filepath.Join(dir, "large")
	for _, snapshot := range []struct {
		dir  string
		pods int
	}{{small, 1}, {large, routerPods}} {
		if err := writeSnapshot(snapshot.dir, artifact, tokens, port, snapshot.pods, routerRanks, artifact.Digest); err != nil {
			return nil, err
		}
	}
	r := &routerResult{
		Processors: runtime.GOMAXPROCS(0), CPUGoal: routerCPUGoal, MedianGoal: addedMedianGoal, P99Goal: addedP99Goal, ScoringGoal: scoringGoal,
		LongGoal: longPromptGoal, LongScoringGoal: longScoringGoal, MemoryGoal: routerMemoryGoal,
	}
	if err := r.parts(fixture, tokens); err != nil {
		return nil, err
	}
	if err := r.proxying(ctx, fixture, engine, small); err != nil {
		return nil, err
	}
	if err := r.memory(ctx, fixture, large); err != nil {
		return nil, err
	}
	r.SideBySide, err = benchSideBySide(ctx, nil)
	return r, err
}

// proxying measures processor time and latency with one pod.
func (r *routerResult) proxying(ctx context.Context, fixture *routerFixture, engine *process, snapshot string) error {
	baseline, err := startProcess(ctx, baselineProcess, engine.address)
	if err != nil {
		return err
	}
	defer baseline.stop() //nolint:errcheck // its measurements are complete
	proxy, err := startProcess(ctx, routerProcess, snapshot, string(dispatch.Price))
	if err != nil {
		return err
	}
	proxy.plan = fixture.plan
	defer proxy.stop() //nolint:errcheck // as above
	client := newLoadClient()
	for i, target := range []*process{engine, baseline, proxy} { // warm up
		if err := client.closedLoop(ctx, target, fixture.bodies(100+uint64(i), 1000, promptTokens), 8); err != nil {
			return err
		}
	}
	if err := r.processorTime(ctx, client, fixture, baseline, proxy); err != nil {
		return err
	}
	if err := r.latency(ctx, client, fixture, engine, proxy); err != nil {
		return err
	}
	return r.longPrompts(ctx, client, fixture, engine, proxy)
}

// processorTime measures the processor time per request as the median over rounds, so that other load in one round has
// no effect.
func (r *routerResult) processorTime(ctx context.Context, client *loadClient, fixture *routerFixture, baseline, proxy *process) error {
	const rounds = 7
	for _, prompts := range []struct{ tokens, requests int }{{100, 1000}, {promptTokens, 1000}, {8000, 250}} {
		var plain, routed, ratios []float64
		for round := range rounds {
			bodies := fixture.bodies(uint64(1000*prompts.tokens+round), 2*prompts.requests, prompts.tokens)
			first, err := client.cost(ctx, baseline, bodies[:prompts.requests])
			if err != nil {
				return err
			}
			second, err := client.cost(ctx, proxy, bodies[prompts.requests:])
			if err != nil {
				return err
			}
			plain, routed, ratios = append(plain, first), append(routed, second), append(ratios, second/first)
		}
		cost := lengthCost{prompts.tokens, 1e6 * quantile(routed, 0.5), 1e6 * quantile(plain, 0.5), quantile(ratios, 0.5)}
		r.ByLength = append(r.ByLength, cost)
		if prompts.tokens == promptTokens {
			r.BaselineCPU, r.RouterCPU, r.CPURatio = cost.Baseline, cost.Router, cost.Ratio
		}
	}
	return nil
}

// latency alternates between the engine and the router, and takes the median of each quantile over the rounds.
func (r *routerResult) latency(ctx context.Context, client *loadClient, fixture *routerFixture, engine, proxy *process) error {
	const rounds, seconds = 5, 4
	var direct50, direct99, added50, added99 []float64
	for round := range rounds {
		bodies := fixture.bodies(300+uint64(round), seconds*requestsPerSecond, promptTokens)
		direct, err := client.openLoop(ctx, engine, bodies, requestsPerSecond)
		if err != nil {
			return err
		}
		routed, err := client.openLoop(ctx, proxy, bodies, requestsPerSecond)
		if err != nil {
			return err
		}
		direct50, direct99 = append(direct50, quantile(direct, 0.5)), append(direct99, quantile(direct, 0.99))
		added50 = append(added50, quantile(routed, 0.5)-quantile(direct, 0.5))
		added99 = append(added99, quantile(routed, 0.99)-quantile(direct, 0.99))
	}
	r.DirectP50, r.DirectP99 = 1e3*quantile(direct50, 0.5), 1e3*quantile(direct99, 0.5)
	r.AddedMedian, r.AddedP99 = 1e3*quantile(added50, 0.5), 1e3*quantile(added99, 0.5)
	return nil
}

func (r *routerResult) longPrompts(ctx context.Context, client *loadClient, fixture *routerFixture, engine, proxy *process) error {
	var added []float64
	for _, body := range fixture.bodies(400, 20, longPromptTokens) {
		var taken [2]float64
		for i, target := range []*process{engine, proxy} {
			begin := time.Now()
			if err := client.send(ctx, target, body); err != nil {
				return err
			}
			taken[i] = time.Since(begin).Seconds()
		}
		added = append(added, taken[1]-taken[0])
	}
	r.LongAdded = 1e3 * quantile(added, 0.5)
	return nil
}

// parts measures the router's tokenizing and scoring of a prompt in this process, as the median over prompts.
func (r *routerResult) parts(fixture *routerFixture, file []byte) error {
	tokens, err := tokenizer.Parse(file)
	if err != nil {
		return err
	}
	scores := make([]float32, routerRanks)
	measure := func(seed uint64, prompts, length, scored int) (tokenizing, scoring float64) {
		var encoded, looked []float64
		for _, body := range fixture.bodies(seed, prompts, length) {
			text := string(body[bytes.IndexByte(body, ' '):bytes.LastIndex(body, []byte(`","max_tokens`))])
			begin := time.Now()
			ids := tokens.Encode(text)
			encoded = append(encoded, time.Since(begin).Seconds())
			begin = time.Now()
			fixture.table.ScoreTokens(scores, ids[:min(scored, len(ids))])
			looked = append(looked, time.Since(begin).Seconds())
		}
		return quantile(encoded, 0.5), quantile(looked, 0.5)
	}
	measure(500, 500, promptTokens, promptTokens) // warm up
	tokenizing, scoring := measure(501, 500, promptTokens, promptTokens)
	r.Tokenizing, r.Scoring = 1e6*tokenizing, 1e6*scoring
	tokenizing, scoring = measure(502, 20, longPromptTokens, 16<<10)
	r.LongTokenizing, r.LongScoring = 1e3*tokenizing, 1e3*scoring
	return nil
}

func (r *routerResult) memory(ctx context.Context, fixture *routerFixture, snapshot string) error {
	proxy, err := startProcess(ctx, routerProcess, snapshot, string(dispatch.Price))
	if err != nil {
		return err
	}
	proxy.plan = fixture.plan
	defer proxy.stop() //nolint:errcheck // its measurements are complete
	if err := newLoadClient().closedLoop(ctx, proxy, fixture.bodies(600, 5000, promptTokens), 8); err != nil {
		return err
	}
	used, err := proxy.usage()
	r.Resident, r.Peak = used.ResidentMiB, used.PeakMiB
	return err
}

// loadClient sends requests over persistent connections.
type loadClient struct{ http *http.Client }

func newLoadClient() *loadClient {
	return &loadClient{&http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}}
}

// send sends one request and reads the answer. It fails if the rank was not chosen by the plan, because then the router
// has not done the work to be measured.
func (c *loadClient) send(ctx context.Context, target *process, body []byte) error {
	response, err := c.post(ctx, target, body)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, answer)
	}
	if plan := response.Header.Get(router.HeaderPlan); err == nil && plan != target.plan {
		err = fmt.Errorf("the answer names plan %q, want %q", plan, target.plan)
	}
	return err
}

func (c *loadClient) post(ctx context.Context, target *process, body []byte) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+target.address+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	return c.http.Do(request)
}

// tolerant sends requests like closedLoop, and returns how many failed. A failure of another program does not end the
// measurement, but many failures would be cheap.
func (c *loadClient) tolerant(ctx context.Context, target *process, bodies [][]byte, concurrent int) (failed int, err error) {
	errs := make([]error, len(bodies))
	var group errgroup.Group
	group.SetLimit(concurrent)
	for i, body := range bodies {
		group.Go(func() error {
			errs[i] = c.send(ctx, target, body)
			return nil
		})
	}
	group.Wait() //nolint:errcheck // the functions return none
	for _, e := range errs {
		if e != nil {
			failed, err = failed+1, e
		}
	}
	if 100*failed <= len(bodies) {
		err = nil
	}
	return failed, err
}

// closedLoop sends the requests, some of them concurrently.
func (c *loadClient) closedLoop(ctx context.Context, target *process, bodies [][]byte, concurrent int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(concurrent)
	for _, body := range bodies {
		group.Go(func() error { return c.send(ctx, target, body) })
	}
	return group.Wait()
}

// cost returns the mean processor time of a process per request, in seconds.
func (c *loadClient) cost(ctx context.Context, target *process, bodies [][]byte) (float64, error) {
	before, err := target.usage()
	if err != nil {
		return 0, err
	}
	if err := c.closedLoop(ctx, target, bodies, 8); err != nil {
		return 0, err
	}
	after, err := target.usage()
	return (after.CPUSeconds - before.CPUSeconds) / float64(len(bodies)), err
}

// firstEvents returns the time until the first byte of each response, in seconds, of the responses that were complete.
// Requests are sent one after another. It fails if most requests fail.
func (c *loadClient) firstEvents(ctx context.Context, target *process, bodies [][]byte) (taken []float64, err error) {
	for _, body := range bodies {
		begin := time.Now()
		var response *http.Response
		if response, err = c.post(ctx, target, body); err != nil {
			continue
		}
		_, err = io.ReadFull(response.Body, make([]byte, 1))
		first := time.Since(begin).Seconds()
		if err == nil {
			_, err = io.Copy(io.Discard, response.Body)
		}
		response.Body.Close()
		if err == nil {
			taken = append(taken, first)
		}
	}
	if len(taken) > len(bodies)/2 {
		err = nil
	}
	return taken, err
}

// openLoop sends the requests at fixed times, so many per second, independent of the answers. It returns the latency of each request: the
// seconds from its scheduled time to the end of its answer.
func (c *loadClient) openLoop(ctx context.Context, target *process, bodies [][]byte, rate int) ([]float64, error) {
	taken := make([]float64, len(bodies))
	errs := make([]error, len(bodies))
	var running sync.WaitGroup
	begin := time.Now().Add(10 * time.Millisecond)
	for i, body := range bodies {
		due := begin.Add(time.Duration(i) * time.Second / time.Duration(rate))
		time.Sleep(time.Until(due))
		running.Go(func() {
			errs[i] = c.send(ctx, target, body)
			taken[i] = time.Since(due).Seconds()
		})
	}
	running.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return taken, nil
}

// quantile returns the value below which the given part of the values lies.
func quantile(values []float64, part float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(part*float64(len(sorted))), len(sorted)-1)]
}
