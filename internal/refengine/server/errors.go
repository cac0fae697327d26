// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// apiError is an error response in OpenAI's format.
type apiError struct {
	status  int
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
	// invalid is true if the body is malformed, so that its values were not checked.
	invalid bool
	// unstored is true if the requested response is not stored.
	unstored bool
}

// plainError is the type of errors that are not in a JSON object: FastAPI's answer to an unexpected exception.
const plainError = "plain"

func (e *apiError) Error() string { return e.Message }

// badRequest returns an error for an invalid parameter. param may be empty.
func badRequest(param, format string, args ...any) *apiError {
	e := &apiError{status: http.StatusBadRequest, Message: fmt.Sprintf(format, args...), Type: "invalid_request_error"}
	if param != "" {
		e.Param = &param
	}
	return e
}

// invalid returns an error for a malformed body.
func invalid(param, format string, args ...any) *apiError {
	e := badRequest(param, format, args...)
	e.invalid = true
	return e
}

func unavailable(format string, args ...any) *apiError {
	return &apiError{status: http.StatusServiceUnavailable, Message: fmt.Sprintf(format, args...), Type: "service_unavailable"}
}

// asAPIError converts an error to an error response.
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

// writeError writes an error in the form of the dialect.
func (s *Server) writeError(w http.ResponseWriter, r *http.Request, err error) {
	api := asAPIError(err)
	if api.status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	if api.Type == plainError {
		http.Error(w, api.Message, api.status)
		return
	}
	writeJSON(w, api.status, s.dialect.failure(r.URL.Path, api))
}

// writeJSON writes a response. A write error means that the client has disconnected, and is ignored.
func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value)
}
