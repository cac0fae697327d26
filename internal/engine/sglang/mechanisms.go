// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"maps"
	"slices"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/model/family"
)

// mapFamilies returns the families and wrappers for which a release is the oldest that is known to read a map.
func mapFamilies(release engine.Release) []string {
	var types []string
	for _, modelType := range family.Types() {
		if first := of(modelType).ReadsMap; first != "" && engine.ParseRelease(first) == release {
			types = append(types, modelType)
		}
	}
	for _, wrapper := range slices.Sorted(maps.Keys(family.SGLangWrappers)) {
		if engine.ParseRelease(family.SGLangWrappers[wrapper]) == release {
			types = append(types, wrapper)
		}
	}
	return types
}

// mechanisms lists the parts of SGLang's interface that this package names. The wheels of releases 0.5.12 to 0.5.23
// were read; 0.5.17 was run on two H100 and two H200.
func mechanisms() []engine.Mechanism {
	open := engine.Release{}
	at := func(patch int) engine.Release { return engine.Release{Minor: 5, Patch: patch} }
	const args, moe = "srt/server_args.py", "srt/server_args.py, srt/arg_groups"
	return slices.Concat(
		engine.NewMechanisms(engine.FlagKind, minimum, open, args, engine.Run,
			"--model-path --model", "--served-model-name", "--host", "--port", "--tp-size --tensor-parallel-size", "--ep-size --expert-parallel-size --ep",
			"--dp-size --data-parallel-size", "--enable-dp-attention", "--enable-return-routed-experts", "--init-expert-location",
			"--ep-num-redundant-experts", "--expert-distribution-recorder-mode"),
		engine.NewMechanisms(engine.FlagKind, minimum, open, args, engine.Read,
			"--pp-size --pipeline-parallel-size", "--nnodes", "--node-rank", "--dist-init-addr --nccl-init-addr", "--config", "--enable-eplb", "--elastic-ep-backend",
			"--deepep-mode", "--deepep-config", "--enable-two-batch-overlap", "--tbo-token-distribution-threshold",
			"--enforce-shared-experts-fusion", "--speculative-algorithm", "--schedule-policy", "--api-key", "--ssl-certfile", "--ssl-keyfile"),
		engine.NewMechanisms(engine.FlagKind, minimum, open, "srt/server_args.py; families and releases: sgl-project/sglang#36861", engine.Run, "--moe-a2a-backend"),
		engine.NewMechanisms(engine.FlagKind, minimum, open, "srt/server_args.py; static without a backend: sgl-project/sglang#32962", engine.Run, "--ep-dispatch-algorithm"),
		engine.NewMechanisms(engine.FlagKind, minimum, at(19), "srt/server_args.py; renamed by sgl-project/sglang#34998", engine.Read, "--enable-expert-distribution-metrics"),
		engine.NewMechanisms(engine.FlagKind, at(18), open, moe, engine.Read, "--expert-balancedness-report-mode"),
		engine.NewMechanisms(engine.FlagKind, at(22), open, "srt/arg_groups/parallel_hook.py; excludes --dp-size, and is to replace --enable-dp-attention", engine.Read, "--attn-dp-size"),
		engine.NewMechanisms(engine.FlagKind, minimum, open, args, engine.Run, "--kv-events-config"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "--kv-events-config: srt/disaggregation/kv_events.py", engine.Run, "publisher", "endpoint", "replay_endpoint"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "KV events: srt/disaggregation/kv_events.py; arrays in 0.5.12 and 0.5.17, maps in 0.5.23", engine.Run,
			"BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
		engine.NewMechanisms(engine.MemberKind, at(23), open, "KV events: srt/disaggregation/kv_events.py; not in 0.5.12", engine.Read, "lora_name", "cache_salt"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "srt/managers/io_struct.py", engine.Read, "lora_path", "extra_key"),
		engine.NewMechanisms(engine.RouteKind, minimum, open, "srt/entrypoints/http_server.py", engine.Run, "/health", "/server_info"),
		engine.RouteMechanisms(routes()),
		engine.NewMechanisms(engine.HeaderKind, minimum, open, "srt/entrypoints/openai/serving_base.py; sgl-project/sglang#19832", engine.Run, "X-Data-Parallel-Rank"),
		engine.NewMechanisms(engine.HeaderKind, minimum, open, "srt/entrypoints/openai/serving_base.py", engine.Read, "X-Smg-Routing-Key"),
		engine.NewMechanisms(engine.HeaderKind, at(15), open, "srt/environ.py: SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", engine.Read, "X-Override-Routed-Dp-Rank", "X-Override-Disagg-Prefill-Dp-Rank"),
		engine.NewMechanisms(engine.VariableKind, at(15), open, "srt/environ.py", engine.Read, "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "srt/managers/io_struct.py", engine.Run, "routed_dp_rank", "data_parallel_rank", "return_routed_experts", "routed_experts_start_len", "input_ids", "sampling_params", "max_new_tokens"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "srt/managers/io_struct.py", engine.Read, "disagg_prefill_dp_rank"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "srt/sampling/sampling_params.py; has an effect with --enable-deterministic-inference", engine.Read, "sampling_seed"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "srt/managers/tokenizer_manager.py", engine.Run, "meta_info", "routed_experts", "output_ids"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "srt/entrypoints/openai/protocol.py", engine.Run, "sglext"),
		engine.NewMechanisms(engine.MemberKind, at(17), open, "srt/entrypoints/openai/protocol.py; not in 0.5.12; not with streamed chats: serving_chat.py", engine.Read,
			"return_token_ids", "prompt_token_ids", "token_ids"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "documentation of sglext, other spelling", engine.Read, "sgl_ext"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "srt/eplb/expert_location.py", engine.Run, "physical_to_logical_map"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "DeepEP, through --deepep-config", engine.Read, "normal_dispatch", "normal_combine", "num_sms"),
		engine.NewMechanisms(engine.DraftKind, minimum, at(15), "srt/eplb/expert_location.py: the map's row of the draft layer's own index; it ends at start without one", engine.Read, "EAGLE NEXTN", "STANDALONE"),
		engine.NewMechanisms(engine.DraftKind, at(16), open, "srt/eplb/expert_location.py: the map's row of the draft layer's own index, else the default order", engine.Read, "EAGLE NEXTN", "STANDALONE", "FROZEN_KV_MTP"),
		engine.NewMechanisms(engine.MetricKind, minimum, open, "srt/observability", engine.Run, "sglang:spec_accept_length"),
		engine.NewMechanisms(engine.MetricKind, minimum, open, "srt/observability/metrics_collector.py; decode and prefill separately since sgl-project/sglang#19982", engine.Read, "sglang:cuda_graph_passes_total"),
		engine.NewMechanisms(engine.MetricKind, minimum, open, "srt/observability/metrics_collector.py; sgl-project/sglang#15747", engine.Read, "sglang:realtime_tokens_total"),
		engine.NewMechanisms(engine.MemberKind, minimum, open, "values of the label mode: srt/observability/metrics_collector.py", engine.Read, "prefill_none", "prefill_cuda_graph", "prefill_compute", "decode_none", "decode_cuda_graph"),
		engine.NewMechanisms(engine.FlagKind, minimum, open, args, engine.Run, "--enable-metrics"),
		engine.NewMechanisms(engine.ValueKind, minimum, open, "--moe-a2a-backend: srt/server_args.py", engine.Read, "deepep", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "megamoe"),
		engine.NewMechanisms(engine.ValueKind, at(17), open, "--moe-a2a-backend: srt/server_args.py", engine.Read, "pplx"),
		engine.NewMechanisms(engine.ValueKind, at(19), open, "--moe-a2a-backend: srt/arg_groups", engine.Read, "deepep_v2", "ascend_tp"),
		engine.NewMechanisms(engine.ValueKind, at(20), open, "--moe-a2a-backend: srt/arg_groups", engine.Read, "flashinfer_megamoe"),
		engine.NewMechanisms(engine.ValueKind, minimum, open, "--deepep-mode: srt/server_args.py", engine.Read, "low_latency"),
		engine.NewMechanisms(engine.ValueKind, minimum, open, "model types: get_model_config_for_expert_location in srt/models", engine.Read, mapFamilies(minimum)...),
		engine.NewMechanisms(engine.ValueKind, at(23), open, "model types: get_model_config_for_expert_location in srt/models", engine.Read, mapFamilies(at(23))...),
		engine.NewMechanisms(engine.ValueKind, minimum, open, "model types: srt/batch_overlap/operations_strategy.py", engine.Read, "mimo_v2_flash"),
		engine.NewMechanisms(engine.ValueKind, at(15), open, "model types: srt/batch_overlap/operations_strategy.py", engine.Read, "deepseek_v4"),
	)
}
