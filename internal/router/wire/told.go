package wire

import (
	"bytes"
	"encoding/json"
)

// Told is what a response tells of the tokens that were processed for it.
type Told struct {
	// Prompt and Completion are how many there were.
	Prompt, Completion int
	// Output are the ids of the generated ones; nil where the engine does not tell them.
	Output []int32
	// Rank is the data-parallel rank that has served; nil where the engine does not report it.
	Rank *int
}

var promptTokensMember = []byte(`"prompt_tokens"`)

// Read takes note of what a JSON text tells, the response or an event of it. Events of SGLang's native route hold all of the
// answer so far.
func (t *Told) Read(data []byte) {
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
		return // a batch: whose tokens are whose is not told
	}
	for _, u := range []*usage{answer.Usage, answer.Meta} {
		if u != nil {
			t.Prompt, t.Completion, t.Output, t.Rank = u.Prompt, u.Completion, answer.OutputIDs, u.Rank
		}
	}
}

// GeneratedTokensMember returns the integer member of an answer in one piece that counts the generated tokens:
// usage.output_tokens of Anthropic's Messages API and OpenAI's Responses API, usage.completion_tokens of OpenAI's other
// APIs, and meta_info.completion_tokens of SGLang's /generate.
func GeneratedTokensMember(path string) string {
	if path == messagesPath || path == ResponsesPath {
		return "output_tokens"
	}
	return "completion_tokens"
}
