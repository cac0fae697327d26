package router

import (
	"bytes"
	"encoding/json"
)

// toldTokens is what a response tells of the tokens that were processed for it.
type toldTokens struct {
	// prompt and completion are how many there were.
	prompt, completion int
	// output are the ids of the generated ones; nil where the engine does not tell them.
	output []int32
}

var promptTokensMember = []byte(`"prompt_tokens"`)

// read takes note of what a JSON text tells, the response or an event of it. Events of SGLang's native route hold all of the
// answer so far.
func (t *toldTokens) read(data []byte) {
	if !bytes.Contains(data, promptTokensMember) {
		return
	}
	type usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
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
			t.prompt, t.completion, t.output = u.Prompt, u.Completion, answer.OutputIDs
		}
	}
}

// countTokens adds the tokens of a counted response to the live samples, as far as their ids are known.
func (m *meter) countTokens() {
	if m.experts == nil || m.request == nil {
		return
	}
	shape := *m.lease.Backend.Shape
	known := len(m.experts) / (shape.Layers * shape.ExpertsPerToken)
	m.observations.live.add(m.lease.Backend.ModelDigest, shape, m.knownIDs(known), m.experts)
}

// knownIDs are the ids of the first of those tokens whose experts a response told. The prompt's are known where they are as
// many as the engine says that it read: a chat template, a token that is put in front or another tokenizer than the engine's
// make others of them. Those of the answer are known where the engine tells all of them.
func (m *meter) knownIDs(rows int) []int32 {
	ids := m.promptIDs()
	if len(ids) == 0 || len(ids) != m.tokens.prompt || len(ids) > rows {
		return nil
	}
	if output := m.tokens.output; len(output) == m.tokens.completion && rows <= len(ids)+len(output) {
		ids = append(ids, output[:rows-len(ids)]...)
	}
	return ids
}

// promptIDs are the token ids of a request with one prompt that was read whole; nil for others.
func (m *meter) promptIDs() []int32 {
	p := m.request.prompt
	switch {
	case p.more > 0:
		return nil
	case len(p.texts) == 0 && !p.nested:
		return append([]int32(nil), p.ids...)
	case len(p.texts) == 1 && len(p.ids) == 0 && m.lease.layout != nil && m.lease.layout.tokenizer != nil:
		return m.lease.layout.tokenizer.Encode(p.texts[0])
	}
	return nil
}
