// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// defaultNewTokens is SGLang's default of max_new_tokens.
const defaultNewTokens = 128

type generateRequest struct {
	routingParameters
	Text           *string         `json:"text"`
	InputIDs       *[]int32        `json:"input_ids"`
	SamplingParams json.RawMessage `json:"sampling_params"`
	Stream         bool            `json:"stream"`
	RequestID      string          `json:"rid"`
	ReturnLogprob  bool            `json:"return_logprob"`
	TopLogprobsNum int             `json:"top_logprobs_num"`
	// LogprobStartLen is the first prompt token in input_token_logprobs. nil and -1 mean the end of the prompt.
	LogprobStartLen *int `json:"logprob_start_len"`
	// ReturnTextInLogprobs adds the texts of tokens to their log probabilities, which are null otherwise.
	ReturnTextInLogprobs bool `json:"return_text_in_logprobs"`
}

type generateParams struct {
	samplingParameters
	MaxNewTokens *int `json:"max_new_tokens"`
}

type generateResponse struct {
	Text      string   `json:"text"`
	OutputIDs []int32  `json:"output_ids"`
	MetaInfo  metaInfo `json:"meta_info"`
}

// shape converts the response to the form of the dialect. end is nil before the last event.
func (r *generateResponse) shape(g *generation, end *outcome) any {
	if g.engine.Dialect.meta == nil {
		return r
	}
	meta := asObject(r.MetaInfo)
	g.engine.Dialect.meta(meta, g, end)
	return object{"text": r.Text, "output_ids": r.OutputIDs, "meta_info": meta}
}

type metaInfo struct {
	ID               string         `json:"id"`
	FinishReason     map[string]any `json:"finish_reason"`
	PromptTokens     int            `json:"prompt_tokens"`
	CompletionTokens int            `json:"completion_tokens"`
	CachedTokens     int            `json:"cached_tokens"`
	// DPRank is null if requests have no rank.
	DPRank *int `json:"dp_rank"`
	// InputTokenLogprobs and InputTopLogprobs are the log probabilities of the prompt. The entry of its first token is
	// null.
	InputTokenLogprobs [][3]any   `json:"input_token_logprobs,omitempty"`
	InputTopLogprobs   [][][3]any `json:"input_top_logprobs,omitempty"`
	// OutputTokenLogprobs contains [log probability, token ID, text] for each token. OutputTopLogprobs contains a list
	// of such entries for each token.
	OutputTokenLogprobs [][3]any   `json:"output_token_logprobs,omitempty"`
	OutputTopLogprobs   [][][3]any `json:"output_top_logprobs,omitempty"`
	RoutedExperts       *string    `json:"routed_experts,omitempty"`
	E2ELatency          *float64   `json:"e2e_latency,omitempty"`
}

func (e *Engine) generate(w http.ResponseWriter, r *http.Request) error {
	var req generateRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	j, err := e.generateJob(r, req)
	if err != nil {
		return err
	}
	g, err := e.start(r.Context(), j)
	if err != nil {
		return err
	}
	if req.RequestID == "" {
		req.RequestID = newID("")
	}
	response := generateResponse{OutputIDs: []int32{}, MetaInfo: g.meta(req.RequestID)}
	if req.Stream {
		stream := newEventStream(w)
		// As in SGLang, every event contains the complete response so far.
		_, err := g.each(r.Context(), func(ev event) error {
			response.add(g, ev)
			return stream.send(response.shape(g, ev.end))
		})
		stream.finish(r.Context(), err)
		return nil
	}
	end, err := g.each(r.Context(), func(ev event) error { response.add(g, ev); return nil })
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, response.shape(g, end))
	return nil
}

func (e *Engine) generateJob(r *http.Request, req generateRequest) (job, error) {
	if req.Text == nil && req.InputIDs == nil || req.Text != nil && req.InputIDs != nil && !e.Dialect.sglangNative {
		return job{}, badRequest("text", "give either text or input_ids")
	}
	var params generateParams
	if len(req.SamplingParams) > 0 && string(req.SamplingParams) != "null" {
		if err := decodeObject(req.SamplingParams, &params); err != nil {
			return job{}, err
		}
		if name := unknownParameter(req.SamplingParams); name != "" && e.Dialect.sglangNative {
			return job{}, &apiError{status: http.StatusInternalServerError, Type: plainError, Message: "Internal Server Error"}
		}
	}
	prompt := promptInput{text: req.Text}
	if req.InputIDs != nil { // SGLang prefers the ids
		prompt = promptInput{ids: *req.InputIDs}
	}
	j, err := e.prepare(r, e.tokens(prompt), parameters{
		samplingParameters: params.samplingParameters, routingParameters: req.routingParameters,
		maxTokens: params.MaxNewTokens, maxTokensName: "max_new_tokens", defaultMaxTokens: defaultNewTokens,
	})
	if err != nil {
		return j, err
	}
	if req.TopLogprobsNum < 0 || req.TopLogprobsNum > maxTopLogprobs {
		return j, badRequest("top_logprobs_num", "top_logprobs_num is %d; allowed is 0 to %d", req.TopLogprobsNum, maxTopLogprobs)
	}
	j.textInLogprobs = req.ReturnTextInLogprobs
	if !req.ReturnLogprob { // then SGLang ignores logprob_start_len
		return j, nil
	}
	j.topLogprobs = req.TopLogprobsNum
	if start := req.LogprobStartLen; start != nil && *start != -1 {
		if *start < 0 || *start > len(j.prompt) {
			return j, badRequest("logprob_start_len", "logprob_start_len is %d; allowed is -1 to %d, the number of prompt tokens", *start, len(j.prompt))
		}
		j.promptLogprobs, j.promptStart = *start < len(j.prompt), *start
	}
	return j, nil
}

// unknownParameter returns a sampling parameter that SamplingParams of SGLang does not have (sampling/sampling_params.py),
// or "".
func unknownParameter(text []byte) string {
	var fields map[string]json.RawMessage
	if json.Unmarshal(text, &fields) != nil {
		return ""
	}
	known := []string{
		"max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
		"repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens",
		"spaces_between_special_tokens", "no_stop_trim", "custom_params", "stream_interval", "logit_bias", "sampling_seed", "seed",
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(known, name) {
			return name
		}
	}
	return ""
}

func (g *generation) meta(id string) metaInfo {
	m := metaInfo{ID: id, PromptTokens: len(g.prompt)}
	if g.engine.AttentionDP {
		m.DPRank = &g.rank
	}
	return m
}

// add updates the response with an event.
func (r *generateResponse) add(g *generation, ev event) {
	if r.MetaInfo.InputTokenLogprobs == nil && len(g.scored) > 0 {
		r.MetaInfo.addPrompt(g)
	}
	r.Text += ev.text
	if ev.token != nil {
		r.OutputIDs = append(r.OutputIDs, ev.token.ID)
		r.MetaInfo.CompletionTokens++
		if g.topLogprobs >= 0 {
			r.MetaInfo.addLogprobs(g, ev.token)
		}
	}
	if ev.end == nil {
		return
	}
	if ev.end.reason == "length" {
		r.MetaInfo.FinishReason = map[string]any{"type": "length", "length": len(ev.end.tokens)}
	} else {
		r.MetaInfo.FinishReason = map[string]any{"type": "stop", "matched": ev.end.matched}
	}
	seconds := ev.end.latency.Seconds()
	r.MetaInfo.E2ELatency = &seconds
	r.MetaInfo.RoutedExperts = g.wireRoutes(ev.end)
}

func (m *metaInfo) addLogprobs(g *generation, token *scheduler.Token) {
	entry, top := g.logprobs(token)
	m.OutputTokenLogprobs = append(m.OutputTokenLogprobs, entry)
	if g.topLogprobs > 0 {
		m.OutputTopLogprobs = append(m.OutputTopLogprobs, top)
	}
}

// addPrompt adds the log probabilities of the prompt's tokens.
func (m *metaInfo) addPrompt(g *generation) {
	for i := range g.scored {
		entry, top := g.logprobs(&g.scored[i])
		if i == 0 {
			entry[0], top = nil, nil
		}
		m.InputTokenLogprobs = append(m.InputTokenLogprobs, entry)
		if g.topLogprobs > 0 {
			m.InputTopLogprobs = append(m.InputTopLogprobs, top)
		}
	}
}

// logprobs returns [log probability, ID, text] of a token, and of the most likely tokens at its position.
func (g *generation) logprobs(token *scheduler.Token) (entry [3]any, top [][3]any) {
	of := func(id int32, logprob float32) [3]any {
		if !g.textInLogprobs {
			return [3]any{logprob, id, nil}
		}
		return [3]any{logprob, id, g.engine.Tokenizer.Decode([]int32{id}, false)}
	}
	for _, t := range token.Top {
		top = append(top, of(t.ID, t.Logprob))
	}
	return of(token.ID, token.Logprob), top
}
