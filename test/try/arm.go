// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/corpus"
)

const (
	// newTokens is the number of tokens that each request generates.
	newTokens = 8
	// inFlight is the number of concurrent requests to each router.
	inFlight = 8
)

// arm is a request router with its engine, and the activations of the requests that it has served.
type arm struct {
	name    string
	address string
	shape   *trace.Model
	// home is the rank of each expert, by MoE layer.
	home [][]int
	// model has the modelled time of a layer.
	model cost.Layer

	mu      sync.Mutex
	served  int
	outputs [][]int
	// activations counts [MoE layer][rank of the request][rank of the expert].
	activations [][ranks][ranks]float64
}

// newArm returns an arm with a placement without copies of experts.
func newArm(name string, p *placement.Placement, m *trace.Model, layer cost.Layer) *arm {
	a := &arm{name: name, shape: m, model: layer, activations: make([][ranks][ranks]float64, len(m.Layers))}
	for i := range p.Layers {
		home := make([]int, p.Experts)
		for expert, hosts := range p.Hosts(i) {
			home[expert] = hosts[0]
		}
		a.home = append(a.home, home)
	}
	return a
}

// reply is the answer to a request.
type reply struct {
	Output []int `json:"output_ids"`
	Meta   struct {
		RoutedExperts string `json:"routed_experts"`
	} `json:"meta_info"`
	rank int
	plan string
}

// ask sends a prompt through the router.
func (a *arm) ask(ctx context.Context, prompt string) (r reply, err error) {
	body, err := json.Marshal(map[string]any{
		"text": prompt, "return_routed_experts": true,
		"sampling_params": map[string]any{"temperature": 0, "max_new_tokens": newTokens, "ignore_eos": true},
	})
	if err != nil {
		return r, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+a.address+"/generate", bytes.NewReader(body))
	if err != nil {
		return r, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return r, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return r, err
	}
	if response.StatusCode != http.StatusOK {
		return r, fmt.Errorf("%s: %s: %.500s", a.name, response.Status, text)
	}
	r.plan = response.Header.Get(router.HeaderPlan)
	if r.rank, err = strconv.Atoi(response.Header.Get(router.HeaderRank)); err != nil {
		return r, fmt.Errorf("%s: header %s: %w", a.name, router.HeaderRank, err)
	}
	return r, json.Unmarshal(text, &r)
}

// waitServing waits until the router listens and assigns ranks by a plan; empty means no plan.
func (a *arm) waitServing(ctx context.Context, plan string) error {
	return until(ctx, func() (bool, error) {
		r, err := a.ask(ctx, "x")
		return err == nil && r.plan == plan, nil
	})
}

// serve sends requests through the router, and counts their activations. It calls answered after each answer.
func (a *arm) serve(ctx context.Context, requests []corpus.Request, answered func()) error {
	adapter, err := registry.For("SGLang")
	if err != nil {
		return err
	}
	a.outputs = make([][]int, len(requests))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(inFlight)
	for i, request := range requests {
		group.Go(func() error {
			r, err := a.ask(ctx, request.Text)
			if err != nil {
				return err
			}
			experts, err := adapter.RoutedExperts.Decode(r.Meta.RoutedExperts, a.shape.HiddenLayers, a.shape.TopK)
			if err != nil {
				return fmt.Errorf("%s: %w", a.name, err)
			}
			a.outputs[i] = r.Output
			a.count(r.rank, experts)
			answered()
			return nil
		})
	}
	return group.Wait()
}

// count adds the experts of a request on a rank, [token][hidden layer][top].
func (a *arm) count(rank int, experts []int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.served++
	top := a.shape.TopK
	for token := range slices.Chunk(experts, a.shape.HiddenLayers*top) {
		for i, layer := range a.shape.Layers {
			for _, expert := range token[layer*top : (layer+1)*top] {
				a.activations[i][rank][a.home[i][expert]]++
			}
		}
	}
}

// state is what the served requests have shown so far.
type state struct {
	served int
	// lar is the local activation rate. micros is the modelled time of an MoE layer in microseconds, from the exchange
	// of the busiest rank and the load of the slowest rank, as in cost.Report.
	lar, micros float64
}

func (a *arm) state() state {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := state{served: a.served}
	if s.served == 0 {
		return s
	}
	exchange, load := 0.0, 0.0
	for _, layer := range a.activations {
		var sent, received, computed [ranks]float64
		all, local := 0.0, 0.0
		for from := range ranks {
			for to, n := range layer[from] {
				all += n
				computed[to] += n
				if from == to {
					local += n
				} else {
					sent[from] += n
					received[to] += n
				}
			}
		}
		share, layers := all/ranks, float64(len(a.activations))
		s.lar += local / all / layers
		exchange += max(slices.Max(sent[:]), slices.Max(received[:])) / share / layers
		load += slices.Max(computed[:]) / share / layers
	}
	s.micros = a.model.Time(batchTokens, exchange, load).Total()
	return s
}

func (s state) String() string { return fmt.Sprintf("%4.1f%% local, %5.0f µs", 100*s.lar, s.micros) }

// bar draws a share of 0 to 1.
func bar(share float64) string {
	const width = 30
	full := int(share*width + 0.5)
	return strings.Repeat("█", full) + strings.Repeat("░", width-full)
}
