// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// generation is one request in progress. The scheduler calls it as a sink, and the handler takes events from it. The
// mailbox between them contains at most one event per token, so that a slow client does not delay other requests.
type generation struct {
	job
	engine  *Engine
	decoder *tokenizer.Stream
	stops   stopMatcher
	started time.Time

	// scored contains the prompt's tokens with their log probabilities, if the job requests them. It is available with
	// the first event.
	scored []scheduler.Token

	// Only the sink accesses the following fields before the last event.
	tokens      []int32
	lastToken   time.Time
	matchedText string
	matchedID   *int32

	mu     sync.Mutex
	events []event
	wake   chan struct{}
}

// event is a token with the text that became final with it, or the end.
type event struct {
	token *scheduler.Token
	text  string
	end   *outcome
}

// outcome describes the end of a generation.
type outcome struct {
	err error
	// reason is OpenAI's finish reason, "stop" or "length". matched is the stop string or token ID, if any.
	reason  string
	matched any
	tokens  []int32
	routes  []uint16
	latency time.Duration
}

func newGeneration(e *Engine, j job) *generation {
	return &generation{
		job: j, engine: e, decoder: e.Tokenizer.NewStream(true), stops: stopMatcher{stops: j.stops}, started: time.Now(),
		wake: make(chan struct{}, 1),
	}
}

// Prompt implements scheduler.Sink.
func (g *generation) Prompt(tokens []scheduler.Token) { g.scored = tokens }

// Token implements scheduler.Sink.
func (g *generation) Token(t scheduler.Token) bool {
	now := time.Now()
	g.engine.metrics.token(g, now)
	g.lastToken = now
	g.tokens = append(g.tokens, t.ID)
	if slices.Contains(g.stopTokens, t.ID) {
		g.matchedID = &t.ID
		g.post(event{token: &t})
		return true
	}
	text, matched := g.stops.next(g.decoder.Next(t.ID))
	g.matchedText = matched
	g.post(event{token: &t, text: text})
	return matched != ""
}

// Done implements scheduler.Sink.
func (g *generation) Done(r scheduler.Result) {
	end := &outcome{err: r.Err, reason: "length", tokens: g.tokens, routes: r.Routes, latency: time.Since(g.started)}
	var rest string
	if g.matchedText == "" {
		// The last bytes of the decoder may still complete a stop string. The text ends in both cases.
		rest, g.matchedText = g.stops.next(g.decoder.Flush())
		rest += g.stops.flush()
	}
	switch {
	case g.matchedID != nil:
		end.reason, end.matched = "stop", *g.matchedID
	case g.matchedText != "":
		end.reason, end.matched = "stop", g.matchedText
	}
	g.engine.metrics.done(g, end)
	g.post(event{text: rest, end: end})
}

func (g *generation) post(e event) {
	g.mu.Lock()
	g.events = append(g.events, e)
	g.mu.Unlock()
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// take waits for at least one event and returns all available events.
func (g *generation) take(ctx context.Context) ([]event, error) {
	for {
		g.mu.Lock()
		events := g.events
		g.events = nil
		g.mu.Unlock()
		if len(events) > 0 {
			return events, nil
		}
		select {
		case <-g.wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// each calls f for every event until the end, and returns the end.
func (g *generation) each(ctx context.Context, f func(event) error) (*outcome, error) {
	for {
		events, err := g.take(ctx)
		if err != nil {
			return nil, err
		}
		for _, e := range events {
			if e.end != nil && e.end.err != nil {
				return nil, e.end.err
			}
			if err := f(e); err != nil {
				return nil, err
			}
			if e.end != nil {
				return e.end, nil
			}
		}
	}
}
