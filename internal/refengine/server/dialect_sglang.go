// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine"
)

// sglangDialect returns the API of SGLang (srt/entrypoints of 0.5.12, 0.5.17 and 0.5.23). TestConformance compares the
// dialect with SGLang 0.5.17.
func sglangDialect(release engine.Release) Dialect {
	d := ownDialect()
	d.Release = release
	d.anyModel = true // completions and chat completions do not compare the model
	d.health = []string{"GET /health", "GET /health_generate"}
	d.routes["GET /server_info"] = (*Engine).serverInfo
	d.routes["GET /get_server_info"] = (*Engine).serverInfo
	d.routes["POST /invocations"] = (*Engine).chatCompletions
	d.routes["PUT /generate"] = (*Engine).generate
	d.routes["GET /metrics"] = (*Engine).sglangMetricsPage
	d.form, d.members, d.meta = sglangForm, sglangMembers, sglangMeta
	d.alwaysCompleted = !d.from(5, 23) // protocol.py of 0.5.23 has a status incomplete, serving_responses.py of 0.5.17 has none
	// No release calls _validate_input_ids_in_vocab (managers/tokenizer_manager.py). 0.5.17 on GPUs ends by a device-side
	// assert, for ids above the vocabulary and below 0, on completions and on the native route.
	d.crashesOnUnknownTokens = true
	d.strictCompletions, d.sglangNative, d.responsesHeadroom = true, true, 2
	d.metrics.labels, d.metrics.streaming = prometheus.Labels{"engine_type": "unified"}, "is_streaming"
	d.metrics.rankLabels = prometheus.Labels{"moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
	d.refusesInStream = func(route string) bool { return route == messagesPath }
	d.refuseMessage = sglangRefuseMessage
	deaf := []string{"/generate"}
	if !d.from(5, 20) {
		deaf = append(deaf, responsesPath)
	}
	if !d.from(5, 17) {
		d.failsOnRank = []string{messagesPath} // anthropic/serving.py of 0.5.12
	}
	d.routing, d.failure = sglangRouting(deaf...), d.sglangFailure
	d.missing = func(_ *http.Request, status int) *apiError {
		return &apiError{status: status, Message: http.StatusText(status), Type: "http"}
	}
	return d
}

// sglangForm adds the members of SGLang to completions and chat completions (openai/protocol.py, serving_chat.py and
// serving_completions.py). Ids of tokens are added to a complete response, if they are requested: 0.5.12 ignores the
// member, and later releases refuse it in streamed chats.
func sglangForm(d Dialect, answer map[string]any, p part) {
	choices, _ := answer["choices"].([]any)
	usage, counted := answer["usage"].(map[string]any)
	completion := answer["object"] == "text_completion"
	if counted {
		usage["reasoning_tokens"] = 0
		if p.whole || !completion {
			usage["prompt_tokens_details"] = nil
		}
	} else if completion || len(choices) == 0 {
		answer["usage"] = nil
	}
	for _, each := range choices {
		choice := each.(map[string]any)
		if delta, ok := choice["delta"].(map[string]any); ok {
			delta["reasoning_content"] = nil
		}
		if message, ok := choice["message"].(map[string]any); ok {
			message["reasoning_content"], message["tool_calls"] = nil, nil
		}
		if p.whole && p.g.tokenIDs && d.from(5, 17) {
			choice["token_ids"], choice["prompt_token_ids"] = p.end.tokens, p.g.prompt
		}
	}
	if p.whole {
		answer["metadata"] = sglangMetadata
	}
}

var sglangMetadata = object{"weight_version": "default"}

// sglangMeta adds the members of meta_info that the reference engine lacks (managers/tokenizer_manager.py).
func sglangMeta(m object, g *generation, end *outcome) {
	now := float64(time.Now().UnixMicro()) / 1e6
	for _, member := range []string{"num_retractions", "reasoning_tokens", "queue_time"} {
		m[member] = 0
	}
	for _, member := range []string{"forward_entry_time", "prefill_finished_time", "response_sent_to_client_ts"} {
		m[member] = now
	}
	m["weight_version"], m["cached_tokens_details"] = "default", nil
	if end == nil {
		return
	}
	for _, member := range []string{"request_received_ts", "api_server_dispatch_finish_ts", "request_finished_ts"} {
		m[member] = now
	}
	if len(end.tokens) > 0 {
		m["decode_throughput"] = float64(len(end.tokens)) / end.latency.Seconds()
	}
	if g.topLogprobs >= 0 {
		m["output_token_logprobs_length"] = len(end.tokens)
		if m["input_token_logprobs"] == nil {
			m["input_token_logprobs"] = []any{}
		}
	}
}

// sglangMembers adds the members of SGLang to responses and their events (ResponsesResponse in openai/protocol.py, and
// the types of the package openai in events).
func sglangMembers(d Dialect, members object, g *generation) {
	if members["object"] == "response" {
		sglangResponse(members, g)
		members["reasoning"], members["error"] = object{"effort": nil, "summary": nil}, nil
		members["text"] = object{"format": object{"type": "text"}}
		if u, ok := members["usage"].(object); ok && !d.from(5, 23) { // from 0.5.23 as in events
			members["usage"] = object{
				"prompt_tokens": u["input_tokens"], "completion_tokens": u["output_tokens"], "total_tokens": u["total_tokens"],
				"prompt_tokens_details": u["input_tokens_details"], "reasoning_tokens": 0,
			}
		}
		return
	}
	if response, ok := members["response"].(object); ok {
		sglangResponse(response, g)
		for _, member := range []string{
			"error", "background", "conversation", "max_tool_calls", "prompt", "prompt_cache_key", "safety_identifier", "service_tier", "top_logprobs", "text",
		} {
			response[member] = nil
		}
		response["reasoning"] = object{"effort": nil, "generate_summary": nil, "summary": nil}
		if response["status"] != "in_progress" {
			response["text"] = object{"format": object{"type": "text"}, "verbosity": nil}
		}
	}
	if item, ok := members["item"].(object); ok {
		sglangContent(item["content"])
	}
	if part, ok := members["part"].(object); ok {
		part["logprobs"] = nil
	}
}

// sglangResponse adds the members that complete responses and those in events share.
func sglangResponse(response object, g *generation) {
	delete(response, "background")
	response["store"], response["truncation"], response["metadata"] = true, "disabled", object{}
	response["temperature"], response["top_p"], response["user"] = g.sampling.Temperature, nil, nil
	response["max_output_tokens"] = g.maxNewTokens + g.engine.Dialect.responsesHeadroom
	output, _ := response["output"].([]any)
	for _, item := range output {
		sglangContent(item.(object)["content"])
	}
}

func sglangContent(content any) {
	parts, _ := content.([]any)
	for _, part := range parts {
		part.(object)["logprobs"] = nil
	}
}

// sglangRouting reads the rank from the header, except on routes that ignore it, and from the members of the body. A
// header that is not an integer is rejected (extract_routed_dp_rank_from_header in openai/serving_base.py).
func sglangRouting(deaf ...string) func(*Engine, *http.Request, *parameters) error {
	return func(e *Engine, r *http.Request, p *parameters) error {
		if p.ReturnTokenIDs && p.Stream && r.URL.Path == "/v1/chat/completions" && e.Dialect.from(5, 17) {
			e := badRequest("", "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using return_token_ids=true.")
			e.Type = "BadRequest" // of _validate_request
			return e
		}
		if r.URL.Path == "/generate" && e.Dialect.from(5, 17) && !e.Dialect.from(5, 23) {
			p.DataParallelRank = nil // GenerateReqInput has no such member (managers/io_struct.py)
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
			failed := badRequest(rankHeader, "header %s is %q; it must be an integer", rankHeader, header)
			failed.Type = "400"
			if r.URL.Path == messagesPath && e.Dialect.Name != "" && !e.Dialect.from(5, 23) { // anthropic/serving.py handles HTTPException from 0.5.23
				failed.status, failed.Message = http.StatusInternalServerError, "Internal server error"
			}
			return failed
		}
		p.rankHeader = &rank
		return nil
	}
}

// sglangRefuseMessage sends the error within a message without content. The client may have disconnected.
func sglangRefuseMessage(stream *eventStream, head message, refused *apiError) {
	_ = stream.sendNamed("message_start", object{"type": "message_start", "message": head})
	_ = stream.sendNamed("error", anthropicError(refused))
	_ = stream.sendNamed("message_stop", object{"type": "message_stop"})
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

// sglangFailure has five forms: FastAPI's for unknown routes, a flat object on the OpenAI routes, the message only on the
// native route, OpenAI's object on the Responses API, and Anthropic's on the Messages API (create_error_response in
// openai/serving_base.py, _create_error_response and the exception handlers in http_server.py, anthropic/serving.py).
// The type is "Bad Request" for a malformed request, and "BadRequestError" for an invalid value.
func (d Dialect) sglangFailure(route string, e *apiError) any {
	kind := "BadRequestError"
	switch {
	case e.Type == "http":
		return object{"detail": e.Message}
	case e.Type == "400", e.Type == "BadRequest":
		kind = e.Type
	case e.status >= http.StatusInternalServerError:
		kind = "InternalServerError"
	case e.invalid:
		kind = http.StatusText(e.status)
	}
	switch {
	case strings.HasPrefix(route, messagesPath):
		failed := anthropicError(e)
		if e.status == http.StatusBadRequest && !e.invalid && !d.from(5, 23) { // 0.5.23 maps the status to Anthropic's type
			failed["error"] = object{"type": kind, "message": e.Message}
		}
		return failed
	case route == "/generate" && e.status == http.StatusBadRequest && !e.invalid:
		return object{"error": object{"message": e.Message}}
	case strings.HasPrefix(route, responsesPath):
		param := e.Param
		if !e.invalid && e.status < http.StatusInternalServerError {
			kind = "invalid_request_error"
		}
		if !e.unstored {
			param = nil
		}
		return object{"error": object{"message": e.Message, "type": kind, "param": param, "code": e.status}}
	}
	return object{"object": "error", "message": e.Message, "type": kind, "param": nil, "code": e.status}
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
