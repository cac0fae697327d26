package server

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net/http"
	"strings"

	"github.com/semmoe/operator/internal/engine"
)

// vllmDialect is vLLM's surface (vllm/entrypoints of 0.22.0 and 0.32.0). vllm-ascend has the same server. TestConformance compares it with
// vLLM 0.32.0 itself.
func vllmDialect(release engine.Release) Dialect {
	return Dialect{
		Release: release,
		health:  []string{"GET /health", "GET /ping", "POST /ping"},
		routes: map[string]handler{
			"GET /v1/models":            (*Engine).models,
			"GET /version":              (*Engine).version,
			"GET /load":                 (*Engine).serverLoad,
			"GET /metrics":              (*Engine).metricsPage,
			"POST /v1/completions":      (*Engine).completions,
			"POST /v1/chat/completions": (*Engine).chatCompletions,
			"POST /tokenize":            (*Engine).tokenize,

			"POST " + messagesPath:                   (*Engine).messages,
			"POST " + messagesPath + "/count_tokens": (*Engine).countTokens,
			"POST " + responsesPath:                  (*Engine).responses,
			"GET " + responsesPath + "/{id}":         (*Engine).storedResponse,
			"POST " + responsesPath + "/{id}/cancel": (*Engine).storedResponse,
		},
		routing: vllmRouting, failure: vllmFailure,
		missing: func(_ *http.Request, status int) *apiError {
			return &apiError{status: status, Message: http.StatusText(status), Type: "http"}
		},
		form: vllmForm, members: vllmMembers, card: vllmCard,
		refusesInStream: true, endsCompleted: true, refusesNoTokens: true, chosenOnTop: true,
		metrics: vllmMetrics,
	}
}

// vllmRouting reads the rank of the header only, and ignores one that is no integer. Routed experts are in each answer in one piece where the
// engine was started to return them, whatever the request says (_get_data_parallel_rank in serve/engine/serving.py, capture in
// v1/engine/output_processor.py).
func vllmRouting(e *Engine, r *http.Request, p *parameters) error {
	p.RoutedDPRank, p.DataParallelRank = nil, nil
	p.ReturnRoutedExperts, p.RoutedExpertsStartLen = e.ReturnRoutes && !p.Stream, p.RoutedExpertsPromptStart
	if rank, err := integer(r.Header.Get(rankHeader)); err == nil && r.URL.Path != responsesPath {
		p.rankHeader = &rank
	}
	return nil
}

// vllmFailure is one object on every route but that of the Messages API (serve/exception_handling, anthropic/api_router.py). What does not have the form of a request is a "Bad Request", what has a
// value that is not allowed a "BadRequestError".
func vllmFailure(route string, e *apiError) any {
	kind := map[int]string{
		http.StatusBadRequest: "BadRequestError", http.StatusNotFound: "NotFoundError", http.StatusServiceUnavailable: "ServiceUnavailableError",
	}[e.status]
	param := e.Param
	switch {
	case e.Type == "http": // FastAPI's own
		return object{"detail": e.Message}
	case e.unstored:
		kind = "invalid_request_error"
	case e.invalid:
		kind = http.StatusText(e.status)
		path := "body"
		if param != nil && *param != "" {
			path += "." + *param
		}
		param = &path
	case kind == "":
		kind = "InternalServerError"
	case param != nil && *param == "messages":
		param = nil
	}
	if strings.HasPrefix(route, messagesPath) && !e.invalid {
		return map[string]any{"type": "error", "error": map[string]any{"type": kind, "message": e.Message}}
	}
	return map[string]any{"error": map[string]any{"message": e.Message, "type": kind, "param": param, "code": e.status}}
}

// vllmForm gives completions and chat completions, whole or streamed, the members of vLLM's (openai/completion/protocol.py,
// openai/chat_completion/protocol.py). A stream leaves out what was not set.
func vllmForm(d Dialect, answer map[string]any, p part) {
	delete(answer, "sglext")
	streamedChat := answer["object"] == chatFormat.chunkObject
	if streamedChat && p.first {
		answer["prompt_token_ids"], answer["prompt_text"] = nil, nil
	}
	if p.whole || p.last {
		answer["system_fingerprint"] = fmt.Sprintf("vllm-%s", d.Release)
	}
	choices, _ := answer["choices"].([]any)
	for _, each := range choices {
		choice := each.(map[string]any)
		_, chat := choice["message"]
		_, completion := choice["text"]
		_, stopped := choice["matched_stop"]
		delete(choice, "matched_stop")
		if stopped && (p.whole || completion || p.end != nil) {
			choice["stop_reason"] = nil
			if p.end != nil && p.g.matchedText != "" {
				choice["stop_reason"] = p.g.matchedText
			}
		}
		switch {
		case streamedChat && !p.first:
			choice["token_ids"] = nil
		case completion:
			choice["token_ids"], choice["prompt_token_ids"] = nil, nil
		case chat:
			choice["token_ids"] = nil
			message := choice["message"].(map[string]any)
			for _, member := range []string{"refusal", "annotations", "audio", "function_call", "reasoning"} {
				message[member] = nil
			}
		}
		if p.whole {
			choice["routed_experts"] = p.g.npyRoutes(p.end)
		}
		if p.whole && completion {
			choice["prompt_logprobs"] = nil
			if p.g.tokenIDs {
				choice["token_ids"], choice["prompt_token_ids"] = p.end.tokens, p.g.prompt
			}
		}
	}
	if p.whole {
		answer["service_tier"], answer["kv_transfer_params"] = nil, nil
		usage := answer["usage"].(map[string]any)
		usage["prompt_tokens_details"] = nil
		if answer["object"] == chatFormat.object {
			answer["prompt_logprobs"], answer["prompt_token_ids"], answer["prompt_text"] = nil, nil, nil
		}
		if d.from(32, 0) {
			answer["ec_transfer_params"], answer["metrics"], usage["completion_tokens_details"] = nil, nil, nil
		}
	}
}

// responseMembers are those of a response that the reference engine's own lack (openai/responses/protocol.py).
var responseMembers = object{
	"metadata": nil, "max_tool_calls": nil, "prompt": nil, "reasoning": nil, "text": nil, "top_logprobs": nil, "user": nil, "kv_transfer_params": nil,
	"input_messages": nil, "output_messages": nil, "service_tier": "auto", "truncation": "disabled", "temperature": 0.0, "top_p": 1.0,
	"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_output_tokens": 0,
}

// vllmMembers gives events and whole answers the members of vLLM's (anthropic/protocol.py, openai/responses/protocol.py).
func vllmMembers(d Dialect, members object, g *generation) {
	if members["object"] == "response" {
		vllmResponse(d, members, g)
		return
	}
	if _, tokenized := members["max_model_len"]; tokenized {
		members["token_strs"] = nil
	}
	if tokens, counted := members["input_tokens"]; counted {
		members["context_management"] = object{"original_input_tokens": tokens}
	}
	switch members["type"] {
	case "message_start":
		message := members["message"].(object)
		message["stop_reason"], message["stop_sequence"] = nil, nil
	case "message_delta":
		members["delta"].(object)["stop_sequence"] = nil
		members["usage"].(object)["input_tokens"] = len(g.prompt)
	}
	if response, ok := members["response"].(object); ok {
		vllmResponse(d, response, g)
	}
	if item, ok := members["item"].(object); ok {
		vllmItem(item)
	}
	if part, ok := members["part"].(object); ok {
		part["logprobs"] = nil
		if members["type"] == "response.content_part.added" {
			part["logprobs"] = []any{}
		}
	}
}

func vllmResponse(d Dialect, response object, g *generation) {
	delete(response, "store")
	for name, value := range responseMembers {
		response[name] = value
	}
	response["max_output_tokens"] = g.maxNewTokens
	if d.from(32, 0) {
		response["ec_transfer_params"] = nil
	}
	output, _ := response["output"].([]any)
	for _, item := range output {
		vllmItem(item.(object))
	}
	if usage, ok := response["usage"].(object); ok {
		read, written := usage["input_tokens_details"].(object), usage["output_tokens_details"].(object)
		read["input_tokens_per_turn"], read["cached_tokens_per_turn"], read["cache_write_tokens"] = []any{}, []any{}, 0
		written["tool_output_tokens"], written["output_tokens_per_turn"], written["tool_output_tokens_per_turn"] = 0, []any{}, []any{}
	}
}

func vllmItem(item object) {
	item["phase"] = nil
	content, _ := item["content"].([]any)
	for _, part := range content {
		part.(object)["logprobs"] = nil
	}
}

// npyRoutes returns the routed experts as base64 of a .npy file, [tokens][layers][top-k]; nil where they are not kept.
func (g *generation) npyRoutes(end *outcome) any {
	if !g.routes {
		return nil
	}
	layers, top := g.engine.Model.Layers, g.engine.Model.TopK
	routes := end.routes[min(g.routesStart*layers*top, len(end.routes)):]
	kind, width := "|u1", 1
	if g.engine.Model.Experts > 256 {
		kind, width = "<u2", 2
	}
	header := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': (%d, %d, %d), }", kind, len(routes)/(layers*top), layers, top)
	header += strings.Repeat(" ", 63-(10+len(header))%64) + "\n"
	file := binary.LittleEndian.AppendUint16([]byte("\x93NUMPY\x01\x00"), uint16(len(header)))
	file = append(file, header...)
	for _, expert := range routes {
		if width == 1 {
			file = append(file, byte(expert))
		} else {
			file = binary.LittleEndian.AppendUint16(file, expert)
		}
	}
	return base64.StdEncoding.EncodeToString(file)
}

func vllmCard(e *Engine, card map[string]any) {
	card["owned_by"] = "vllm"
	card["permission"] = []any{map[string]any{
		"id": newID("modelperm-"), "object": "model_permission", "created": e.started.Unix(), "allow_create_engine": false, "allow_sampling": true,
		"allow_logprobs": true, "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false, "organization": "*", "group": nil, "is_blocking": false,
	}}
}

func (e *Engine) version(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, map[string]any{"version": e.Dialect.Release.String()})
	return nil
}

func (e *Engine) serverLoad(w http.ResponseWriter, _ *http.Request) error {
	running := 0
	for _, load := range e.Scheduler.Loads() {
		running += load.Running + load.Waiting
	}
	writeJSON(w, http.StatusOK, map[string]any{"server_load": running})
	return nil
}
