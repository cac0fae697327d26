// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"net/http"
	"strings"
)

// Error types. They are OpenAI's types if OpenAI defines one.
const (
	InvalidRequest  = "invalid_request_error"
	Unauthenticated = "authentication_error"
	NotFound        = "not_found"
	RateLimited     = "rate_limit_exceeded"
	Internal        = "internal_error"
	BadGateway      = "bad_gateway"
	Unavailable     = "service_unavailable"
)

// messagesPath is the route of Anthropic's Messages API.
const messagesPath = "/v1/messages"

// ofMessages reports whether a path is, or ends in, a route of the Messages API.
func ofMessages(path string) bool {
	path = strings.TrimSuffix(path, "/")
	for _, of := range []string{"/count_tokens", "/render"} {
		path = strings.TrimSuffix(path, of)
	}
	return strings.HasSuffix(path, messagesPath)
}

// anthropicTypes maps status codes to Anthropic's error types. All other codes map to api_error.
var anthropicTypes = map[int]string{
	http.StatusBadRequest: InvalidRequest, http.StatusNotFound: "not_found_error", http.StatusRequestTimeout: InvalidRequest,
	http.StatusRequestEntityTooLarge: "request_too_large", http.StatusUnsupportedMediaType: InvalidRequest,
	http.StatusUnauthorized: Unauthenticated, http.StatusTooManyRequests: "rate_limit_error", http.StatusRequestHeaderFieldsTooLarge: InvalidRequest,
	http.StatusServiceUnavailable: "overloaded_error",
}

// ErrorBody returns an error in the format of the API that a path belongs to: Anthropic's or OpenAI's. Clients of OpenAI
// expect the member param. It is null, because no error of the router concerns one member of a request.
func ErrorBody(path string, code int, kind, message string) []byte {
	body := map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": code}}
	if ofMessages(path) {
		kind = "api_error"
		if known := anthropicTypes[code]; known != "" {
			kind = known
		}
		body = map[string]any{"type": "error", "error": map[string]any{"message": message, "type": kind}}
	}
	text, err := json.Marshal(body)
	if err != nil { // cannot happen: the values are strings and a number
		return nil
	}
	return append(text, '\n')
}

// WriteError answers a request for a path with an error.
func WriteError(w http.ResponseWriter, path string, code int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(ErrorBody(path, code, kind, message)) // a disconnected client needs no answer
}
