package router

// countTokens adds the tokens of a counted response to the live samples, as far as their ids are known.
func (m *meter) countTokens() {
	if m.experts == nil || m.request == nil {
		return
	}
	shape := *m.lease.Backend.Shape
	known := len(m.experts) / (shape.Layers * shape.ExpertsPerToken)
	m.observations.live.Add(m.lease.Backend.ModelDigest, shape, m.knownIDs(known), m.experts)
}

// knownIDs are the ids of the first of those tokens whose experts a response told. The prompt's are known where they are as
// many as the engine says that it read: a chat template, a token that is put in front or another tokenizer than the engine's
// make others of them. Rows that are not those of all tokens, of which an engine does not run the last, may begin with another one
// than the first. Those of the answer are known where the engine tells all of them.
func (m *meter) knownIDs(rows int) []int32 {
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

// promptIDs are the token ids of a request with one prompt that was read whole; nil for others.
func (m *meter) promptIDs() []int32 {
	p := m.request.prompt
	switch {
	case p.More > 0:
		return nil
	case len(p.Texts) == 0 && !p.Nested:
		return append([]int32(nil), p.IDs...)
	case len(p.Texts) == 1 && len(p.IDs) == 0 && m.lease.layout != nil && m.lease.layout.Tokenizer != nil:
		return m.lease.layout.Tokenizer.Encode(p.Texts[0])
	}
	return nil
}
