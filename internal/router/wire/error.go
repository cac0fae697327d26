package wire

import (
	"encoding/json"
	"net/http"
)

// The types of errors: OpenAI's where it has one.
const (
	InvalidRequest = "invalid_request_error"
	NotFound       = "not_found"
	RateLimited    = "rate_limit_exceeded"
	Internal       = "internal_error"
	BadGateway     = "bad_gateway"
	Unavailable    = "service_unavailable"
)

// WriteError writes an error in OpenAI's shape.
func WriteError(w http.ResponseWriter, code int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": message, "type": kind, "code": code}})
}
