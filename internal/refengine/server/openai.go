// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// openAIRequest contains the fields that completions and chat completions share.
type openAIRequest struct {
	parameters
	Model         string `json:"model"`
	MaxTokens     *int   `json:"max_tokens"`
	StreamOptions *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
}

// openAIResponse is a response or a part of a stream.
type openAIResponse struct {
	ID      string  `json:"id"`
	Object  string  `json:"object"`
	Created int64   `json:"created"`
	Model   string  `json:"model"`
	Choices []any   `json:"choices"`
	Usage   *usage  `json:"usage,omitempty"`
	SGLExt  *sglExt `json:"sglext,omitempty"`
}

// sglExt is SGLang's extension of OpenAI's responses.
type sglExt struct {
	RoutedExperts string `json:"routed_experts"`
}

// format contains the differences between completions and chat completions.
type format struct {
	idPrefix, object, chunkObject string
	// first is sent before the first text of a stream. It may be nil.
	first func() any
	// choice returns the choice of a complete response, and chunk the choice of a part of a stream. end is nil except
	// in the last part.
	choice func(g *generation, text string, tokens []scheduler.Token, end *outcome) any
	chunk  func(g *generation, text string, token *scheduler.Token, end *outcome) any
}

// answer runs a job and writes the response.
func (e *Engine) answer(w http.ResponseWriter, r *http.Request, req openAIRequest, j job, f format) error {
	if j.refused != nil {
		stream := newEventStream(w)
		_ = stream.send(e.Dialect.failure(r.URL.Path, j.refused)) // an error means that the client has disconnected
		_ = stream.sendRaw("[DONE]")
		return nil
	}
	g, err := e.start(r.Context(), j)
	if err != nil {
		return err
	}
	head := openAIResponse{ID: newID(f.idPrefix), Object: f.object, Created: time.Now().Unix(), Model: e.ServedName}
	if req.Stream {
		head.Object = f.chunkObject
		stream := newEventStream(w)
		stream.finish(r.Context(), g.streamOpenAI(r.Context(), stream, head, f, req.StreamOptions != nil && req.StreamOptions.IncludeUsage))
		return nil
	}
	var text string
	var tokens []scheduler.Token
	end, err := g.each(r.Context(), func(ev event) error {
		text += ev.text
		if ev.token != nil {
			tokens = append(tokens, *ev.token)
		}
		return nil
	})
	if err != nil {
		return err
	}
	head.Choices = []any{f.choice(g, text, tokens, end)}
	head.Usage = g.usage(end)
	head.SGLExt = g.extension(end)
	writeJSON(w, http.StatusOK, e.Dialect.shape(head, part{g: g, end: end, whole: true}))
	return nil
}

func (g *generation) streamOpenAI(ctx context.Context, stream *eventStream, head openAIResponse, f format, includeUsage bool) error {
	send := func(choice any, p part) error {
		chunk := head
		chunk.Choices = []any{choice}
		return stream.send(g.engine.Dialect.shape(chunk, p))
	}
	if f.first != nil {
		if err := send(f.first(), part{g: g, first: true}); err != nil {
			return err
		}
	}
	end, err := g.each(ctx, func(ev event) error {
		if ev.end == nil && ev.text == "" && g.topLogprobs < 0 {
			return nil // the character is not complete yet
		}
		return send(f.chunk(g, ev.text, ev.token, ev.end), part{g: g, end: ev.end, last: ev.end != nil && !includeUsage})
	})
	if err != nil {
		return err
	}
	head.Choices = []any{}
	if ext := g.extension(end); ext != nil {
		last := head
		last.SGLExt = ext
		if err := stream.send(g.engine.Dialect.shape(last, part{g: g, end: end})); err != nil {
			return err
		}
	}
	if includeUsage {
		last := head
		last.Usage = g.usage(end)
		return stream.send(g.engine.Dialect.shape(last, part{g: g, end: end, last: true}))
	}
	return nil
}

func (g *generation) usage(end *outcome) *usage {
	return &usage{len(g.prompt), len(end.tokens), len(g.prompt) + len(end.tokens)}
}

func (g *generation) extension(end *outcome) *sglExt {
	if text := g.wireRoutes(end); text != nil {
		return &sglExt{RoutedExperts: *text}
	}
	return nil
}

// finishReason returns nil (JSON null) before the end.
func finishReason(end *outcome) (reason, matched any) {
	if end == nil {
		return nil, nil
	}
	return end.reason, end.matched
}
