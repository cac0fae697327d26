package scheduler

import (
	"context"
	"errors"

	"github.com/semmoe/operator/internal/refengine/model"
)

var (
	// ErrQueueFull refuses a request because too many wait.
	ErrQueueFull = errors.New("the request queue is full")
	// ErrDraining refuses a request because the engine shuts down.
	ErrDraining = errors.New("the engine is shutting down")
)

// Request asks for the continuation of a prompt.
type Request struct {
	Prompt []int32
	// MaxNewTokens is the most tokens to generate; 0 only computes the prompt.
	MaxNewTokens int
	Sampling     Sampling
	// TopLogprobs asks for the log probability of each generated token and of that many most likely ones; -1 for none.
	TopLogprobs int
	// PromptLogprobs asks for the log probabilities of the prompt's tokens behind PromptStart, as TopLogprobs says.
	PromptLogprobs bool
	PromptStart    int
	// KeepRoutes asks for the routes in the result.
	KeepRoutes bool
	// Rank is the data-parallel rank that serves the request.
	Rank int
	// Sink receives what the request yields.
	Sink Sink
}

// Sink receives the tokens of a request. Its methods are called by the goroutine that steps all requests, so they must
// return quickly and never wait for a client.
type Sink interface {
	// Prompt receives the prompt's tokens from PromptStart on, before the first generated token, if the request asked for
	// their log probabilities. The first one has none: nothing, or nothing that was asked for, is before it.
	Prompt([]Token)
	// Token receives a generated token; it returns true to end the request with this token.
	Token(Token) (stop bool)
	// Done is called once, last.
	Done(Result)
}

// Token is a token of an answer or a prompt.
type Token struct {
	ID int32
	// Logprob and Top are set if the request asked for log probabilities; Top is sorted, the most likely first.
	Logprob float32
	Top     []TokenLogprob
}

// TokenLogprob is a token and its natural log probability.
type TokenLogprob struct {
	ID      int32
	Logprob float32
}

// Result tells how a request ended.
type Result struct {
	// Err is nil if the request ran to its end: the sink stopped it, or it reached MaxNewTokens. It is the context's error
	// for a cancelled request.
	Err error
	// Stopped is true if the sink ended the request.
	Stopped bool
	// Routes are the chosen experts of every token that was computed, all but the last one generated:
	// [tokens][layers][top-k].
	Routes []uint16
}

// sequence is an accepted request.
type sequence struct {
	Request
	ctx     context.Context
	sampler *sampler
	// computed is how many tokens lie in the cache.
	computed int
	// prompt holds the prompt's tokens with their log probabilities, as far as they are computed.
	prompt []Token
	state  *runState // nil until its first step
}

// pendingPrefill is how many prompt tokens are still to be computed.
func (q *sequence) pendingPrefill() int { return max(0, len(q.Prompt)-q.computed) }

// runState is the memory of a request that runs.
type runState struct {
	cache *model.Cache
	// logits are those of the step's last token, or of several where a prompt's log probabilities are asked for.
	logits []float32
	// input is the last generated token, which the next step computes.
	input     [1]int32
	generated int
	routes    []uint16 // all, if kept
	step      []uint16 // those of the current step
	lookAhead *model.LookAhead
}
