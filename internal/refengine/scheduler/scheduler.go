package scheduler

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/refengine/model"
)

// scoredChunk is how many tokens of a prompt a step computes where their log probabilities are asked for: it needs the
// logits of each, over the whole vocabulary.
const scoredChunk = 128

// Config bounds the scheduler.
type Config struct {
	// MaxRunning is how many requests are stepped together, MaxQueued how many may wait for that.
	MaxRunning, MaxQueued int
	// PrefillTokens is how many prompt tokens a step may compute beside the decoding requests.
	PrefillTokens int
	// ContextLength is the most tokens of a sequence, prompt and continuation together.
	ContextLength int
	// Ranks is the number of data-parallel ranks among which requests are counted.
	Ranks int
	// OnStep is called after each step for every request in it, with what was computed. It must not keep it.
	OnStep func(Computed)
	// OnBatch is called after each step with what was computed for each rank; nil for nothing. It must not keep it.
	OnBatch func([]RankStep)
	// LookAhead is how many experts of each look-ahead OnStep wants; 0 for none.
	LookAhead int
	// StepDelay is added to each step, to test what notices a slow engine.
	StepDelay time.Duration
}

// Computed are the tokens of one request in one step.
type Computed struct {
	// Rank is the request's data-parallel rank.
	Rank   int
	Tokens []int32
	// Routes are the chosen experts [tokens][layers][top-k].
	Routes []uint16
	// LookAhead is what the gates said before attention; nil where nobody asked for it.
	LookAhead *model.LookAhead
}

// RankStep is what one step has computed for a rank.
type RankStep struct {
	// Prefill and Decode are the tokens of prompts, and those that follow one.
	Prefill, Decode int
	// Generated is the number of new tokens, and Prompts the length of the prompts whose computation has ended.
	Generated, Prompts int
}

// Load is what one rank has to do.
type Load struct {
	Running, Waiting int
	// UsedTokens are those in the caches of running requests; TotalTokens adds the prompt tokens still to be computed.
	UsedTokens, TotalTokens int
	// GenerationThroughput is tokens per second over the last whole second of work, 0 when idle.
	GenerationThroughput float64
}

// Scheduler runs requests on a model.
type Scheduler struct {
	config Config
	model  *model.Model
	runner *model.Runner
	wake   chan struct{} // holds a token when there may be work

	// The next step, known to the stepping goroutine alone: chunk i is of batch[i].
	chunks []model.Chunk
	batch  []*sequence

	mu       sync.Mutex
	waiting  []*sequence
	running  []*sequence
	draining bool
	idle     chan struct{} // closed while there is no request
	// Tokens per second of each rank, and the window in which the next figure is counted.
	throughput   []float64
	windowStart  time.Time
	windowCounts []int
}

// New returns a scheduler; Run makes it work.
func New(m *model.Model, workers int, config Config) *Scheduler {
	s := &Scheduler{
		config: config, model: m, runner: m.NewRunner(workers), wake: make(chan struct{}, 1), idle: make(chan struct{}),
		throughput: make([]float64, config.Ranks), windowCounts: make([]int, config.Ranks),
	}
	close(s.idle)
	return s
}

// Submit queues a request. ctx ends the request, not only the call.
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

// Drain refuses new requests from now on. The returned channel is closed when none is left.
func (s *Scheduler) Drain() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	return s.idle
}

// Loads reports the load of each rank.
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

// Run steps requests until ctx ends; requests that are left then end with ctx's error.
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

// prepare drops cancelled requests, admits waiting ones, and lays out the next step; it returns false if there is none.
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

// closeIfIdle wakes whoever waits for the drain, and forgets rates that no longer hold.
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

// layOut chooses the tokens of the next step: one of every decoding request, and prompt tokens in order of admission up
// to the bound, so that a long prompt delays the others by a chunk at most.
func (s *Scheduler) layOut() {
	s.chunks, s.batch = s.chunks[:0], s.batch[:0]
	budget := s.config.PrefillTokens
	perToken := s.model.Layers * s.model.TopK
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
		if s.config.LookAhead > 0 {
			if state.lookAhead == nil {
				state.lookAhead = s.model.NewLookAhead(s.config.LookAhead, 0)
			}
			state.lookAhead.Resize(s.model, len(tokens))
			chunk.LookAhead = state.lookAhead
		}
		chunk.Logits = s.logitsOf(q, len(tokens))
		s.chunks = append(s.chunks, chunk)
		s.batch = append(s.batch, q)
	}
}

// logitsOf is the room for the logits of the last tokens of a chunk of q that are needed: of its last one where the next
// token follows, and of those before prompt tokens whose log probabilities are asked for.
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

// complete hands out what the step gave and removes the requests that ended.
func (s *Scheduler) complete(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := map[*sequence]bool{}
	ranks := make([]RankStep, s.config.Ranks)
	for i, q := range s.batch {
		if err != nil {
			q.Sink.Done(Result{Err: err})
			ended[q] = true
			continue
		}
		before := q.computed
		q.computed = q.state.cache.Len()
		s.config.OnStep(Computed{q.Rank, s.chunks[i].Tokens, q.state.step, s.chunks[i].LookAhead})
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

// add counts what a step has computed for a request, of which so many tokens were computed before.
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

// scorePrompt gives the prompt tokens that follow those of the step their log probabilities, and all of them to the sink
// with the last.
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

// advance gives a request its next token; it returns true, and has called Done, if the request ended.
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

// abandon ends all requests.
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
