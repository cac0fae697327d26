package server

import (
	"net/http"

	"github.com/semmoe/operator/internal/engine"
)

// trtllmDialect is the surface of trtllm-serve (tensorrt_llm/serve/openai_server.py of 1.2 and 1.3). It reads no rank and returns no routed
// experts. /metrics is a list of statistics in JSON.
func trtllmDialect(release engine.Release) Dialect {
	return Dialect{
		Release: release,
		health:  []string{"GET /health", "GET /health_generate"},
		routes: map[string]handler{
			"GET /v1/models":            (*Engine).models,
			"GET /version":              (*Engine).version,
			"GET /metrics":              (*Engine).iterationStatistics,
			"POST /v1/completions":      (*Engine).completions,
			"POST /v1/chat/completions": (*Engine).chatCompletions,
			"POST " + responsesPath:     (*Engine).responses,
		},
		routing: func(_ *Engine, _ *http.Request, p *parameters) error {
			p.routingParameters = routingParameters{}
			return nil
		},
		failure: func(_ string, e *apiError) any {
			switch {
			case e.Type == "http": // FastAPI's own
				return map[string]any{"detail": e.Message}
			case e.invalid:
				return map[string]any{"error": e.Message}
			}
			return map[string]any{"object": "error", "message": e.Message, "type": "BadRequestError", "param": nil, "code": e.status}
		},
		missing: func(_ *http.Request, status int) *apiError {
			return &apiError{status: status, Message: http.StatusText(status), Type: "http"}
		},
		metrics: sglangMetrics, // not served
	}
}

func (e *Engine) iterationStatistics(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, []any{})
	return nil
}
