// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"slices"

	"github.com/semmoe/operator/internal/engine"
)

// routes lists the routes of trtllm-serve for clients. The server reads no rank.
func routes() []engine.Route {
	one, open := engine.Release{Major: 1}, engine.Release{}
	const server = "tensorrt_llm/serve/openai_server.py"
	return slices.Concat(
		engine.NewRoutes(engine.ByLoad, one, open, server, engine.Read, "/v1/completions", "/v1/chat/completions"),
		engine.NewRoutes(engine.ByLoad, engine.Release{Major: 1, Minor: 1}, open, server, engine.Read, "/v1/responses"),
		engine.NewRoutes(engine.ByLoad, newest, open, "tensorrt_llm/serve/openai_server.py; NVIDIA/TensorRT-LLM#18289, after 1.3.0rc23", engine.Read, "/v1/messages", "/v1/messages/count_tokens"),
	)
}

// administrative lists the other routes of trtllm-serve (tensorrt_llm/serve/openai_server.py).
var administrative = []string{
	"/health_generate", "/kv_cache_events", "/metrics", "/perf_metrics", "/prometheus", "/release_memory", "/resume_memory", "/server_info",
	"/steady_clock_offset", "/update_weights", "/v1/kv_cache_hints",
}
