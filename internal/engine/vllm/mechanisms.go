// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"slices"

	"github.com/semmoe/operator/internal/engine"
)

// Mechanisms lists the parts of vLLM's interface that this package names. Releases 0.11.2 to 0.33.0 were read; 0.22.1
// was run on two H200, 0.32.0 on CPU.
func Mechanisms() []engine.Mechanism {
	open := engine.Release{}
	at := func(minor int) engine.Release { return engine.Release{Minor: minor} }
	const args, config = "vllm/engine/arg_utils.py", "vllm/config/vllm.py"
	return slices.Concat(
		engine.NewMechanisms(engine.FlagKind, oldest, open, args, engine.Run,
			"--model", "--served-model-name", "--host", "--port", "--tensor-parallel-size -tp", "--data-parallel-size -dp", "--enable-expert-parallel -ep",
			"--expert-placement-strategy", "--enable-eplb", "--eplb-config"),
		engine.NewMechanisms(engine.FlagKind, oldest, open, args, engine.Read,
			"--no-enable-expert-parallel", "--pipeline-parallel-size -pp", "--data-parallel-rank -dpn", "--data-parallel-external-lb -dpe", "--data-parallel-hybrid-lb -dph",
			"--data-parallel-size-local -dpl", "--data-parallel-address -dpa", "--data-parallel-rpc-port -dpp", "--data-parallel-start-rank -dpr",
			"--headless", "--config", "--enable-dbo", "--no-enable-dbo", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold",
			"--all2all-backend", "--kv-transfer-config", "--kv-offloading-size", "--decode-context-parallel-size -dcp", "--no-enable-prefix-caching", "--speculative-config -sc",
			"--additional-config", "--enable-lora", "--lora-modules"),
		engine.NewMechanisms(engine.FlagKind, oldest, open, "vllm/entrypoints/openai/cli_args.py, later launchers/cli_args.py, later common/cli_args.py", engine.Read, "--api-key", "--ssl-certfile", "--ssl-keyfile"),
		engine.NewMechanisms(engine.VariableKind, oldest, open, "vllm/envs.py", engine.Read, "VLLM_API_KEY"),
		engine.NewMechanisms(engine.FlagKind, oldest, open, "vllm/engine/arg_utils.py; vllm-project/vllm#23691", engine.Read, "--nnodes -n", "--node-rank -r", "--master-addr"),
		engine.NewMechanisms(engine.FlagKind, at(33), open, "vllm/utils/argparse_utils.py: EnableDisableAction", engine.Read, "--disable-expert-parallel", "--disable-dbo", "--disable-prefix-caching", "--disable-lora"),
		engine.NewMechanisms(engine.FlagKind, at(12), open, args, engine.Read, "--prefill-context-parallel-size -pcp"),
		engine.NewMechanisms(engine.FlagKind, at(14), open, args, engine.Read, "--ubatch-size"),
		engine.NewMechanisms(engine.FlagKind, returnsExperts, open, args, engine.Read, "--spec-method", "--spec-model", "--spec-tokens"),
		engine.NewMechanisms(engine.DraftKind, oldest, open, "no map is read: draft layers have the checkpoint's order", engine.Read, "mtp", "eagle", "draft_model"),
		engine.NewMechanisms(engine.FlagKind, at(14), open, "vllm/engine/arg_utils.py; not with KV connectors: vllm/config/vllm.py", engine.Run, "--enable-return-routed-experts"),
		engine.NewMechanisms(engine.FlagKind, at(17), open, args, engine.Read, "--enable-elastic-ep"),
		engine.NewMechanisms(engine.FlagKind, oldest, open, args, engine.Run, "--kv-events-config"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "--kv-events-config: vllm/config/kv_events.py", engine.Run, "enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "KV events: vllm/distributed/kv_events.py; maps since vllm-project/vllm#42892", engine.Run,
			"BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
		engine.NewMechanisms(engine.MemberKind, at(22), open, "KV events: vllm/distributed/kv_events.py; not in 0.11.2", engine.Read, "lora_name", "extra_keys", "group_idx"),
		engine.NewMechanisms(engine.MemberKind, at(32), open, "vllm/entrypoints/openai/completion/protocol.py", engine.Read, "cache_salt", "truncate_prompt_tokens"),
		engine.NewMechanisms(engine.FlagKind, returnsExperts, open, args, engine.Read, "--data-parallel-multi-port-external-lb -dpm"),
		engine.NewMechanisms(engine.VariableKind, oldest, at(15), "vllm/envs.py; removed by vllm-project/vllm#33535", engine.Read, backendVariable),
		engine.NewMechanisms(engine.VariableKind, oldest, open, "vllm/envs.py", engine.Read, "VLLM_DBO_COMM_SMS"),
		engine.NewMechanisms(engine.VariableKind, returnsExperts, open, "vllm/envs.py", engine.Run, RunnerVariable),
		engine.NewMechanisms(engine.RouteKind, oldest, open, "vllm/entrypoints", engine.Run, "/health", "/version"),
		engine.RouteMechanisms(routes()),
		engine.NewMechanisms(engine.HeaderKind, oldest, open, "vllm/entrypoints", engine.Run, "X-data-parallel-rank X-Data-Parallel-Rank"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "vllm/entrypoints/openai/completion/protocol.py", engine.Run, "max_tokens", "return_token_ids", "token_ids", "seed"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "vllm/entrypoints/openai/chat_completion/protocol.py, completion/protocol.py", engine.Run, "prompt_token_ids"),
		engine.NewMechanisms(engine.MemberKind, returnsExperts, open, "vllm/entrypoints/openai/completion/protocol.py; vllm-project/vllm#38939", engine.Run, "routed_experts"),
		engine.NewMechanisms(engine.MemberKind, returnsExperts, open, "vllm/sampling_params.py", engine.Read, "routed_experts_prompt_start"),
		engine.NewMechanisms(engine.MemberKind, returnsExperts, open, "not known to vLLM, which ignores it", engine.Run, "return_routed_experts"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "--kv-transfer-config: vllm/config/kv_transfer.py", engine.Read, "kv_connector", "kv_connector_extra_config"),
		engine.NewMechanisms(engine.MemberKind, v2Capture, open, "--speculative-config: vllm/config/vllm.py", engine.Read, "enable_adaptive_verification"),
		engine.NewMechanisms(engine.MetricKind, oldest, open, "vllm/v1/metrics/loggers.py, vllm/v1/metrics/stats.py; without cached tokens by vllm-project/vllm#43346", engine.Run, "vllm:iteration_tokens_total"),
		engine.NewMechanisms(engine.MetricKind, oldest, open, "vllm/v1/metrics/loggers.py", engine.Run, "vllm:num_requests_running"),
		engine.NewMechanisms(engine.MetricKind, oldest, open, "vllm/v1/metrics/prometheus.py: with one API server; as many as data-parallel ranks by default since vllm-project/vllm#32525", engine.Run, "process_start_time_seconds"),
		engine.NewMechanisms(engine.FlagKind, oldest, open, args, engine.Read, "--disable-log-stats"),
		engine.NewMechanisms(engine.ValueKind, oldest, open, "--all2all-backend: vllm/config/parallel.py", engine.Read, "allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput"),
		engine.NewMechanisms(engine.ValueKind, oldest, at(17), "--all2all-backend: vllm/config/parallel.py; later an alias of the default", engine.Read, "naive", "pplx"),
		engine.NewMechanisms(engine.ValueKind, at(21), open, "--all2all-backend; overlap from 0.24.0: vllm-project/vllm#45275", engine.Read, "nixl_ep"),
		engine.NewMechanisms(engine.ValueKind, oldest, open, "--expert-placement-strategy: vllm/config/parallel.py", engine.Run, "linear"),
		engine.NewMechanisms(engine.ValueKind, returnsExperts, open, config, engine.Read, transferConnectors...),
	)
}
