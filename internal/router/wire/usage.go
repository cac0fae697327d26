// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/json"
)

// Usage contains the token counts and ids that a response reports.
type Usage struct {
	// Prompt and Completion are the numbers of tokens.
	Prompt, Completion int
	// Output contains the ids of the generated tokens, PromptIDs those of the prompt with its chat template; nil if the
	// engine does not report them.
	Output, PromptIDs []int32
	// Rank is the data-parallel rank that served the request; nil if the engine does not report it.
	Rank *int
}

var promptTokensMember = []byte(`"prompt_tokens"`)

// Read parses a response or one of its events. Events of SGLang's native route contain the complete answer so far.
func (t *Usage) Read(data []byte) {
	if !bytes.Contains(data, promptTokensMember) {
		return
	}
	type usage struct {
		Prompt     int  `json:"prompt_tokens"`
		Completion int  `json:"completion_tokens"`
		Rank       *int `json:"dp_rank"`
	}
	var answer struct {
		OutputIDs []int32 `json:"output_ids"`
		Meta      *usage  `json:"meta_info"`
		Usage     *usage  `json:"usage"`
	}
	if json.Unmarshal(data, &answer) != nil {
		return // a batch: the tokens cannot be assigned to its requests
	}
	for _, u := range []*usage{answer.Usage, answer.Meta} {
		if u != nil {
			t.Prompt, t.Completion, t.Output, t.Rank = u.Prompt, u.Completion, answer.OutputIDs, u.Rank
		}
	}
}

// GeneratedTokensMember returns the integer member with the number of generated tokens in an unstreamed response:
// usage.output_tokens of Anthropic's Messages API and OpenAI's Responses API, usage.completion_tokens of OpenAI's other
// APIs, and meta_info.completion_tokens of SGLang's /generate.
func GeneratedTokensMember(path string) string {
	if path == messagesPath || path == ResponsesPath {
		return "output_tokens"
	}
	return "completion_tokens"
}
