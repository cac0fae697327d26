// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/files/regularfile"
)

// rule is a reason for which some releases of an engine fail at start.
type rule struct {
	engines []string
	// first and last are the first and the last release with the rule. A zero value means no bound.
	first, last engine.Release
	// source is the location of the rule in the engine's source code.
	source string
	check  func(a *arguments) error
}

var (
	ofVLLM   = []string{"vllm", "vllm-ascend"}
	ofAscend = []string{"vllm-ascend"}
	ofSGLang = []string{"sglang"}
	ofTRTLLM = []string{"tensorrt-llm"}
)

func at(minor, patch int) engine.Release { return engine.Release{Minor: minor, Patch: patch} }

// rules lists the combinations of the operator's and users' arguments that an engine rejects.
var rules = []rule{
	{ofSGLang, at(5, 17), engine.Release{}, "srt/server_args.py, from 0.5.19 srt/arg_groups/parallel_hook.py; sgl-project/sglang#32962", func(a *arguments) error {
		algorithm := a.text("--ep-dispatch-algorithm", "")
		if a.text("--moe-a2a-backend", "none") == "none" && (algorithm == "static" || algorithm == "lp") {
			return fmt.Errorf("ValueError: --ep-dispatch-algorithm %s needs an all-to-all backend", algorithm)
		}
		return nil
	}},
	{ofSGLang, engine.Release{}, engine.Release{}, "srt/server_args.py: _handle_data_parallelism", func(a *arguments) error {
		if tp, dp := a.number("--tp-size", 1), a.number("--dp-size", 1); a.given("--enable-dp-attention") && tp%dp != 0 {
			return fmt.Errorf("AssertionError: tp_size %d, dp_size %d", tp, dp)
		}
		return nil
	}},
	{ofSGLang, engine.Release{}, at(5, 14), "srt/server_args.py: check_server_args", func(a *arguments) error {
		if a.given("--enable-two-batch-overlap") && a.text("--moe-a2a-backend", "none") == "none" {
			return errors.New("ValueError: two batch overlap needs an all-to-all backend")
		}
		return nil
	}},
	{ofSGLang, at(5, 15), engine.Release{}, "srt/server_args.py: _check_two_batch_overlap", func(a *arguments) error {
		if a.given("--enable-two-batch-overlap") && a.text("--moe-a2a-backend", "none") == "none" && !a.given("--enable-dp-attention") {
			return errors.New("ValueError: two batch overlap without an all-to-all backend needs --enable-dp-attention")
		}
		return nil
	}},
	{ofSGLang, engine.Release{}, at(5, 14), "srt/server_args.py: check_server_args", func(a *arguments) error {
		if a.given("--enable-two-batch-overlap") && a.given("--enforce-shared-experts-fusion") {
			return errors.New("ValueError: --enable-two-batch-overlap and --enforce-shared-experts-fusion exclude each other")
		}
		return nil
	}},
	{ofSGLang, at(5, 22), engine.Release{}, "srt/arg_groups/parallel_hook.py", func(a *arguments) error {
		if a.number("--attn-dp-size", 1) > 1 && a.number("--dp-size", 1) > 1 {
			return errors.New("ValueError: --attn-dp-size and --dp-size exclude each other")
		}
		return nil
	}},
	{ofVLLM, engine.Release{}, engine.Release{}, "vllm/engine/arg_utils.py", func(a *arguments) error {
		nodes, rank := a.number("--nnodes", 1), a.number("--node-rank", 0)
		world := a.number("--data-parallel-size", 1) * a.number("--tensor-parallel-size", 1)
		switch {
		case nodes < 1 || world%nodes != 0:
			return fmt.Errorf("ValueError: --nnodes %d does not divide the world size %d", nodes, world)
		case rank < 0 || rank >= nodes:
			return fmt.Errorf("ValueError: --node-rank %d is not between 0 and %d", rank, nodes-1)
		case a.given("--headless") != (rank > 0):
			return fmt.Errorf("--headless is %t on node %d: only the first node serves", a.given("--headless"), rank)
		}
		return nil
	}},
	{ofVLLM, at(22, 0), at(30, 0), "vllm/config/vllm.py: __post_init__ of 0.22.0", func(a *arguments) error {
		return refuseCapture(a, func(string) bool { return true })
	}},
	{ofVLLM, at(31, 0), engine.Release{}, "vllm/config/vllm.py: _verify_aux_output_compatibility of 0.32.0", func(a *arguments) error {
		err := refuseCapture(a, func(name string) bool {
			return slices.Contains([]string{"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector"}, name)
		})
		speculative, broken := a.object("--speculative-config")
		runner, chosen := os.LookupEnv("VLLM_USE_V2_MODEL_RUNNER")
		switch {
		case err != nil || !a.given("--enable-return-routed-experts"):
		case broken != nil:
			return broken
		case chosen && runner != "1", !chosen && (a.given("--enable-dbo") || a.number("--ubatch-size", 0) > 1):
			err = errors.New("ValueError: --enable-return-routed-experts needs the V2 model runner")
		case a.given("--no-enable-prefix-caching"):
			err = errors.New("ValueError: --enable-return-routed-experts needs prefix caching")
		case speculative["enable_adaptive_verification"] == true:
			err = errors.New("ValueError: --enable-return-routed-experts excludes adaptive verification")
		case a.number("--decode-context-parallel-size", 1) > 1, a.number("--prefill-context-parallel-size", 1) > 1:
			err = errors.New("ValueError: --enable-return-routed-experts excludes context parallelism")
		}
		return err
	}},
	{[]string{"vllm"}, engine.Release{}, at(23, 0), "vllm/config/vllm.py: __post_init__", func(a *arguments) error {
		return refuseOverlap(a, "deepep_low_latency", "deepep_high_throughput")
	}},
	{[]string{"vllm"}, at(24, 0), engine.Release{}, "vllm/config/vllm.py: __post_init__; vllm-project/vllm#45275", func(a *arguments) error {
		return refuseOverlap(a, "deepep_low_latency", "deepep_high_throughput", "nixl_ep")
	}},
	{ofAscend, engine.Release{}, at(26, 0), "vllm_ascend/ascend_config.py: EplbConfig", func(a *arguments) error {
		return checkEPLB(a, "ValueError: Config has no attribute '%s'", ascendMembers)
	}},
	{ofAscend, at(27, 0), engine.Release{}, "vllm_ascend/ascend_config.py: EplbConfig; vllm_ascend/platform.py: _validate_eplb_config of v0.30.0rc2", func(a *arguments) error {
		err := checkEPLB(a, "ValidationError: unexpected member %s", append([]string{"load_collection_phase", "stair_config"}, ascendMembers...))
		config, _ := a.object("--additional-config")
		if eplb, _ := config["eplb_config"].(map[string]any); err == nil && usesV2Runner() && eplb["expert_map_path"] != nil {
			err = errors.New("ValueError: the V2 model runner reads no expert_map_path")
		}
		return err
	}},
	{ofAscend, at(30, 0), engine.Release{}, "vllm_ascend/platform.py: _validate_routing_replay_config of v0.30.0rc2", func(a *arguments) error {
		if a.given("--enable-return-routed-experts") && !usesV2Runner() {
			return errors.New("ValueError: --enable-return-routed-experts needs the V2 model runner")
		}
		return nil
	}},
	{ofTRTLLM, engine.Release{}, engine.Release{Major: 1, Minor: 2}, "tensorrt_llm/llmapi/llm_args.py: MoeConfig", func(a *arguments) error {
		return checkOptionsFile(a, "AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON")
	}},
	{ofTRTLLM, engine.Release{Major: 1, Minor: 3}, engine.Release{}, "tensorrt_llm/llmapi/llm_args.py: MoeConfig; NVIDIA/TensorRT-LLM#17797", func(a *arguments) error {
		return checkOptionsFile(a, "AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN", "MEGAMOE_DEEPGEMM")
	}},
}

// usesV2Runner reports whether vllm-ascend uses the V2 model runner, which only the variable decides
// (vllm_ascend/patch/platform/patch_use_v2_model_runner.py).
func usesV2Runner() bool { return os.Getenv("VLLM_USE_V2_MODEL_RUNNER") == "1" }

// checkEPLB checks the members of eplb_config. unknown is the error for a member that is not in the list.
func checkEPLB(a *arguments, unknown string, members []string) error {
	config, err := a.object("--additional-config")
	if err != nil {
		return err
	}
	eplb, _ := config["eplb_config"].(map[string]any)
	for member := range eplb {
		if !slices.Contains(members, member) {
			return fmt.Errorf(unknown, member)
		}
	}
	path, mapped := eplb["expert_map_path"].(string)
	switch {
	case mapped && !strings.HasSuffix(path, ".json"):
		return errors.New("TypeError: the expert map is no .json file")
	case eplb["dynamic_eplb"] == true && os.Getenv("DYNAMIC_EPLB") != "true" && os.Getenv("EXPERT_MAP_RECORD") != "true":
		return errors.New("AssertionError: dynamic_eplb needs DYNAMIC_EPLB or EXPERT_MAP_RECORD")
	}
	return nil
}

// ascendMembers lists the members of eplb_config of v0.20.2rc1 to v0.25.1rc1, which later releases have too.
var ascendMembers = []string{
	"dynamic_eplb", "expert_map_path", "expert_heat_collection_interval", "algorithm_execution_interval", "expert_map_record_path", "num_redundant_experts",
	"eplb_policy_type", "eplb_heat_collection_stage",
}

// checkRules returns the error with which a release rejects parsed arguments; nil if it accepts them.
func checkRules(name string, release engine.Release, a *arguments) error {
	for _, r := range rules {
		if !slices.Contains(r.engines, name) || release.Before(r.first) || r.last.Known() && r.last.Before(release) {
			continue
		}
		if err := r.check(a); err != nil {
			return err
		}
	}
	return nil
}

// refuseCapture rejects routed experts with pipeline parallelism and with some KV connectors.
func refuseCapture(a *arguments, refused func(connector string) bool) error {
	if !a.given("--enable-return-routed-experts") {
		return nil
	}
	if a.number("--pipeline-parallel-size", 1) > 1 {
		return errors.New("ValueError: --enable-return-routed-experts excludes pipeline parallelism")
	}
	config, err := a.object("--kv-transfer-config")
	if err != nil {
		return err
	}
	for _, name := range connectors(config) {
		if refused(name) {
			return fmt.Errorf("ValueError: --enable-return-routed-experts excludes %s", name)
		}
	}
	return nil
}

// connectors returns the names of the KV connectors of a configuration, including those in a MultiConnector.
func connectors(config map[string]any) []string {
	var names []string
	if name, ok := config["kv_connector"].(string); ok {
		names = append(names, name)
	}
	extra, _ := config["kv_connector_extra_config"].(map[string]any)
	children, _ := extra["connectors"].([]any)
	for _, child := range children {
		if child, ok := child.(map[string]any); ok {
			names = append(names, connectors(child)...)
		}
	}
	return names
}

// refuseOverlap rejects micro-batches with all-to-all backends other than the given ones.
func refuseOverlap(a *arguments, backends ...string) error {
	if !a.given("--enable-dbo") && a.number("--ubatch-size", 0) <= 1 {
		return nil
	}
	if backend := a.text("--all2all-backend", "allgather_reducescatter"); !slices.Contains(backends, backend) {
		return fmt.Errorf("AssertionError: micro-batches are not supported with %s, but with %s", backend, strings.Join(backends, ", "))
	}
	return nil
}

// maxOptionsBytes is the maximum size of an options file.
const maxOptionsBytes = 1 << 20

// trtllmOptions holds the members of an options file that the double reads.
type trtllmOptions struct {
	AttentionDP bool `json:"enable_attention_dp"`
	MoE         struct {
		Backend             string `json:"backend"`
		MaxTokens           int    `json:"max_num_tokens"`
		LoadBalancer        any    `json:"load_balancer"`
		NoFinalizeFusion    bool   `json:"disable_finalize_fusion"`
		LowPrecisionCombine bool   `json:"use_low_precision_moe_combine"`
	} `json:"moe_config"`
	Speculative struct {
		Type string `json:"decoding_type"`
	} `json:"speculative_config"`
}

func readOptionsFile(a *arguments) (o trtllmOptions, err error) {
	path := a.text("--extra_llm_api_options", "")
	if path == "" {
		return o, nil
	}
	text, err := regularfile.Read(path, maxOptionsBytes)
	if err != nil {
		return o, err
	}
	var members struct {
		MoE map[string]any `json:"moe_config"`
	}
	if err := yaml.Unmarshal(text, &members); err != nil {
		return o, err
	}
	moe, err := yaml.Marshal(members.MoE)
	if err == nil {
		err = yaml.Unmarshal(text, &o)
	}
	if err == nil {
		err = yaml.UnmarshalStrict(moe, &o.MoE) // the engine rejects unknown members
	}
	return o, err
}

// checkOptionsFile rejects an options file with a backend that the release does not have. It also rejects an expert map
// together with draft layers, for which the map has no assignments (get_layer_initial_global_assignments).
func checkOptionsFile(a *arguments, backends ...string) error {
	o, err := readOptionsFile(a)
	switch {
	case err != nil:
		return fmt.Errorf("ValidationError: %w", err)
	case o.MoE.Backend != "" && !slices.Contains(backends, o.MoE.Backend):
		return fmt.Errorf("ValidationError: moe_config.backend: Input should be %s", strings.Join(backends, ", "))
	case o.MoE.LoadBalancer != nil && strings.HasPrefix(o.Speculative.Type, "MTP"):
		return errors.New("KeyError: layer_idx not found in initial_global_assignments")
	}
	return nil
}
