// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// TestTokensThatEndEngines checks that no engine gets a prompt that would end it. An engine that checks prompts gets
// them, and answers itself.
func TestTokensThatEndEngines(t *testing.T) {
	for dialect, engine := range map[string]string{"sglang-0.5.17": "SGLang", "vllm-0.32.0": "VLLM"} {
		t.Run(dialect, func(t *testing.T) {
			address := startReferenceEngineWith(t, func(o *refengine.Options) { o.Dialect, o.EnableMetrics = dialect, true })
			shape := planstest.Shape
			shape.Vocabulary = 4096
			pool := checkedPool(t, discovery.Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", Shape: &shape, Engine: engine})
			url, _ := proxyServer(t, pool, ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
			bodies := map[string]string{
				"/v1/completions":      `{"model":"tiny","prompt":[1,4096],"max_tokens":1}`,
				"/v1/chat/completions": `{"model":"tiny","messages":[{"role":"user","content":"a"}],"input_ids":[999999],"max_tokens":1}`,
				"/generate":            `{"text":"a","input_ids":[-1],"sampling_params":{"max_new_tokens":1}}`,
				"/vertex_generate":     `{"instances":[{"input_ids":[999999]}]}`,
			}
			if engine == "VLLM" {
				bodies = map[string]string{"/v1/completions": bodies["/v1/completions"]}
			}
			for path, body := range bodies {
				response, text := post(t, url+path, body)
				if rejected := strings.Contains(text, "is not in the vocabulary of the model; 0 to 4095 is allowed"); response.StatusCode != http.StatusBadRequest || rejected != (engine == "SGLang") {
					t.Errorf("%s: %s %s", path, response.Status, text)
				}
			}
			if response, text := post(t, url+"/v1/completions", `{"model":"tiny","prompt":[1,4095],"max_tokens":1}`); response.StatusCode != http.StatusOK {
				t.Errorf("after the prompts: %s %s", response.Status, text)
			}
		})
	}
}
