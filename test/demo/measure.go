// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/corpus"
)

const (
	// newTokens is the number of tokens that each request generates: enough to detect a changed model, few enough to
	// keep the demo short.
	newTokens = 8
	// inFlight is the number of concurrent requests.
	inFlight = 8
	// window is the number of requests in the window of the load imbalance.
	window = 128
	// orderSeed is the random seed of the order of requests.
	orderSeed = 1
)

// reply is the answer to one request.
type reply struct {
	output []int
	pod    string
	rank   int
	plan   string
	// tokens is the load of the request: the number of prompt tokens and generated tokens.
	tokens int
	// taken is the time from the first byte sent to the last byte received.
	taken time.Duration
}

// measurement is the result of serving a list of requests.
type measurement struct {
	// replies are in the order of the list. arrivals are indices into replies, in the order in which the requests were
	// sent.
	replies  []reply
	arrivals []int
	// activations are counted by the request routers from the plan, engine by the engine from the experts that it holds
	// on each rank. The two differ if the engine ignores its expert map.
	activations
	engine activations
	// forecast is the plan's forecast of the rate for these requests on the ranks that served them; 0 without a plan.
	// The ranks depend on the order in which the requests arrived.
	forecast float64
	taken    time.Duration
}

// activations counts (token, layer, expert) triples: all of them, and those with the expert on the rank of the token.
type activations struct{ local, all float64 }

func (a activations) lar() float64 { return a.local / a.all }

func (a activations) minus(b activations) activations {
	return activations{a.local - b.local, a.all - b.all}
}

func (m *measurement) tokens() int {
	sum := 0
	for _, r := range m.replies {
		sum += r.tokens
	}
	return sum
}

// places returns the number of distinct ranks, over all pods, that served a request.
func (m *measurement) places() int {
	type place struct {
		pod  string
		rank int
	}
	used := map[place]bool{}
	for _, r := range m.replies {
		used[place{r.pod, r.rank}] = true
	}
	return len(used)
}

// milliseconds returns the mean time of a request.
func (m *measurement) milliseconds() float64 {
	sum := time.Duration(0)
	for i := range m.replies {
		sum += m.replies[i].taken
	}
	return float64(sum.Microseconds()) / 1000 / float64(len(m.replies))
}

// slowerThan returns the mean additional time of a request, relative to the mean time of a request in other, and half
// of the width of its 95% interval. Both measurements must have the same requests, because the times are compared
// pairwise.
func (m *measurement) slowerThan(other *measurement) (change, interval float64) {
	n := float64(len(m.replies))
	mean, squares := 0.0, 0.0
	for i := range m.replies {
		mean += (m.replies[i].taken - other.replies[i].taken).Seconds() / n
	}
	for i := range m.replies {
		d := (m.replies[i].taken - other.replies[i].taken).Seconds() - mean
		squares += d * d
	}
	level := other.milliseconds() / 1000
	return mean / level, 2 * math.Sqrt(squares/(n-1)/n) / level
}

// byPlan counts the requests that were routed by the tables of the plan with the given short digest.
func (m *measurement) byPlan(plan string) int {
	count := 0
	for _, r := range m.replies {
		if r.plan == plan {
			count++
		}
	}
	return count
}

// windowImbalance returns the load of the busiest rank over the mean load of all ranks in a window of the last 128
// requests, as a mean over all windows, from the 128th request on.
func (m *measurement) windowImbalance() float64 {
	ranks := 0
	for _, r := range m.replies {
		ranks = max(ranks, r.rank+1)
	}
	load := make([]int, 1+ranks) // index 0 is for unknown ranks
	sum, windows, total := 0.0, 0, 0
	for i, index := range m.arrivals {
		r := m.replies[index]
		load[1+r.rank] += r.tokens
		total += r.tokens
		if i >= window {
			old := m.replies[m.arrivals[i-window]]
			load[1+old.rank] -= old.tokens
			total -= old.tokens
		}
		if i >= window-1 {
			sum += float64(slices.Max(load[1:])) * float64(ranks) / float64(total)
			windows++
		}
	}
	return sum / float64(windows)
}

// measure sends all requests through the Service in a seeded random order, and reads the numbers of local and of all
// activations from the request routers and the engines.
func (d *demo) measure(ctx context.Context, requests []corpus.Request, update func(string)) (*measurement, error) {
	m := &measurement{
		replies:  make([]reply, len(requests)),
		arrivals: rand.New(rand.NewPCG(orderSeed, 0)).Perm(len(requests)),
	}
	before, err := d.countActivations(ctx)
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	group, sending := errgroup.WithContext(ctx)
	group.SetLimit(inFlight)
	var done atomic.Int32
	for _, index := range m.arrivals {
		group.Go(func() (err error) {
			m.replies[index], err = d.complete(sending, requests[index].Text)
			if n := done.Add(1); d.out.Terminal || n%100 == 0 {
				update(fmt.Sprintf("%d of %d", n, len(requests)))
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	m.taken = time.Since(begin)
	after, err := d.countActivations(ctx)
	if err != nil {
		return nil, err
	}
	m.activations, m.engine = after.routers.minus(before.routers), after.engines.minus(before.engines)
	if m.all <= 0 || m.engine.all <= 0 {
		return nil, fmt.Errorf("for %d requests, the request routers counted %.0f activations, the engines %.0f; want more than 0", len(requests), m.all, m.engine.all)
	}
	return m, nil
}

// complete sends one prompt and generates newTokens tokens greedily.
func (d *demo) complete(ctx context.Context, prompt string) (reply, error) {
	var answer struct {
		OutputIDs []int `json:"output_ids"`
		Meta      struct {
			Prompt int `json:"prompt_tokens"`
		} `json:"meta_info"`
	}
	begin := time.Now()
	header, err := d.post(ctx, "/generate", map[string]any{
		"text":            prompt,
		"sampling_params": map[string]any{"temperature": 0, "max_new_tokens": newTokens, "ignore_eos": true},
	}, &answer)
	if err != nil {
		return reply{}, err
	}
	d.ledger.compare(prompt, answer.OutputIDs)
	rank := -1 // a router does not yet know the rank on a newly discovered pod
	if text := header.Get(router.HeaderRank); text != "" {
		if rank, err = strconv.Atoi(text); err != nil {
			return reply{}, fmt.Errorf("header %s: %w", router.HeaderRank, err)
		}
	}
	return reply{
		output: answer.OutputIDs, pod: header.Get(router.HeaderPod), rank: rank, plan: header.Get(router.HeaderPlan), tokens: answer.Meta.Prompt + len(answer.OutputIDs),
		taken: time.Since(begin),
	}, nil
}

// counters are the activations counted since the pods started.
type counters struct{ routers, engines activations }

// countActivations sums the counters of all request routers and of all engines.
func (d *demo) countActivations(ctx context.Context) (counters, error) {
	var sum counters
	err := d.eachPod(ctx, "router", 9090, "metrics", func(metrics string) error {
		sum.routers.add(metrics, "semmoe_activations_total")
		return nil
	})
	if err != nil {
		return sum, err
	}
	return sum, d.eachPod(ctx, "engine", 30000, "metrics", func(metrics string) error {
		sum.engines.add(metrics, "semmoe_engine_activations_total")
		return nil
	})
}

// add adds the samples of a metric with the label locality.
func (a *activations) add(metrics, metric string) {
	for sample := range samples(metrics, metric) {
		a.all += sample.value
		if strings.Contains(sample.labels, `locality="local"`) {
			a.local += sample.value
		}
	}
}

// livePods prints the names of pods that are not being deleted. Counts of a deleted pod would be missing in later sums.
const livePods = `go-template={{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}} {{end}}{{end}}`

// forecastRate returns the plan's forecast of the local activation rate for requests to the pods of a revision. It uses
// the routers' records of recent requests.
func (d *demo) forecastRate(ctx context.Context, revision string) (float64, error) {
	var local, all float64
	err := d.eachReport(ctx, func(report lar.Report) error {
		for _, o := range report.Observations {
			if o.Revision == revision && o.Forecast != nil {
				local += o.Forecast.Predicted * float64(o.Total)
				all += float64(o.Total)
			}
		}
		return nil
	})
	if err == nil && all == 0 {
		err = fmt.Errorf("the request routers report no forecast for revision %s", revision)
	}
	return local / all, err
}

// eachPod sends a GET request to every live pod of a component, through the API server, and calls f with each answer.
func (d *demo) eachPod(ctx context.Context, component string, port int, path string, f func(text string) error) error {
	pods, err := d.podsOf(ctx, component)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		text, err := d.cluster.run(ctx, nil, "get", "--raw", fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:%d/proxy/%s", namespace, pod, port, path))
		if err != nil {
			return err
		}
		if err := f(text); err != nil {
			return fmt.Errorf("pod %s: %w", pod, err)
		}
	}
	return nil
}

// podsOf returns the names of the live pods of a component.
func (d *demo) podsOf(ctx context.Context, component string) ([]string, error) {
	deployment := d.name
	if component == "router" {
		deployment = d.routers
	}
	pods, err := d.cluster.run(ctx, nil, "get", "pods", "-n", namespace,
		"-l", "semmoe.io/deployment="+deployment+",semmoe.io/component="+component, "-o", livePods)
	if err == nil && strings.TrimSpace(pods) == "" {
		err = fmt.Errorf("there is no pod of component %s", component)
	}
	return strings.Fields(pods), err
}

// sample is one line of the Prometheus text format.
type sample struct {
	labels string
	value  float64
}

// samples yields the samples of one metric.
func samples(metrics, metric string) func(yield func(sample) bool) {
	return func(yield func(sample) bool) {
		for line := range strings.Lines(metrics) {
			rest, ok := strings.CutPrefix(strings.TrimSpace(line), metric)
			if !ok {
				continue
			}
			labels, number, ok := strings.Cut(rest, "} ")
			if !ok {
				labels, number, _ = strings.Cut(rest, " ") // of a metric without labels
			}
			if labels, ok = strings.CutPrefix(labels, "{"); !ok && labels != "" {
				continue // another metric with a longer name
			}
			value, err := strconv.ParseFloat(number, 64)
			if err == nil && !yield(sample{labels, value}) {
				return
			}
		}
	}
}
