// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"
)

// responsesPath is the route of OpenAI's Responses API. Like SGLang before 0.5.20 and vLLM before 0.33.0, the engine
// ignores the rank of these requests (srt/entrypoints/openai/serving_responses.py of 0.5.17,
// vllm/entrypoints/openai/responses of 0.32.0). It does not store responses, like vLLM without
// VLLM_ENABLE_RESPONSES_API_STORE.
const responsesPath = "/v1/responses"

type responsesRequest struct {
	parameters
	Model              string         `json:"model"`
	Input              responsesInput `json:"input"`
	Instructions       string         `json:"instructions"`
	MaxOutputTokens    *int           `json:"max_output_tokens"`
	PreviousResponseID *string        `json:"previous_response_id"`
	Background         bool           `json:"background"`
	RequestID          string         `json:"request_id"`
}

// responsesInput is a string or a list of messages.
type responsesInput []chatMessage

func (in *responsesInput) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*in = responsesInput{textMessage("user", one)}
		return nil
	}
	var items []struct {
		Type    string          `json:"type"`
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	}
	if err := json.Unmarshal(text, &items); err != nil {
		return errors.New("input must be a string or a list of items")
	}
	for _, item := range items {
		if item.Type != "" && item.Type != "message" {
			return badRequest("input", "input has an item of type %q; this engine reads messages only", item.Type)
		}
		var content string
		if json.Unmarshal(item.Content, &content) != nil {
			var parts []textBlock
			if err := json.Unmarshal(item.Content, &parts); err != nil {
				return badRequest("input", "the content of a message must be a string or a list of parts")
			}
			for _, part := range parts {
				if part.Type != "input_text" && part.Type != "output_text" {
					return badRequest("input", "input has content of type %q; this engine reads text only", part.Type)
				}
				content += part.Text
			}
		}
		*in = append(*in, textMessage(item.Role, content))
	}
	return nil
}

type object = map[string]any

func (e *Engine) responses(w http.ResponseWriter, r *http.Request) error {
	var req responsesRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := e.checkModel(req.Model); err != nil {
		return err
	}
	switch {
	case req.PreviousResponseID != nil:
		return noResponse(*req.PreviousResponseID)
	case req.Background:
		return badRequest("background", "this engine stores no responses: there is no background mode")
	}
	turns := []chatMessage(req.Input)
	if req.Instructions != "" {
		turns = append([]chatMessage{textMessage("system", req.Instructions)}, turns...)
	}
	if len(req.Input) == 0 {
		return invalid("input", "input is missing")
	}
	text, err := renderChat(turns)
	if err != nil {
		return err
	}
	req.maxTokens, req.maxTokensName, req.defaultMaxTokens = req.MaxOutputTokens, "max_output_tokens", e.ContextLength
	if req.maxTokens != nil {
		left := *req.maxTokens - e.Dialect.responsesHeadroom
		req.maxTokens = &left
	}
	j, err := e.prepare(r, e.Tokenizer.Encode(text), req.parameters)
	if err != nil {
		return err
	}
	g, err := e.start(r.Context(), j)
	if err != nil {
		return err
	}
	if req.RequestID == "" {
		req.RequestID = newID("resp_")
	}
	head := object{
		"id": req.RequestID, "object": "response", "created_at": time.Now().Unix(), "model": e.ServedName, "status": "in_progress", "output": []any{},
		"incomplete_details": nil, "instructions": nil, "parallel_tool_calls": true, "previous_response_id": nil, "store": false,
		"tool_choice": "auto", "tools": []any{}, "usage": nil, "background": false,
	}
	if req.Stream {
		stream := newEventStream(w)
		if err := g.streamResponse(r.Context(), stream, head); err != nil && r.Context().Err() == nil {
			_ = stream.sendNamed("error", object{"type": "error", "message": err.Error()}) // an error means that the client has disconnected
		}
		return nil
	}
	var answer strings.Builder
	end, err := g.each(r.Context(), func(ev event) error { answer.WriteString(ev.text); return nil })
	if err != nil {
		return err
	}
	g.complete(head, outputItem(answer.String(), "completed"), end)
	e.Dialect.edit(head, g)
	writeJSON(w, http.StatusOK, head)
	return nil
}

// outputItem returns the item of a response with its text.
func outputItem(text, status string) object {
	return object{"id": newID("msg_"), "type": "message", "role": "assistant", "status": status, "content": []any{outputText(text)}}
}

func outputText(text string) object {
	return object{"type": "output_text", "text": text, "annotations": []any{}}
}

// complete fills in a finished response.
func (g *generation) complete(response, item object, end *outcome) {
	u := g.usage(end)
	response["status"], response["output"] = "completed", []any{item}
	response["usage"] = object{
		"input_tokens": u.PromptTokens, "input_tokens_details": object{"cached_tokens": 0}, "output_tokens": u.CompletionTokens,
		"output_tokens_details": object{"reasoning_tokens": 0}, "total_tokens": u.TotalTokens,
	}
	if end.reason == "length" {
		response["status"], response["incomplete_details"] = "incomplete", object{"reason": "max_output_tokens"}
		if g.engine.Dialect.alwaysCompleted {
			response["status"], response["incomplete_details"] = "completed", nil
		}
		if g.engine.Dialect.incompleteItems {
			item["status"] = "incomplete"
		}
	}
}

// streamResponse sends a response as events.
func (g *generation) streamResponse(ctx context.Context, stream *eventStream, response object) error {
	sequence := 0
	send := func(kind string, members object) error {
		members["type"], members["sequence_number"] = kind, sequence
		sequence++
		g.engine.Dialect.edit(members, g)
		return stream.sendNamed(kind, members)
	}
	item := outputItem("", "in_progress")
	at := func(members object) object {
		members["item_id"], members["output_index"], members["content_index"] = item["id"], 0, 0
		return members
	}
	item["content"] = []any{}
	for _, first := range []struct {
		kind    string
		members object
	}{
		{"response.created", object{"response": response}}, {"response.in_progress", object{"response": response}},
		{"response.output_item.added", object{"output_index": 0, "item": item}}, {"response.content_part.added", at(object{"part": outputText("")})},
	} {
		if err := send(first.kind, first.members); err != nil {
			return err
		}
	}
	var text strings.Builder
	end, err := g.each(ctx, func(ev event) error {
		if ev.text == "" {
			return nil
		}
		text.WriteString(ev.text)
		return send("response.output_text.delta", at(object{"delta": ev.text, "logprobs": []any{}}))
	})
	if err != nil {
		return err
	}
	item["status"], item["content"] = "completed", []any{outputText(text.String())}
	g.complete(response, item, end)
	for _, last := range []struct {
		kind    string
		members object
	}{
		{"response.output_text.done", at(object{"text": text.String(), "logprobs": []any{}})},
		{"response.content_part.done", at(object{"part": outputText(text.String())})},
		{"response.output_item.done", object{"output_index": 0, "item": item}},
		{"response." + g.engine.Dialect.lastEvent(response["status"].(string)), object{"response": response}},
	} {
		if err := send(last.kind, last.members); err != nil {
			return err
		}
	}
	return nil
}

// storedResponse responds to requests for a stored response with an error, because responses are not stored.
func (e *Engine) storedResponse(_ http.ResponseWriter, r *http.Request) error {
	return noResponse(r.PathValue("id"))
}

func noResponse(id string) error {
	err := badRequest("response_id", "Response with id '%s' not found.", id)
	err.status, err.unstored = http.StatusNotFound, true
	return err
}
