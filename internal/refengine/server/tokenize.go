// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"net/http"
)

type tokenizeRequest struct {
	Model    string          `json:"model"`
	Prompt   json.RawMessage `json:"prompt"`
	Messages []chatMessage   `json:"messages"`
}

// tokenizeResponse contains a list of tokens and its length for a string, or a list of both for a list of strings.
type tokenizeResponse struct {
	Tokens      any `json:"tokens"`
	Count       any `json:"count"`
	MaxModelLen int `json:"max_model_len"`
}

func (e *Engine) tokenize(w http.ResponseWriter, r *http.Request) error {
	var req tokenizeRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := e.checkModel(req.Model); err != nil {
		return err
	}
	if (req.Prompt == nil) == (req.Messages == nil) {
		return invalid("prompt", "give either prompt or messages")
	}
	var one string
	var many []string
	switch {
	case req.Messages != nil:
		text, err := renderChat(req.Messages)
		if err != nil {
			return err
		}
		one = text
	case json.Unmarshal(req.Prompt, &one) == nil:
	case json.Unmarshal(req.Prompt, &many) == nil:
		writeJSON(w, http.StatusOK, e.tokenizeAll(many))
		return nil
	default:
		return badRequest("prompt", "prompt must be a string or a list of strings")
	}
	tokens := e.Tokenizer.Encode(one)
	answer := asObject(tokenizeResponse{tokens, len(tokens), e.ContextLength})
	e.Dialect.edit(answer, nil)
	writeJSON(w, http.StatusOK, answer)
	return nil
}

func (e *Engine) tokenizeAll(texts []string) tokenizeResponse {
	tokens, counts := [][]int32{}, []int{}
	for _, text := range texts {
		ids := e.Tokenizer.Encode(text)
		tokens, counts = append(tokens, ids), append(counts, len(ids))
	}
	return tokenizeResponse{tokens, counts, e.ContextLength}
}
