// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"context"
	"errors"

	"github.com/semmoe/operator/internal/refengine/model"
)

var (
	// ErrQueueFull reports that a request was rejected because the queue is full.
	ErrQueueFull = errors.New("the request queue is full")
	// ErrDraining reports that a request was rejected because the engine is shutting down.
	ErrDraining = errors.New("the engine is shutting down")
)

// Request is a request for the continuation of a prompt.
type Request struct {
	Prompt []int32
	// MaxNewTokens is the maximum number of tokens to generate; 0 only computes the prompt.
	MaxNewTokens int
	Sampling     Sampling
	// TopLogprobs requests the log probability of each generated token, and of that number of most likely tokens; -1
	// for none.
	TopLogprobs int
	// PromptLogprobs requests the log probabilities of the prompt's tokens after PromptStart, according to TopLogprobs.
	PromptLogprobs bool
	PromptStart    int
	// KeepRoutes requests the routes in the result.
	KeepRoutes bool
	// Rank is the data-parallel rank that serves the request.
	Rank int
	// Sink receives the output of the request.
	Sink Sink
}

// Sink receives the tokens of a request. Its methods are called by the goroutine that steps all requests, so they must
// return quickly and never wait for a client.
type Sink interface {
	// Prompt receives the prompt's tokens from PromptStart, before the first generated token, if the request asked for
	// their log probabilities. The first one has no log probability.
	Prompt([]Token)
	// Token receives a generated token. It returns true to end the request with this token.
	Token(Token) (stop bool)
	// Done is called once, after all other calls.
	Done(Result)
}

// Token is a token of a response or a prompt.
type Token struct {
	ID int32
	// Logprob and Top are set if the request asked for log probabilities. Top is in descending order of probability.
	Logprob float32
	Top     []TokenLogprob
}

// TokenLogprob is a token and its natural log probability.
type TokenLogprob struct {
	ID      int32
	Logprob float32
}

// Result describes the end of a request.
type Result struct {
	// Err is nil if the sink stopped the request, or if it reached MaxNewTokens. For a canceled request it is the
	// context's error.
	Err error
	// Stopped is true if the sink ended the request.
	Stopped bool
	// Routes are the selected experts of every computed token, which are all tokens except the last generated one:
	// [tokens][layers][top-k].
	Routes []uint16
}

// sequence is an accepted request.
type sequence struct {
	Request
	ctx     context.Context
	sampler *sampler
	// computed is the number of tokens in the cache.
	computed int
	// prompt contains the prompt's tokens with their log probabilities, as far as they are computed.
	prompt []Token
	state  *runState // nil until its first step
}

// pendingPrefill returns the number of prompt tokens that are not computed yet.
func (q *sequence) pendingPrefill() int { return max(0, len(q.Prompt)-q.computed) }

// runState is the state of a running request.
type runState struct {
	cache *model.Cache
	// logits are the logits of the step's last token, or of several tokens if the prompt's log probabilities are
	// requested.
	logits []float32
	// input is the last generated token, which the next step computes.
	input     [1]int32
	generated int
	routes    []uint16 // all, if kept
	step      []uint16 // of the current step
	lookAhead *model.LookAhead
}
