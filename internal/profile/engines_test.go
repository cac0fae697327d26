// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/engine/registry"
)

// asVLLM serves the routes of vLLM in front of the reference engine.
func asVLLM(t *testing.T, endpoint string, layers, top int) string {
	t.Helper()
	forward := func(w http.ResponseWriter, path string, body, into any) bool {
		text, err := json.Marshal(body)
		if err != nil {
			t.Error(err)
		}
		response, err := http.Post(endpoint+path, "application/json", bytes.NewReader(text))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return false
		}
		defer response.Body.Close()
		if err := json.NewDecoder(response.Body).Decode(into); err != nil || response.StatusCode != http.StatusOK {
			http.Error(w, response.Status, response.StatusCode)
			return false
		}
		return true
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, r *http.Request) {
		var body, response map[string]any
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		if forward(w, "/v1/tokenize", body, &response) {
			json.NewEncoder(w).Encode(response) //nolint:errcheck // test server
		}
	})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Prompt      []int32 `json:"prompt"`
			MaxTokens   int     `json:"max_tokens"`
			Temperature float64 `json:"temperature"`
			TokenIDs    bool    `json:"return_token_ids"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || !body.TokenIDs || body.Temperature != 0 {
			t.Errorf("%+v, error %v", body, err)
		}
		var response struct {
			OutputIDs []int32 `json:"output_ids"`
			Meta      struct {
				RoutedExperts string `json:"routed_experts"`
			} `json:"meta_info"`
		}
		if !forward(w, "/generate", map[string]any{
			"input_ids": body.Prompt, "return_routed_experts": true, "sampling_params": map[string]any{"temperature": 0, "max_new_tokens": body.MaxTokens},
		}, &response) {
			return
		}
		raw, err := base64.StdEncoding.DecodeString(response.Meta.RoutedExperts)
		if err != nil {
			t.Error(err)
		}
		header := fmt.Sprintf("{'descr': '<i4', 'fortran_order': False, 'shape': (%d, %d, %d), }\n", len(raw)/(4*layers*top), layers, top)
		file := append([]byte("\x93NUMPY\x01\x00"), binary.LittleEndian.AppendUint16(nil, uint16(len(header)))...)
		file = append(append(file, header...), raw...)
		json.NewEncoder(w).Encode(map[string]any{"choices": []any{map[string]any{ //nolint:errcheck // test server
			"token_ids": response.OutputIDs, "routed_experts": base64.StdEncoding.EncodeToString(file),
		}}})
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL
}

// TestRecordsThroughVLLM checks that a profile does not depend on the engine: the routes of SGLang and vLLM give the
// same trace.
func TestRecordsThroughVLLM(t *testing.T) {
	endpoint := startEngine(t, true)
	items := []Item{{Line: 1, Prompt: "func main() {"}, {Line: 2, Messages: []Message{{"user", "der Hund und die Katze"}}}}
	o := options(t, endpoint, items)
	o.NewTokens = 3
	want, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if o.Adapter, err = registry.For("VLLM"); err != nil {
		t.Fatal(err)
	}
	o.Endpoint = asVLLM(t, endpoint, o.Report.Layers, o.Report.ExpertsPerToken)
	got, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.Trace, got.Trace); diff != "" {
		t.Errorf("the trace differs (-SGLang +vLLM):\n%s", diff)
	}
}
