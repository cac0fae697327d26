// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/refengine/model"
)

// scoredChunk is the number of prompt tokens per step if their log probabilities are requested. Each token then needs
// logits over the whole vocabulary.
const scoredChunk = 128

// Config configures a scheduler.
type Config struct {
	// MaxRunning is the maximum number of requests in a step. MaxQueued is the maximum number of waiting requests.
	MaxRunning, MaxQueued int
	// PrefillTokens is the maximum number of prompt tokens in a step, in addition to the tokens of decoding requests.
	PrefillTokens int
	// ContextLength is the maximum length of a sequence, prompt and continuation together, in tokens.
	ContextLength int
	// Ranks is the number of data-parallel ranks.
	Ranks int
	// OnStep is called after each step with the computed tokens of its requests, before any of them ends. It must not
	// retain its argument.
	OnStep func([]Computed)
	// OnBatch, if set, is called after each step with the computed tokens of each rank. It must not retain its
	// argument.
	OnBatch func([]RankStep)
	// LookAhead returns the number of experts of each look-ahead of the next step for OnStep; 0 for none. It may be nil.
	LookAhead func() int
	// StepDelay is added to each step, for tests of the detection of a slow engine.
	StepDelay time.Duration
}

// Computed are the tokens of one request in one step.
type Computed struct {
	// Rank is the request's data-parallel rank.
	Rank   int
	Tokens []int32
	// Routes are the selected experts [tokens][layers][top-k].
	Routes []uint16
	// LookAhead is the look-ahead, or nil if it is not requested.
	LookAhead *model.LookAhead
}

// RankStep counts the tokens that one step has computed for a rank.
type RankStep struct {
	// Prefill is the number of prompt tokens, and Decode the number of tokens after a prompt.
	Prefill, Decode int
	// Generated is the number of new tokens. Prompts is the total length of the prompts that the step completed.
	Generated, Prompts int
}

// Load is the load of one rank.
type Load struct {
	Running, Waiting int
	// UsedTokens is the number of tokens in the caches of running requests. TotalTokens also includes the prompt tokens
	// that are not computed yet.
	UsedTokens, TotalTokens int
	// GenerationThroughput is the number of tokens per second over the last full second of work, or 0 if the rank is
	// idle.
	GenerationThroughput float64
}

// Scheduler runs requests on a model.
type Scheduler struct {
	config Config
	model  *model.Model
	runner *model.Runner
	wake   chan struct{} // contains an element if there may be work

	// The next step, which only the stepping goroutine accesses. Chunk i belongs to batch[i].
	chunks   []model.Chunk
	batch    []*sequence
	computed []Computed

	mu       sync.Mutex
	waiting  []*sequence
	running  []*sequence
	draining bool
	idle     chan struct{} // closed while there are no requests
	// The throughput of each rank in tokens per second, and the present measurement window.
	throughput   []float64
	windowStart  time.Time
	windowCounts []int
}

// New returns a scheduler. Run starts it.
func New(m *model.Model, workers int, config Config) *Scheduler {
	s := &Scheduler{
		config: config, model: m, runner: m.NewRunner(workers), wake: make(chan struct{}, 1), idle: make(chan struct{}),
		throughput: make([]float64, config.Ranks), windowCounts: make([]int, config.Ranks),
	}
	close(s.idle)
	return s
}

// Submit queues a request. The end of ctx cancels the request, not only the call.
func (s *Scheduler) Submit(ctx context.Context, r Request) error {
	if err := s.check(r); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.draining:
		return ErrDraining
	case len(s.waiting) >= s.config.MaxQueued:
		return ErrQueueFull
	}
	if s.isIdle() {
		s.idle = make(chan struct{})
	}
	s.waiting = append(s.waiting, &sequence{Request: r, ctx: ctx, sampler: newSampler(r.Sampling)})
	s.signal()
	return nil
}

func (s *Scheduler) check(r Request) error {
	switch {
	case len(r.Prompt) == 0:
		return fmt.Errorf("the prompt is empty")
	case r.MaxNewTokens < 0:
		return fmt.Errorf("%d tokens to generate; allowed is 0 and more", r.MaxNewTokens)
	case r.PromptLogprobs && (r.PromptStart < 0 || r.PromptStart > len(r.Prompt)):
		return fmt.Errorf("log probabilities from prompt token %d on; allowed is 0 to %d", r.PromptStart, len(r.Prompt))
	case len(r.Prompt)+r.MaxNewTokens > s.config.ContextLength:
		return fmt.Errorf("%d prompt tokens and %d to generate exceed the context length %d", len(r.Prompt), r.MaxNewTokens, s.config.ContextLength)
	case r.Rank < 0 || r.Rank >= s.config.Ranks:
		return fmt.Errorf("rank %d; allowed is 0 to %d", r.Rank, s.config.Ranks-1)
	}
	for _, token := range r.Prompt {
		if token < 0 || int(token) >= s.model.Vocab {
			return fmt.Errorf("token %d is outside the vocabulary of %d", token, s.model.Vocab)
		}
	}
	return nil
}

// Drain rejects new requests. The returned channel is closed when no requests are left.
func (s *Scheduler) Drain() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	return s.idle
}

// Loads returns the load of each rank.
func (s *Scheduler) Loads() []Load {
	s.mu.Lock()
	defer s.mu.Unlock()
	loads := make([]Load, s.config.Ranks)
	for _, q := range s.waiting {
		loads[q.Rank].Waiting++
	}
	for _, q := range s.running {
		loads[q.Rank].Running++
	}
	for _, q := range slices.Concat(s.waiting, s.running) {
		loads[q.Rank].UsedTokens += q.computed
		loads[q.Rank].TotalTokens += q.computed + q.pendingPrefill()
	}
	for rank := range loads {
		loads[rank].GenerationThroughput = s.throughput[rank]
	}
	return loads
}

// Run steps requests until ctx ends. The remaining requests end with the error of ctx.
func (s *Scheduler) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			s.abandon(ctx.Err())
			return
		case <-s.wake:
		}
		for ctx.Err() == nil && s.prepare() {
			time.Sleep(s.config.StepDelay)
			s.complete(s.runner.Step(s.chunks))
		}
	}
}

func (s *Scheduler) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *Scheduler) isIdle() bool { return len(s.waiting)+len(s.running) == 0 }

// prepare drops canceled requests, admits waiting requests, and lays out the next step. It returns false if there is no
// work.
func (s *Scheduler) prepare() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = s.dropCancelled(s.waiting)
	s.running = s.dropCancelled(s.running)
	for len(s.waiting) > 0 && len(s.running) < s.config.MaxRunning {
		s.running = append(s.running, s.waiting[0])
		s.waiting = slices.Delete(s.waiting, 0, 1)
	}
	s.closeIfIdle()
	s.layOut()
	return len(s.chunks) > 0
}

func (s *Scheduler) dropCancelled(list []*sequence) []*sequence {
	return slices.DeleteFunc(list, func(q *sequence) bool {
		err := context.Cause(q.ctx)
		if err != nil {
			q.Sink.Done(Result{Err: err})
		}
		return err != nil
	})
}

// closeIfIdle wakes the callers that wait for the drain, and resets the throughput.
func (s *Scheduler) closeIfIdle() {
	if !s.isIdle() {
		return
	}
	select {
	case <-s.idle:
	default:
		close(s.idle)
	}
	clear(s.throughput)
	s.windowStart = time.Time{}
}

// layOut selects the tokens of the next step: one token of every decoding request, and prompt tokens in order of
// admission up to the limit, so that a long prompt delays other requests by at most one chunk.
func (s *Scheduler) layOut() {
	s.chunks, s.batch = s.chunks[:0], s.batch[:0]
	budget := s.config.PrefillTokens
	perToken := s.model.Layers * s.model.TopK
	width := 0
	if s.config.LookAhead != nil {
		width = s.config.LookAhead()
	}
	for _, q := range s.running {
		var tokens []int32
		if pending := q.pendingPrefill(); pending > 0 {
			if budget == 0 {
				continue
			}
			n := min(pending, budget)
			if q.PromptLogprobs {
				n = min(n, scoredChunk)
			}
			budget -= n
			if q.state == nil {
				q.state = s.newState(q)
			}
			tokens = q.Prompt[q.computed:][:n]
		} else {
			tokens = q.state.input[:]
		}
		state := q.state
		state.step = slices.Grow(state.step[:0], len(tokens)*perToken)[:len(tokens)*perToken]
		chunk := model.Chunk{Cache: state.cache, Tokens: tokens, Routes: state.step}
		if width > 0 {
			if state.lookAhead == nil || state.lookAhead.Width != width {
				state.lookAhead = s.model.NewLookAhead(width, 0)
			}
			state.lookAhead.Resize(s.model, len(tokens))
			chunk.LookAhead = state.lookAhead
		}
		chunk.Logits = s.logitsOf(q, len(tokens))
		s.chunks = append(s.chunks, chunk)
		s.batch = append(s.batch, q)
	}
}

// logitsOf returns the buffer for the required logits of a chunk of q: the logits of the last token if the next token
// is generated, and those before prompt tokens whose log probabilities are requested.
func (s *Scheduler) logitsOf(q *sequence, tokens int) []float32 {
	needed := 0
	if tokens >= q.pendingPrefill() {
		needed = 1
	}
	if pending := q.pendingPrefill(); q.PromptLogprobs && pending > 0 {
		needed = max(needed, min(tokens, q.computed+tokens-q.PromptStart))
	}
	if needed == 0 {
		return nil
	}
	q.state.logits = slices.Grow(q.state.logits[:0], needed*s.model.Vocab)[:needed*s.model.Vocab]
	return q.state.logits
}

func (s *Scheduler) newState(q *sequence) *runState {
	// The last generated token is never computed.
	capacity := len(q.Prompt) + max(q.MaxNewTokens-1, 0)
	return &runState{cache: s.model.NewCache(capacity)}
}

// complete distributes the results of the step and removes the requests that have ended.
func (s *Scheduler) complete(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := map[*sequence]bool{}
	ranks := make([]RankStep, s.config.Ranks)
	if err == nil {
		s.computed = s.computed[:0]
		for i, q := range s.batch {
			s.computed = append(s.computed, Computed{q.Rank, s.chunks[i].Tokens, q.state.step, s.chunks[i].LookAhead})
		}
		s.config.OnStep(s.computed)
	}
	for _, q := range s.batch {
		if err != nil {
			q.Sink.Done(Result{Err: err})
			ended[q] = true
			continue
		}
		before := q.computed
		q.computed = q.state.cache.Len()
		if q.KeepRoutes {
			q.state.routes = append(q.state.routes, q.state.step...)
		}
		ranks[q.Rank].add(q, before)
		if q.PromptLogprobs && before < len(q.Prompt) {
			s.scorePrompt(q)
		}
		if q.computed >= len(q.Prompt) && s.advance(q) {
			ended[q] = true
		}
	}
	if s.config.OnBatch != nil && err == nil {
		s.config.OnBatch(ranks)
	}
	s.running = slices.DeleteFunc(s.running, func(q *sequence) bool { return ended[q] })
	s.measure()
	s.closeIfIdle()
}

// add counts the tokens that a step has computed for a request. before is the number of tokens that were computed
// earlier.
func (r *RankStep) add(q *sequence, before int) {
	if before >= len(q.Prompt) {
		r.Decode += q.computed - before
		r.Generated++
		return
	}
	r.Prefill += q.computed - before
	if q.computed >= len(q.Prompt) {
		r.Prompts += len(q.Prompt)
		r.Generated += min(1, q.MaxNewTokens)
	}
}

// scorePrompt sets the log probabilities of the prompt tokens that follow those of the step. After the last prompt
// token it sends all of them to the sink.
func (s *Scheduler) scorePrompt(q *sequence) {
	if q.prompt == nil && q.PromptStart < len(q.Prompt) {
		q.prompt = append(q.prompt, Token{ID: q.Prompt[q.PromptStart]})
	}
	scored := len(q.state.logits) / s.model.Vocab
	for i := range scored {
		next := q.computed - scored + i + 1
		if next <= q.PromptStart || next >= len(q.Prompt) {
			continue
		}
		token := Token{ID: q.Prompt[next]}
		token.Logprob, token.Top = logprobs(q.state.logits[i*s.model.Vocab:][:s.model.Vocab], token.ID, max(q.TopLogprobs, 0))
		q.prompt = append(q.prompt, token)
	}
	if q.computed >= len(q.Prompt) {
		q.Sink.Prompt(q.prompt)
	}
}

// advance generates the next token of a request. If the request has ended, advance calls Done and returns true.
func (s *Scheduler) advance(q *sequence) bool {
	state := q.state
	if q.MaxNewTokens == 0 {
		q.Sink.Done(Result{Routes: state.routes})
		return true
	}
	logits := state.logits[len(state.logits)-s.model.Vocab:]
	token := Token{ID: q.sampler.next(logits)}
	if q.TopLogprobs >= 0 {
		token.Logprob, token.Top = logprobs(logits, token.ID, q.TopLogprobs)
	}
	state.input[0] = token.ID
	state.generated++
	s.windowCounts[q.Rank]++
	stopped := q.Sink.Token(token)
	if !stopped && state.generated < q.MaxNewTokens {
		return false
	}
	q.Sink.Done(Result{Stopped: stopped, Routes: state.routes})
	return true
}

// measure updates the throughput once a second.
func (s *Scheduler) measure() {
	now := time.Now()
	if s.windowStart.IsZero() {
		s.windowStart = now
		clear(s.windowCounts)
		return
	}
	elapsed := now.Sub(s.windowStart)
	if elapsed < time.Second {
		return
	}
	for rank, count := range s.windowCounts {
		s.throughput[rank] = float64(count) / elapsed.Seconds()
	}
	clear(s.windowCounts)
	s.windowStart = now
}

// abandon ends all requests with an error.
func (s *Scheduler) abandon(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	for _, q := range slices.Concat(s.waiting, s.running) {
		q.Sink.Done(Result{Err: err})
	}
	s.waiting, s.running = nil, nil
	s.closeIfIdle()
}
