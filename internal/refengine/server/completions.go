// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http"
	"slices"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// defaultCompletionTokens is OpenAI's default of max_tokens for completions.
const defaultCompletionTokens = 16

// maxTopLogprobs is OpenAI's limit of logprobs.
const maxTopLogprobs = 20

type completionRequest struct {
	openAIRequest
	Prompt   *promptInput `json:"prompt"`
	Logprobs *int         `json:"logprobs"`
	Echo     bool         `json:"echo"`
}

type completionChoice struct {
	Index        int                 `json:"index"`
	Text         string              `json:"text"`
	Logprobs     *completionLogprobs `json:"logprobs"`
	FinishReason any                 `json:"finish_reason"`
	MatchedStop  any                 `json:"matched_stop"`
}

type completionLogprobs struct {
	TextOffset []int `json:"text_offset"`
	// TokenLogprobs and TopLogprobs are null for the first token of an echoed prompt.
	TokenLogprobs []*float32           `json:"token_logprobs"`
	Tokens        []string             `json:"tokens"`
	TopLogprobs   []map[string]float32 `json:"top_logprobs"`
}

func (e *Engine) completions(w http.ResponseWriter, r *http.Request) error {
	var req completionRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := e.checkModel(req.Model); err != nil {
		return err
	}
	if req.Prompt == nil {
		missing := badRequest("prompt", "prompt is missing; give a string or a list of token ids")
		missing.invalid = e.Dialect.strictCompletions
		return missing
	}
	req.maxTokens, req.maxTokensName, req.defaultMaxTokens, req.echo = req.MaxTokens, "max_tokens", defaultCompletionTokens, req.Echo
	if e.Dialect.strictCompletions && req.MaxTokens != nil && *req.MaxTokens <= 0 {
		return invalid("max_tokens", "max_tokens must be positive")
	}
	j, err := e.prepare(r, e.tokens(*req.Prompt), req.parameters)
	if err != nil {
		return err
	}
	if req.Logprobs != nil {
		if *req.Logprobs < 0 || *req.Logprobs > maxTopLogprobs {
			return badRequest("logprobs", "logprobs is %d; allowed is 0 to %d", *req.Logprobs, maxTopLogprobs)
		}
		j.topLogprobs = *req.Logprobs
	}
	// As in SGLang, an echoed prompt has log probabilities if at least one alternative is requested.
	j.promptLogprobs = req.Echo && j.topLogprobs > 0
	echo := ""
	if req.Echo {
		echo = e.echo(*req.Prompt)
	}
	return e.answer(w, r, req.openAIRequest, j, format{
		idPrefix: "cmpl-", object: "text_completion", chunkObject: "text_completion",
		choice: func(g *generation, text string, tokens []scheduler.Token, end *outcome) any {
			reason, matched := finishReason(end)
			return completionChoice{Text: echo + text, Logprobs: e.completionLogprobs(j, g.scored, tokens), FinishReason: reason, MatchedStop: matched}
		},
		chunk: func(g *generation, text string, token *scheduler.Token, end *outcome) any {
			reason, matched := finishReason(end)
			choice := completionChoice{Text: echo + text, FinishReason: reason, MatchedStop: matched}
			switch {
			case echo != "" && token != nil:
				choice.Logprobs = e.completionLogprobs(j, g.scored, []scheduler.Token{*token})
			case token != nil:
				choice.Logprobs = e.completionLogprobs(j, nil, []scheduler.Token{*token})
			}
			echo = "" // the first chunk contains the prompt
			return choice
		},
	})
}

// echo returns the text of a prompt: the text that the client sent, or the text of its tokens.
func (e *Engine) echo(p promptInput) string {
	if p.text != nil {
		return *p.text
	}
	return e.Tokenizer.Decode(p.ids, true)
}

// completionLogprobs returns the log probabilities, or nil if they are not requested. The first token of a prompt has
// none.
func (e *Engine) completionLogprobs(j job, prompt, tokens []scheduler.Token) *completionLogprobs {
	if j.topLogprobs < 0 {
		return nil
	}
	text := func(id int32) string { return e.Tokenizer.Decode([]int32{id}, false) }
	out := &completionLogprobs{TextOffset: []int{}, TokenLogprobs: []*float32{}, Tokens: []string{}, TopLogprobs: []map[string]float32{}}
	offset := 0
	for i, token := range slices.Concat(prompt, tokens) {
		piece := text(token.ID)
		out.Tokens = append(out.Tokens, piece)
		out.TextOffset = append(out.TextOffset, offset)
		offset += len([]rune(piece))
		if i == 0 && len(prompt) > 0 {
			out.TokenLogprobs, out.TopLogprobs = append(out.TokenLogprobs, nil), append(out.TopLogprobs, nil)
			continue
		}
		out.TokenLogprobs = append(out.TokenLogprobs, &token.Logprob)
		top := map[string]float32{}
		for _, t := range token.Top {
			// Tokens that are parts of a character can have the same text. The most likely one is kept.
			if _, taken := top[text(t.ID)]; !taken {
				top[text(t.ID)] = t.Logprob
			}
		}
		if e.Dialect.chosenOnTop {
			top[piece] = token.Logprob
		}
		if len(top) > 0 { // SGLang and vLLM list no alternatives if none are requested
			out.TopLogprobs = append(out.TopLogprobs, top)
		}
	}
	return out
}
