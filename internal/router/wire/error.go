package wire

import (
	"encoding/json"
	"net/http"
)

// WriteError writes an error in OpenAI's shape.
func WriteError(w http.ResponseWriter, code int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": message, "type": kind, "code": code}})
}
