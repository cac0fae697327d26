// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/internal/refengine/scheduler"
	"github.com/semmoe/operator/internal/refengine/shuffle"
)

// Config configures an engine.
type Config struct {
	Model     *model.Model
	Tokenizer *tokenizer.Tokenizer
	// EndTokens are the tokens that end a continuation.
	EndTokens []int32
	// ServedName is the required model name of requests.
	ServedName string
	// Dialect is the HTTP API to serve.
	Dialect Dialect
	// Metrics enables metrics in dialects that disable them by default.
	Metrics bool
	// ExpertRanks is the expert-parallel size. With AttentionDP, one of these ranks serves each request. Without it,
	// requests have no rank, and one of the ranks serves each token in each layer: Tables selects the rank. Without
	// tables, the ranks are assigned round-robin.
	ExpertRanks int
	AttentionDP bool
	ExpertMap   *locality.Map
	Tables      *shuffle.Consumer
	// ReturnRoutes allows requests to ask for routed experts.
	ReturnRoutes bool
	// IgnoresRank is the one of RankRoutes that ignores the requested rank and assigns ranks round-robin; empty for
	// none.
	IgnoresRank string
	// StepDelay is added to each step.
	StepDelay time.Duration
	// ContextLength is the maximum length of a request, prompt and response together, in tokens. MaxRunning, MaxQueued
	// and ChunkedPrefillSize limit the scheduler. Workers is the number of goroutines for computation.
	ContextLength, MaxRunning, MaxQueued int
	ChunkedPrefillSize, Workers          int
}

// Engine serves requests.
type Engine struct {
	Config
	Scheduler *scheduler.Scheduler
	// Crashed is closed by a request that ends the engine.
	Crashed  chan struct{}
	crashed  sync.Once
	metrics  *metrics
	started  time.Time
	requests atomic.Uint64 // for round-robin assignment
}

// NewEngine returns an engine. The caller must run its Scheduler.
func NewEngine(c Config) *Engine {
	e := &Engine{Config: c, Crashed: make(chan struct{}), started: time.Now()}
	account := newAccounting(c)
	e.Scheduler = scheduler.New(c.Model, c.Workers, scheduler.Config{
		MaxRunning: c.MaxRunning, MaxQueued: c.MaxQueued, PrefillTokens: c.ChunkedPrefillSize, ContextLength: c.ContextLength,
		Ranks: e.dataParallelRanks(), OnStep: account.add, OnBatch: func(ranks []scheduler.RankStep) { e.metrics.step(ranks) },
		LookAhead: c.Tables.Width, StepDelay: c.StepDelay,
	})
	e.metrics = newMetrics(e)
	account.activations = e.metrics.activations
	return e
}

func (e *Engine) dataParallelRanks() int {
	if e.AttentionDP {
		return e.ExpertRanks
	}
	return 1
}

// job is a validated request.
type job struct {
	prompt       []int32
	maxNewTokens int
	// streamed is true for streams.
	streamed bool
	// textInLogprobs adds the texts of tokens to their log probabilities on SGLang's native route.
	textInLogprobs bool
	sampling       scheduler.Sampling
	stops          []string
	stopTokens     []int32
	topLogprobs    int
	// promptLogprobs requests the log probabilities of the prompt's tokens after promptStart.
	promptLogprobs bool
	promptStart    int
	rank           int
	// refused is an error that is sent as the first event of a stream.
	refused *apiError
	// tokenIDs requests the token IDs of the prompt and of the response.
	tokenIDs bool
	// routes requests routed experts, starting at token routesStart.
	routes      bool
	routesStart int
}

// start queues a job. ctx is the context of the client's request.
func (e *Engine) start(ctx context.Context, j job) (*generation, error) {
	g := newGeneration(e, j)
	err := e.Scheduler.Submit(ctx, scheduler.Request{
		Prompt: j.prompt, MaxNewTokens: j.maxNewTokens, Sampling: j.sampling, TopLogprobs: j.topLogprobs, KeepRoutes: j.routes,
		PromptLogprobs: j.promptLogprobs, PromptStart: j.promptStart, Rank: j.rank, Sink: g,
	})
	return g, err
}

// prepare converts the parameters that all routes share to a job.
func (e *Engine) prepare(r *http.Request, prompt []int32, p parameters) (job, error) {
	if err := e.Dialect.routing(e, r, &p); err != nil {
		return job{}, err
	}
	j := job{prompt: prompt, streamed: p.Stream, stops: p.Stop, topLogprobs: -1, tokenIDs: p.ReturnTokenIDs, routes: p.ReturnRoutedExperts, routesStart: p.RoutedExpertsStartLen}
	answer := 0
	if p.maxTokens != nil {
		answer = *p.maxTokens
	}
	if err := e.checkPrompt(prompt, answer); err != nil {
		return j, err
	}
	for _, set := range []func() error{
		func() error { return e.setLength(&j, p) },
		func() error { return p.setSampling(&j) },
		func() error { return e.setRank(&j, r.URL.Path, p) },
		func() error { return e.checkRoutes(j) },
	} {
		if err := set(); err != nil {
			return j, err
		}
	}
	if !p.IgnoreEOS {
		j.stopTokens = slices.Concat(e.EndTokens, p.StopTokenIDs)
	}
	return j, nil
}

func (e *Engine) checkModel(name string) error {
	if e.Dialect.anyModel || name == "" || name == "default" && e.Dialect.Name == "" || name == e.ServedName {
		return nil
	}
	err := badRequest("model", "the model %q does not exist; this engine serves %q", name, e.ServedName)
	err.status = http.StatusNotFound
	return err
}

// checkPrompt checks a prompt. answer is the requested number of tokens of the answer.
func (e *Engine) checkPrompt(prompt []int32, answer int) error {
	switch {
	case len(prompt) == 0:
		return badRequest("prompt", "the prompt is empty; give at least one token")
	case len(prompt) >= e.ContextLength:
		return e.Dialect.tooLong(e.ContextLength, len(prompt), answer)
	}
	for i, token := range prompt {
		if token < 0 || int(token) >= e.Model.Vocab {
			if e.Dialect.crashesOnUnknownTokens {
				e.crashed.Do(func() { close(e.Crashed) })
				panic(http.ErrAbortHandler)
			}
			return badRequest("", "token %d of the prompt is %d; allowed is 0 to %d", i, token, e.Model.Vocab-1)
		}
	}
	return nil
}

func (e *Engine) setLength(j *job, p parameters) error {
	room := e.ContextLength - len(j.prompt)
	switch {
	case p.maxTokens == nil:
		j.maxNewTokens = min(p.defaultMaxTokens, room)
	case *p.maxTokens < 0:
		return badRequest(p.maxTokensName, "%s is %d; it must not be negative", p.maxTokensName, *p.maxTokens)
	case *p.maxTokens == 0 && e.Dialect.refusesNoTokens && !p.echo:
		return badRequest(p.maxTokensName, "%s is 0; it must be at least 1", p.maxTokensName)
	case *p.maxTokens > room:
		return e.Dialect.tooLong(e.ContextLength, len(j.prompt), *p.maxTokens)
	default:
		j.maxNewTokens = *p.maxTokens
	}
	return nil
}

// RankRoutes lists the routes that read a rank from the request.
var RankRoutes = []string{"/v1/completions", "/v1/chat/completions", "/generate", messagesPath}

// rankHeader selects the data-parallel rank of a request. It has precedence over the fields of the body.
const rankHeader = "X-Data-Parallel-Rank"

// setRank sets the rank of a job: the requested rank if the route reads ranks, else the next rank.
func (e *Engine) setRank(j *job, route string, p parameters) error {
	ranks, asked, source := e.dataParallelRanks(), p.RoutedDPRank, "routed_dp_rank"
	if asked == nil {
		asked, source = p.DataParallelRank, "data_parallel_rank"
	}
	if p.rankHeader != nil {
		number := rankNumber(*p.rankHeader)
		asked, source = &number, "header "+rankHeader
	}
	switch {
	case asked == nil || route == e.IgnoresRank:
		j.rank = e.nextRank()
	case !asked.isInteger():
		return invalid(source, "%s is %v; it must be an integer", source, *asked)
	case *asked < 0 || *asked >= rankNumber(ranks):
		j.refused = badRequest("", "%s is %.0f; allowed is 0 to %d", source, float64(*asked), ranks-1)
		switch {
		case slices.Contains(e.Dialect.failsOnRank, route):
			return errors.New("internal server error")
		case !p.Stream || e.Dialect.refusesInStream == nil || !e.Dialect.refusesInStream(route):
			return j.refused
		}
	default:
		j.rank = int(*asked)
	}
	return nil
}

// nextRank assigns ranks round-robin.
func (e *Engine) nextRank() int {
	return int((e.requests.Add(1) - 1) % uint64(e.dataParallelRanks()))
}

func (e *Engine) checkRoutes(j job) error {
	switch {
	case !j.routes:
		return nil
	case !e.ReturnRoutes:
		return badRequest("return_routed_experts", "return_routed_experts needs an engine that was started with --enable-return-routed-experts")
	case j.routesStart < 0 || j.routesStart > len(j.prompt):
		return badRequest("routed_experts_start_len", "routed_experts_start_len is %d; allowed is 0 to the %d tokens of the prompt", j.routesStart, len(j.prompt))
	}
	return nil
}

// newID returns a request ID.
func newID(prefix string) string {
	return fmt.Sprintf("%s%016x%016x", prefix, rand.Uint64(), rand.Uint64())
}
