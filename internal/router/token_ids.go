// SPDX-License-Identifier: Apache-2.0

package router

// countTokens adds the tokens of a counted response to the live samples, if their ids are known.
func (m *responseCapture) countTokens() {
	if m.experts == nil || m.request == nil {
		return
	}
	shape := *m.lease.Backend.Shape
	known := len(m.experts) / (shape.Layers * shape.ExpertsPerToken)
	m.observations.live.Add(m.lease.Backend.ModelDigest, shape, m.knownIDs(known), m.experts)
}

// knownIDs returns the ids of the first tokens with reported experts; rows is the number of reported
// tokens. The prompt ids are known if the engine reports them, or if their number equals the prompt length that the
// engine reports. A chat template, a prepended token or a different tokenizer of the engine changes that length. If rows is not the number of all tokens
// (an engine does not run the last one), the first row may belong to a later token; knownIDs then returns nil. The ids
// of the answer are known if the engine reports all of them.
func (m *responseCapture) knownIDs(rows int) []int32 {
	ids := m.promptIDs()
	if len(ids) == 0 || len(ids) != m.tokens.Prompt || len(ids) > rows {
		return nil
	}
	if all := m.tokens.Prompt + m.tokens.Completion; m.tokens.Completion > 0 && rows != all && rows != all-1 {
		return nil
	}
	if output := m.tokens.Output; len(output) == m.tokens.Completion && rows <= len(ids)+len(output) {
		ids = append(ids, output[:rows-len(ids)]...)
	}
	return ids
}

// promptIDs returns the token ids of a request with one complete prompt; nil for other requests.
func (m *responseCapture) promptIDs() []int32 {
	p := m.request.prompt
	switch {
	case m.tokens.PromptIDs != nil:
		return append([]int32(nil), m.tokens.PromptIDs...)
	case p.More > 0:
		return nil
	case len(p.Texts) == 0 && !p.Nested:
		return append([]int32(nil), p.IDs...)
	case len(p.Texts) == 1 && len(p.IDs) == 0 && m.lease.layout != nil && m.lease.layout.Tokenizer != nil:
		return m.lease.layout.Tokenizer.Encode(p.Texts[0])
	}
	return nil
}
