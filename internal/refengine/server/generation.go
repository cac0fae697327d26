package server

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/refengine/scheduler"
	"github.com/semmoe/operator/internal/tokenizer"
)

// generation is one request under way. The scheduler calls it as a sink; the handler takes events from it. The mailbox
// between them holds at most one event for each token, so that a client who reads slowly never holds up the others.
type generation struct {
	job
	engine  *Engine
	decoder *tokenizer.Stream
	stops   stopMatcher
	started time.Time

	// scored are the prompt's tokens with their log probabilities, if the job asks for them; known with the first event.
	scored []scheduler.Token

	// What the sink alone knows until the last event.
	tokens      []int32
	lastToken   time.Time
	matchedText string
	matchedID   *int32

	mu     sync.Mutex
	events []event
	wake   chan struct{}
}

// event is a token, with the text that became certain with it, or the end.
type event struct {
	token *scheduler.Token
	text  string
	end   *outcome
}

// outcome tells how a generation ended.
type outcome struct {
	err error
	// reason is "stop" or "length", as OpenAI says it; matched is the stop string or token id, if there was one.
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
		// The decoder's last bytes could still complete a stop string; either way the text is over.
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

// take returns the events that have come, waiting for at least one.
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

// each calls f for every event until the end, which it returns.
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
