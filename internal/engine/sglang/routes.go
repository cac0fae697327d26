// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"slices"

	"github.com/semmoe/operator/internal/engine"
)

// routes lists SGLang's routes for clients. The wheels of 0.5.12, 0.5.17, 0.5.20 and 0.5.23 were read. Handlers of chat
// completions and completions read the rank header. The others do not, and the requests of some of them have no member
// for a rank.
func routes() []engine.Route {
	open := engine.Release{}
	at := func(patch int) engine.Release { return engine.Release{Minor: 5, Patch: patch} }
	const server = "srt/entrypoints/http_server.py"
	return slices.Concat(
		engine.NewRoutes(engine.ByHeader, minimum, open, server, engine.Run, "/v1/completions", "/v1/chat/completions"),
		engine.NewRoutes(engine.ByHeader, minimum, open, "srt/entrypoints/anthropic/serving.py; reads the rank header as chat completions do", engine.Run, "/v1/messages"),
		engine.NewRoutes(engine.ByHeader, minimum, open, "srt/entrypoints/http_server.py; chat completions", engine.Run, "/invocations"),
		engine.NewRoutes(engine.ByMember, minimum, open, "srt/entrypoints/http_server.py; ignores the rank header: sgl-project/sglang#38729", engine.Run, "/generate"),
		engine.NewRoutes(engine.ByLoad, minimum, at(19), "srt/entrypoints/openai/serving_responses.py: ignores the rank", engine.Run, "/v1/responses"),
		engine.NewRoutes(engine.ByHeader, at(20), open, "srt/entrypoints/openai/serving_responses.py", engine.Read, "/v1/responses"),
		engine.NewRoutes(engine.ByLoad, minimum, open, server, engine.Read,
			"/v1/embeddings", "/encode", "/classify", "/v1/classify", "/v1/rerank", "/v1/audio/transcriptions"),
		engine.NewRoutes(engine.ByLoad, minimum, open, server, engine.Run, "/v1/score", "/vertex_generate"),
		engine.NewRoutes(engine.ByLoad, minimum, open, "srt/entrypoints/ollama/serving.py", engine.Run, "/api/generate", "/api/show"),
		engine.NewRoutes(engine.ByLoad, minimum, open, "srt/entrypoints/ollama/serving.py; 0.5.17 answers 500", engine.Run, "/api/chat"),
		engine.NewRoutes(engine.ByLoad, at(23), open, server, engine.Read, "/v1/decisions", "/v1/systemone"),
		engine.NewRoutes(engine.ByLoad, minimum, open, server, engine.Run,
			"/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize", "/v1/messages/count_tokens", "/parse_function_call", "/separate_reasoning"),
	)
}

// administrative lists SGLang's routes for administrators, of all releases that were read (srt/entrypoints/http_server.py).
var administrative = []string{
	"/abort_request", "/add_external_corpus", "/begin_weight_update", "/clear_hicache_storage_backend", "/close_session", "/configure_logging", "/continue_generation",
	"/destroy_weights_update_group", "/dump_expert_distribution_record", "/dumper", "/end_weight_update", "/flush_cache", "/freeze_gc", "/get_hicache_l3_cache_layout",
	"/get_internal_state", "/get_load", "/get_remote_instance_transfer_engine_info", "/get_server_info", "/get_weights_by_name", "/health_generate", "/hicache",
	"/init_weights_send_group_for_remote_instance", "/init_weights_update_group", "/is_scaling_elastic_ep", "/list_external_corpora", "/load_lora_adapter",
	"/load_lora_adapter_from_tensors", "/metrics", "/open_session", "/pause_generation", "/pd_role_switch", "/release_memory_occupation",
	"/remote_instance_transfer_engine_info", "/remove_external_corpus", "/resume_memory_occupation", "/scale_elastic_ep", "/send_weights_to_remote_instance",
	"/server_info", "/set_internal_state", "/set_trace_level", "/slow_down", "/start_expert_distribution_record", "/start_profile", "/stop_expert_distribution_record",
	"/stop_profile", "/unload_lora_adapter", "/update_weight_version", "/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_ipc",
	"/update_weights_from_tensor", "/v1/loads", "/weights_checker",
}
