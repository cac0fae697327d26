// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"slices"

	"github.com/semmoe/operator/internal/engine"
)

// routes lists vLLM's routes for clients. The packages of 0.11.2, 0.22.0, 0.32.0 and 0.33.0 were read for it. Only handlers
// that call _get_data_parallel_rank read the rank header.
func routes() []engine.Route {
	open := engine.Release{}
	at := func(minor int) engine.Release { return engine.Release{Minor: minor} }
	const entrypoints, tokens = "vllm/entrypoints", "vllm/entrypoints/scale_out/token_in_token_out (earlier serve/disagg)"
	return slices.Concat(
		engine.NewRoutes(engine.ByHeader, oldest, open, entrypoints, engine.Run, "/v1/completions", "/v1/chat/completions"),
		engine.NewRoutes(engine.ByHeader, oldest, open, "vllm/entrypoints/anthropic; vllm-project/vllm#22627; reads the rank header as chat completions do", engine.Run, "/v1/messages"),
		engine.NewRoutes(engine.ByHeader, returnsExperts, open, "vllm/entrypoints/openai/chat_completion/batch_serving.py", engine.Run, "/v1/chat/completions/batch"),
		engine.NewRoutes(engine.ByHeader, oldest, open, "vllm/entrypoints/serve/sagemaker: the handler of the request's form", engine.Read, "/invocations"),
		engine.NewRoutes(engine.ByLoad, oldest, oldest, tokens+": ignores the rank", engine.Read, "/inference/v1/generate"),
		engine.NewRoutes(engine.ByHeader, returnsExperts, open, tokens, engine.Read, "/inference/v1/generate"),
		engine.NewRoutes(engine.ByLoad, oldest, at(32), "vllm/entrypoints/openai: ignores the rank", engine.Run, "/v1/responses"),
		engine.NewRoutes(engine.ByHeader, at(33), open, "vllm/entrypoints/openai/responses/serving.py", engine.Read, "/v1/responses"),
		engine.NewRoutes(engine.ByLoad, oldest, open, "vllm/entrypoints/pooling", engine.Read,
			"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
		engine.NewRoutes(engine.ByLoad, returnsExperts, open, "vllm/entrypoints/pooling/embed", engine.Read, "/v2/embed"),
		engine.NewRoutes(engine.ByLoad, oldest, open, "vllm/entrypoints/speech_to_text", engine.Read, "/v1/audio/transcriptions", "/v1/audio/translations"),
		engine.NewRoutes(engine.ByLoad, returnsExperts, open, "vllm/entrypoints/generate/generative_scoring", engine.Read, "/generative_scoring"),
		engine.NewRoutes(engine.ByLoad, at(32), open, "vllm/entrypoints/generate/structured_decisions", engine.Read, "/v1/systemone"),
		engine.NewRoutes(engine.ByLoad, at(33), open, "vllm/entrypoints/openai/decisions", engine.Read, "/v1/decisions"),
		engine.NewRoutes(engine.ByLoad, at(32), open, "vllm/entrypoints/cohere, with VLLM_ENABLE_COHERE_API", engine.Read, "/cohere/v2/chat", "/cohere/v2/chat/render"),
		engine.NewRoutes(engine.ByLoad, oldest, open, entrypoints, engine.Run, "/tokenize", "/detokenize"),
		engine.NewRoutes(engine.ByLoad, at(17), open, "vllm/entrypoints/anthropic/api_router.py; vllm-project/vllm#35588", engine.Read, "/v1/messages/count_tokens"),
		engine.NewRoutes(engine.ByLoad, returnsExperts, open, "vllm/entrypoints/scale_out/render (earlier serve/render)", engine.Read, "/v1/completions/render", "/v1/chat/completions/render"),
		engine.NewRoutes(engine.ByLoad, at(32), open, "vllm/entrypoints/scale_out", engine.Read,
			"/v1/messages/render", "/v1/responses/render", "/v1/completions/derender", "/v1/chat/completions/derender"),
	)
}

// administrative lists vLLM's routes for administrators, of all releases that were read (vllm/entrypoints).
var administrative = []string{
	"/abort_requests", "/collective_rpc", "/docs", "/fault_tolerance", "/finish_weight_update", "/get_world_size", "/inference/v1/abort_requests",
	"/init_weight_transfer_engine", "/is_paused", "/is_scaling_elastic_ep", "/is_sleeping", "/kv_event_sources", "/load", "/metrics", "/openapi.json", "/pause",
	"/redoc", "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/server_info",
	"/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update", "/start_profile", "/start_weight_update", "/stop_profile", "/tokenizer_info",
	"/update_weight_version", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/wake_up", "/weight_checker", "/weight_info",
}
