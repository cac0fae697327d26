// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/engine"
)

// sglangDialect returns the API of SGLang (srt/entrypoints of 0.5.12, 0.5.17 and 0.5.23).
func sglangDialect(release engine.Release) Dialect {
	d := ownDialect()
	d.Release = release
	d.anyModel = true // completions and chat completions do not compare the model
	d.health = []string{"GET /health", "GET /health_generate"}
	d.routes["GET /server_info"] = (*Engine).serverInfo
	d.routes["GET /get_server_info"] = (*Engine).serverInfo
	d.routes["GET /metrics"] = (*Engine).sglangMetricsPage
	d.form = sglangForm
	deaf := []string{"/generate"}
	if !d.from(5, 20) {
		deaf = append(deaf, responsesPath)
	}
	if !d.from(5, 17) {
		d.failsOnRank = []string{messagesPath} // anthropic/serving.py of 0.5.12
	}
	d.routing, d.failure = sglangRouting(deaf...), sglangFailure
	d.missing = func(_ *http.Request, status int) *apiError {
		return &apiError{status: status, Message: http.StatusText(status), Type: "http"}
	}
	return d
}

// sglangForm adds the ids of tokens to a complete response, if they are requested. 0.5.12 ignores the member, and later
// releases refuse it in streamed chats (openai/protocol.py and serving_chat.py of 0.5.17 and 0.5.23).
func sglangForm(d Dialect, answer map[string]any, p part) {
	if !p.whole || !p.g.tokenIDs || !d.from(5, 17) {
		return
	}
	for _, each := range answer["choices"].([]any) {
		choice := each.(map[string]any)
		choice["token_ids"], choice["prompt_token_ids"] = p.end.tokens, p.g.prompt
	}
}

// sglangRouting reads the rank from the header, except on routes that ignore it, and from the members of the body. A
// header that is not an integer is rejected (extract_routed_dp_rank_from_header in openai/serving_base.py).
func sglangRouting(deaf ...string) func(*Engine, *http.Request, *parameters) error {
	return func(e *Engine, r *http.Request, p *parameters) error {
		if p.ReturnTokenIDs && p.Stream && r.URL.Path == "/v1/chat/completions" && e.Dialect.from(5, 17) {
			return badRequest("", "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using return_token_ids=true.")
		}
		header := r.Header.Get(rankHeader)
		if r.URL.Path == responsesPath && slices.Contains(deaf, responsesPath) {
			p.RoutedDPRank, p.DataParallelRank = nil, nil
		}
		if header == "" || slices.Contains(deaf, r.URL.Path) {
			return nil
		}
		rank, err := integer(header)
		if err != nil {
			e := badRequest(rankHeader, "header %s is %q; it must be an integer", rankHeader, header)
			e.Type = "http"
			return e
		}
		p.rankHeader = &rank
		return nil
	}
}

// sglangTooLong has the words of _validate_one_request in managers/tokenizer_manager.py.
func sglangTooLong(length, prompt, answer int) *apiError {
	if prompt >= length {
		return badRequest("", "The input (%d tokens) is longer than the model's context length (%d tokens).", prompt, length)
	}
	return badRequest("", "Requested token count exceeds the model's maximum context length of %d tokens. You requested a total of %d tokens: "+
		"%d tokens from the input messages and %d tokens for the completion. Please reduce the number of tokens in the input messages or the "+
		"completion to fit within the limit.", length, prompt+answer, prompt, answer)
}

// sglangGuards exempts probes and metrics (decide_request_auth in srt/utils/auth.py).
func sglangGuards(path string) bool {
	return !strings.HasPrefix(path, "/health") && !strings.HasPrefix(path, "/metrics")
}

// sglangFailure has four forms: a flat object on the OpenAI routes, the message only on the native route, OpenAI's
// object on the Responses API, and Anthropic's on the Messages API (create_error_response in openai/serving_base.py,
// _create_error_response and the exception handlers in http_server.py).
func sglangFailure(route string, e *apiError) any {
	kind := "BadRequest"
	switch {
	case e.Type == "http":
		kind = http.StatusText(e.status)
	case e.status >= http.StatusInternalServerError:
		kind = "InternalServerError"
	}
	switch {
	case strings.HasPrefix(route, messagesPath):
		return anthropicError(e)
	case route == "/generate" && e.status == http.StatusBadRequest && !e.invalid:
		return map[string]any{"error": map[string]any{"message": e.Message}}
	case strings.HasPrefix(route, responsesPath):
		return map[string]any{"error": map[string]any{"message": e.Message, "type": kind, "param": nil, "code": e.status}}
	}
	return map[string]any{"object": "error", "message": e.Message, "type": kind, "param": nil, "code": e.status}
}

// serverInfo responds with the members of /server_info that the operator reads, and with sizes.
func (e *Engine) serverInfo(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, map[string]any{
		"version": e.Dialect.Release.String(), "model_path": e.ServedName, "served_model_name": e.ServedName,
		"tp_size": e.ExpertRanks, "ep_size": e.ExpertRanks, "dp_size": e.dataParallelRanks(), "enable_dp_attention": e.AttentionDP,
		"internal_states": make([]struct{}, e.dataParallelRanks()),
	})
	return nil
}

// sglangMetricsPage serves metrics only with --enable-metrics (add_prometheus_middleware in http_server.py).
func (e *Engine) sglangMetricsPage(w http.ResponseWriter, r *http.Request) error {
	if !e.Metrics {
		return e.Dialect.missing(r, http.StatusNotFound)
	}
	return e.metricsPage(w, r)
}
