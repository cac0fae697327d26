package server

import (
	"encoding/json"
	"net/http"

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

type metaInfo struct {
	ID               string         `json:"id"`
	FinishReason     map[string]any `json:"finish_reason"`
	PromptTokens     int            `json:"prompt_tokens"`
	CompletionTokens int            `json:"completion_tokens"`
	CachedTokens     int            `json:"cached_tokens"`
	// DPRank is null where requests have no rank.
	DPRank *int `json:"dp_rank"`
	// OutputTokenLogprobs holds [log probability, token id, text], OutputTopLogprobs a list of such for each token.
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
		// Every event holds the whole answer so far, as SGLang's do.
		_, err := g.each(r.Context(), func(ev event) error {
			response.add(g, ev)
			return stream.send(response)
		})
		stream.finish(r.Context(), err)
		return nil
	}
	if _, err := g.each(r.Context(), func(ev event) error { response.add(g, ev); return nil }); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, response)
	return nil
}

func (e *Engine) generateJob(r *http.Request, req generateRequest) (job, error) {
	if (req.Text == nil) == (req.InputIDs == nil) {
		return job{}, badRequest("text", "give either text or input_ids")
	}
	var params generateParams
	if len(req.SamplingParams) > 0 && string(req.SamplingParams) != "null" {
		if err := decodeObject(req.SamplingParams, &params); err != nil {
			return job{}, err
		}
	}
	prompt := promptInput{text: req.Text}
	if req.InputIDs != nil {
		prompt.ids = *req.InputIDs
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
	if req.ReturnLogprob {
		j.topLogprobs = req.TopLogprobsNum
	}
	return j, nil
}

func (g *generation) meta(id string) metaInfo {
	m := metaInfo{ID: id, PromptTokens: len(g.prompt)}
	if g.engine.AttentionDP {
		m.DPRank = &g.rank
	}
	return m
}

// add brings the answer up to date with an event.
func (r *generateResponse) add(g *generation, ev event) {
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
	entry := func(id int32, logprob float32) [3]any {
		return [3]any{logprob, id, g.engine.Tokenizer.Decode([]int32{id}, false)}
	}
	m.OutputTokenLogprobs = append(m.OutputTokenLogprobs, entry(token.ID, token.Logprob))
	if g.topLogprobs == 0 {
		return
	}
	var top [][3]any
	for _, t := range token.Top {
		top = append(top, entry(t.ID, t.Logprob))
	}
	m.OutputTopLogprobs = append(m.OutputTopLogprobs, top)
}
