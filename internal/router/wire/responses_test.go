// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"net/http/httptest"
	"strings"
	"testing"
)

func TestPreviousResponse(t *testing.T) {
	for body, want := range map[string]string{
		`{"input":"a"}`: "", `{"previous_response_id":null}`: "", `{"previous_response_id":"resp_1","store":false}`: "resp_1", `{"previous_response_id":7}`: "", `{`: "", ``: "",
	} {
		if got := ParseBody([]byte(body)).PreviousResponse(); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

// TestWriteError checks that errors have the format of the API that the path belongs to.
func TestWriteError(t *testing.T) {
	for _, tc := range []struct {
		path       string
		code       int
		kind, want string
	}{
		{"/v1/completions", 429, RateLimited, `{"error":{"code":429,"message":"m","param":null,"type":"rate_limit_exceeded"}}`},
		{"/v1/responses/", 503, Unavailable, `{"error":{"code":503,"message":"m","param":null,"type":"service_unavailable"}}`},
		{"/v1/messages/", 429, RateLimited, `{"error":{"message":"m","type":"rate_limit_error"},"type":"error"}`},
		{"/v1/messages/render", 429, RateLimited, `{"error":{"message":"m","type":"rate_limit_error"},"type":"error"}`},
		{"/v1/messages", 429, RateLimited, `{"error":{"message":"m","type":"rate_limit_error"},"type":"error"}`},
		{"/v1/messages/count_tokens", 404, NotFound, `{"error":{"message":"m","type":"not_found_error"},"type":"error"}`},
		{"/qwen/v1/messages", 503, Unavailable, `{"error":{"message":"m","type":"overloaded_error"},"type":"error"}`},
		{"/v1/messages", 502, BadGateway, `{"error":{"message":"m","type":"api_error"},"type":"error"}`},
		{"/v1/messages", 400, InvalidRequest, `{"error":{"message":"m","type":"invalid_request_error"},"type":"error"}`},
		{"/v1/messagesx", 400, InvalidRequest, `{"error":{"code":400,"message":"m","param":null,"type":"invalid_request_error"}}`},
	} {
		w := httptest.NewRecorder()
		WriteError(w, tc.path, tc.code, tc.kind, "m")
		if got := strings.TrimSpace(w.Body.String()); w.Code != tc.code || got != tc.want || w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %s, want %s", tc.path, w.Code, got, tc.want)
		}
	}
}

// TestIsNotFoundResponse uses the responses of engines for an unknown route and for an unknown model.
func TestIsNotFoundResponse(t *testing.T) {
	for answer, want := range map[string]bool{
		`{"detail":"Not Found"}`: true, // FastAPI: TensorRT-LLM
		`{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}`:     true, // vLLM 0.32.0
		`{"object":"error","message":"Not Found","type":"404","param":null,"code":404}`:    true, // SGLang 0.5.17
		`{"error":{"message":"The model x does not exist.","type":"NotFoundError"}}`:       false,
		`{"type":"error","error":{"type":"not_found_error","message":"Not Found: model"}}`: false,
		`Not Found`: false, ``: false, `{"text":"Not Found"}`: false,
	} {
		if got := IsNotFoundResponse([]byte(answer)); got != want {
			t.Errorf("%s: %v, want %v", answer, got, want)
		}
	}
}
