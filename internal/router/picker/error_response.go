// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"errors"
	"io"
	"net/http"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/status"

	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/wire"
)

// errorResponses maps errors to responses. kind is the error type of the OpenAI format. retryAfter is in seconds.
var errorResponses = []struct {
	err        error
	code       int
	kind       string
	retryAfter int
}{
	{ErrNoEndpoint, http.StatusServiceUnavailable, "service_unavailable", 5},
	{ErrAllFull, http.StatusTooManyRequests, "rate_limit_exceeded", 1},
	{client.ErrNoMemory, http.StatusTooManyRequests, "rate_limit_exceeded", 1},
	{ErrNoRoute, http.StatusNotFound, "not_found", 0},
	{ErrInvalid, http.StatusBadRequest, "invalid_request_error", 0},
	{ErrCompressed, http.StatusUnsupportedMediaType, "invalid_request_error", 0},
	{errBodyTooLarge, http.StatusRequestEntityTooLarge, "invalid_request_error", 0},
	{errHeaderTooLarge, http.StatusRequestHeaderFieldsTooLarge, "invalid_request_error", 0},
}

// StatusOf returns the status code that answers an error of Pick.
func StatusOf(err error) int {
	code := http.StatusBadGateway
	for _, refusal := range errorResponses {
		if errors.Is(err, refusal.err) {
			code = refusal.code
		}
	}
	return code
}

// errImmediateResponse is returned after an immediate response, which ends the exchange.
var errImmediateResponse = errors.New("refused")

// sendError sends an immediate response instead of an endpoint. It sends nothing if the stream has ended.
func (x *exchange) sendError(err error) error {
	if x.stream.Context().Err() != nil {
		return x.stream.Context().Err()
	}
	if _, ofStream := status.FromError(err); ofStream || errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	code, kind, message, retryAfter := StatusOf(err), "bad_gateway", "the request could not be forwarded to a serving pod", 0
	for _, refusal := range errorResponses {
		if errors.Is(err, refusal.err) {
			kind, message, retryAfter = refusal.kind, err.Error(), refusal.retryAfter
		}
	}
	x.count(code)
	if err := x.stream.Send(immediate(x.path, code, kind, message, retryAfter)); err != nil {
		return err
	}
	return errImmediateResponse
}

// immediate returns an immediate response to a request for a path, in the format of its API.
func immediate(path string, code int, kind, message string, retryAfter int) *extprocv3.ProcessingResponse {
	headers := []*corev3.HeaderValueOption{setHeader("content-type", "application/json")}
	if retryAfter > 0 {
		headers = append(headers, setHeader("retry-after", strconv.Itoa(retryAfter)))
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extprocv3.ImmediateResponse{
			Status:  &typev3.HttpStatus{Code: typev3.StatusCode(code)},
			Headers: &extprocv3.HeaderMutation{SetHeaders: headers},
			Body:    wire.ErrorBody(path, code, kind, message),
			Details: "semmoe_" + kind,
		},
	}}
}
