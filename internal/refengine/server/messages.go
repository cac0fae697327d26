// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"strings"
)

// messagesPath is the route of Anthropic's Messages API. This file follows SGLang (srt/entrypoints/anthropic of
// 0.5.17): a request becomes a chat completion with the rank in its header. Members of the body cannot select a rank.
const messagesPath = "/v1/messages"

type messagesRequest struct {
	Model         string        `json:"model"`
	Messages      []chatMessage `json:"messages"`
	System        *chatContent  `json:"system"`
	MaxTokens     *int          `json:"max_tokens"`
	StopSequences []string      `json:"stop_sequences"`
	Temperature   *float64      `json:"temperature"`
	TopP          *float64      `json:"top_p"`
	TopK          *int          `json:"top_k"`
	Stream        bool          `json:"stream"`
}

type message struct {
	ID         string        `json:"id"`
	Type       string        `json:"type"`
	Role       string        `json:"role"`
	Content    []textBlock   `json:"content"`
	Model      string        `json:"model"`
	StopReason string        `json:"stop_reason,omitempty"`
	Usage      messagesUsage `json:"usage"`
}

type textBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type messagesUsage struct {
	InputTokens  int `json:"input_tokens"`
	OutputTokens int `json:"output_tokens"`
}

// stopReasons maps finish reasons to Anthropic's stop reasons.
var stopReasons = map[string]string{"stop": "end_turn", "length": "max_tokens"}

// readMessages parses a request and returns its prompt.
func (e *Engine) readMessages(w http.ResponseWriter, r *http.Request) (req messagesRequest, prompt []int32, err error) {
	if err := decode(w, r, &req); err != nil {
		return req, nil, err
	}
	if req.Model == "" {
		return req, nil, badRequest("model", "model is missing")
	}
	if err := e.checkModel(req.Model); err != nil {
		return req, nil, err
	}
	for i, m := range req.Messages {
		if m.Role != "user" && m.Role != "assistant" {
			return req, nil, badRequest("messages", "message %d has role %q; allowed are user and assistant", i, m.Role)
		}
	}
	turns := req.Messages
	if req.System != nil && len(turns) > 0 {
		turns = append([]chatMessage{{Role: "system", Content: req.System}}, turns...)
	}
	text, err := renderChat(turns)
	if err != nil {
		return req, nil, err
	}
	return req, e.Tokenizer.Encode(text), nil
}

func (e *Engine) countTokens(w http.ResponseWriter, r *http.Request) error {
	_, prompt, err := e.readMessages(w, r)
	if err != nil {
		return err
	}
	count := object{"input_tokens": len(prompt)}
	e.Dialect.edit(count, nil)
	writeJSON(w, http.StatusOK, count)
	return nil
}

func (e *Engine) messages(w http.ResponseWriter, r *http.Request) error {
	req, prompt, err := e.readMessages(w, r)
	switch {
	case err != nil:
		return err
	case req.MaxTokens == nil:
		return invalid("max_tokens", "max_tokens is missing")
	case *req.MaxTokens <= 0:
		return badRequest("max_tokens", "max_tokens is %d; it must be positive", *req.MaxTokens)
	}
	j, err := e.prepare(r, prompt, parameters{
		samplingParameters: samplingParameters{Temperature: req.Temperature, TopP: req.TopP, TopK: req.TopK, Stop: req.StopSequences},
		Stream:             req.Stream, maxTokens: req.MaxTokens, maxTokensName: "max_tokens",
	})
	if err != nil {
		return err
	}
	head := message{ID: newID("msg_"), Type: "message", Role: "assistant", Content: []textBlock{}, Model: e.ServedName}
	if j.refused != nil {
		e.Dialect.refuseMessage(newEventStream(w), head, j.refused)
		return nil
	}
	g, err := e.start(r.Context(), j)
	if err != nil {
		return err
	}
	head.Usage.InputTokens = len(prompt)
	if req.Stream {
		stream := newEventStream(w)
		if err := g.streamMessage(r.Context(), stream, head); err != nil && r.Context().Err() == nil {
			_ = stream.sendNamed("error", anthropicError(asAPIError(err))) // an error means that the client has disconnected
		}
		return nil
	}
	var text strings.Builder
	end, err := g.each(r.Context(), func(ev event) error { text.WriteString(ev.text); return nil })
	if err != nil {
		return err
	}
	head.Content = []textBlock{{"text", text.String()}}
	head.StopReason, head.Usage.OutputTokens = stopReasons[end.reason], len(end.tokens)
	writeJSON(w, http.StatusOK, head)
	return nil
}

// streamMessage sends a message as events. The first event is sent with the first token.
func (g *generation) streamMessage(ctx context.Context, stream *eventStream, head message) error {
	begun, open := false, false
	send := func(kind string, members object) error {
		members["type"] = kind
		g.engine.Dialect.edit(members, g)
		return stream.sendNamed(kind, members)
	}
	end, err := g.each(ctx, func(ev event) error {
		if !begun {
			begun = true
			if err := send("message_start", object{"message": asObject(head)}); err != nil {
				return err
			}
		}
		if ev.text == "" {
			return nil
		}
		if !open {
			open = true
			if err := send("content_block_start", object{"index": 0, "content_block": textBlock{Type: "text"}}); err != nil {
				return err
			}
		}
		return send("content_block_delta", object{"index": 0, "delta": textBlock{"text_delta", ev.text}})
	})
	if err != nil {
		return err
	}
	if open {
		if err := send("content_block_stop", object{"index": 0}); err != nil {
			return err
		}
	}
	err = send("message_delta", object{"delta": object{"stop_reason": stopReasons[end.reason]}, "usage": object{"output_tokens": len(end.tokens)}})
	if err != nil {
		return err
	}
	return send("message_stop", object{})
}

// sendNamed writes an event with a name.
func (s *eventStream) sendNamed(name string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if _, err := s.w.Write([]byte("event: " + name + "\ndata: " + string(text) + "\n\n")); err != nil {
		return err
	}
	return s.controller.Flush()
}

// anthropicTypes are the types of Anthropic's errors by status.
var anthropicTypes = map[int]string{
	http.StatusBadRequest: "invalid_request_error", http.StatusNotFound: "not_found_error", http.StatusRequestEntityTooLarge: "request_too_large",
	http.StatusServiceUnavailable: "overloaded_error",
}

// anthropicError returns an error in the format of the Messages API.
func anthropicError(e *apiError) map[string]any {
	return map[string]any{
		"type": "error", "error": map[string]any{"type": cmp.Or(anthropicTypes[e.status], "api_error"), "message": e.Message},
	}
}
