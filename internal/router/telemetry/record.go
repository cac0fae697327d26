// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/trace"
)

// Record describes one request. It belongs to the goroutine that handles the request. Methods of a nil Record do
// nothing.
type Record struct {
	ID, Method, Route string
	// Client is the name of the API key; empty without authentication.
	Client string
	// Model is the model that the client requested.
	Model    string
	Stream   bool
	Started  time.Time
	Duration time.Duration
	// Header is the time until the engine's response header; 0 without one.
	Header time.Duration
	Status int
	// Pod, Engine, Rank and Plan describe the place that served the request. Rank is -1 if it is not known, Plan is the
	// short digest.
	Pod, Engine string
	Rank        int
	Plan        string
	// Retries counts the attempts before the last one.
	Retries int
	// Queued is the time in the queue of the router.
	Queued time.Duration
	// Predicted and Observed are the local shares of the request's activations; nil if they are not known.
	Predicted, Observed *float64
	// PromptTokens is the estimated or tokenized length of the prompt. OutputTokens is the number of generated tokens that
	// the engine reports; 0 if it is not known.
	PromptTokens, OutputTokens int64

	// span is nil without tracing. logged is true if the access log gets a line.
	span   trace.Span
	logged bool
}

// noRank is the rank of a request that is not known.
const noRank = -1

// recordKey is the context key of a record.
type recordKey struct{}

func with(ctx context.Context, r *Record) context.Context {
	return context.WithValue(ctx, recordKey{}, r)
}

// Of returns the record of a request, or nil if the request is not recorded.
func Of(ctx context.Context) *Record {
	r, _ := ctx.Value(recordKey{}).(*Record)
	return r
}

// Authenticate sets the client of a request.
func (r *Record) Authenticate(client string) {
	if r != nil {
		r.Client = client
	}
}

// Retry counts a failed attempt.
func (r *Record) Retry() {
	if r != nil {
		r.Retries++
	}
}

// Wait adds a time in the queue of the router.
func (r *Record) Wait(waited time.Duration) {
	if r != nil {
		r.Queued += waited
	}
}

// Observe sets the observed local share.
func (r *Record) Observe(local, total int64) {
	if r != nil && total > 0 {
		share := float64(local) / float64(total)
		r.Observed = &share
	}
}

// Generated sets the number of generated tokens.
func (r *Record) Generated(tokens int64) {
	if r != nil {
		r.OutputTokens = tokens
	}
}
