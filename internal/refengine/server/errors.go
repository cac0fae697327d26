package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// apiError is an answer in OpenAI's error shape.
type apiError struct {
	status  int
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

func (e *apiError) Error() string { return e.Message }

// badRequest blames a parameter; param may be empty.
func badRequest(param, format string, args ...any) *apiError {
	e := &apiError{status: http.StatusBadRequest, Message: fmt.Sprintf(format, args...), Type: "invalid_request_error"}
	if param != "" {
		e.Param = &param
	}
	return e
}

func unavailable(format string, args ...any) *apiError {
	return &apiError{status: http.StatusServiceUnavailable, Message: fmt.Sprintf(format, args...), Type: "service_unavailable"}
}

// asAPIError turns any error into an answer.
func asAPIError(err error) *apiError {
	var api *apiError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &api):
		return api
	case errors.As(err, &tooLarge):
		e := badRequest("", "the request body is larger than the limit of %d bytes", tooLarge.Limit)
		e.status = http.StatusRequestEntityTooLarge
		return e
	case errors.Is(err, scheduler.ErrQueueFull), errors.Is(err, scheduler.ErrDraining):
		return unavailable("%v", err)
	}
	return &apiError{status: http.StatusInternalServerError, Message: err.Error(), Type: "internal_error"}
}

func writeError(w http.ResponseWriter, err error) {
	api := asAPIError(err)
	writeErrorBody(w, api, map[string]any{"error": api})
}

// writeErrorBody writes an error in the shape of an API.
func writeErrorBody(w http.ResponseWriter, api *apiError, body map[string]any) {
	if api.status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	writeJSON(w, api.status, body)
}

// writeJSON writes an answer. A write error means that the client has left; there is nobody to tell.
func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value)
}
