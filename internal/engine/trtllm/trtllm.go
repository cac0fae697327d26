// SPDX-License-Identifier: Apache-2.0

// Package trtllm describes TensorRT-LLM's command line (trtllm-serve) and its options file.
package trtllm

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/model/family"
)

// Adapter returns TensorRT-LLM's adapter. The engine accepts an expert map, but can neither pin requests to ranks nor
// return routed experts.
func Adapter() engine.Adapter {
	return engine.Adapter{
		Type:         "TensorRTLLM",
		Command:      []string{"trtllm-serve"},
		HealthPath:   "/health",
		ExpertMap:    &engine.ExpertMap{File: "trtllm.yaml", Write: writeMap, Read: readMap},
		Flags:        flags,
		Options:      options,
		CheckOptions: checkOptions,
		Check:        check, CheckStart: checkStart,

		Images: []string{"tensorrt-llm/release", "tensorrt-llm"}, ReleasePath: "/version",
		Oldest: engine.Release{Major: 1}, Newest: newest, Mechanisms: mechanisms(), Routes: routes(), Administrative: administrative,
		RankRoutes: engine.NewRankRoutes(routes(), "", ""),
	}
}

// newest is the newest checked release.
var newest = engine.Release{Major: 1, Minor: 3}

// flags returns the flags of trtllm-serve. Attention data parallelism and the expert map can only be set in the options
// file, so the operator writes this file. The other content of the file comes from spec.engine.options.
func flags(launch engine.Launch) []engine.Flag {
	ranks := strconv.Itoa(int(launch.Ranks))
	const size = "spec.parallelism.expertParallelSize"
	return []engine.Flag{
		{Value: launch.ModelPath},
		{Names: []string{"--served_model_name"}, Value: launch.ServedModelName, Source: "spec.model.name"},
		{Names: []string{"--host"}, Value: launch.Host, Source: "the operator (the pod's address)"},
		{Names: []string{"--port"}, Value: strconv.Itoa(int(launch.Port)), Source: "spec.engine.port"},
		{Names: []string{"--tp_size", "--tensor_parallel_size"}, Value: ranks, Source: size},
		{Names: []string{"--ep_size", "--moe_expert_parallel_size"}, Value: ranks, Source: size},
		{Names: []string{"--cluster_size", "--moe_cluster_parallel_size"}, Source: size, Forbidden: true},
		{Names: []string{"--pp_size", "--pipeline_parallel_size"}, Source: size, Forbidden: true},
		{Names: []string{"--cp_size", "--context_parallel_size"}, Source: size, Forbidden: true},
		{
			Names: []string{"--extra_llm_api_options", "--config"}, Value: launch.OptionsFile, Source: engine.OptionsField,
			Why: "names an options file, which the operator writes: move its content to " + engine.OptionsField,
		},
		{Names: []string{"--enable_attention_dp"}, Source: "spec.parallelism.attention", Forbidden: true},
	}
}

// options returns the file of --extra_llm_api_options: the user's options, overridden by the operator's. Without
// moe_config.backend, the engine selects the backend itself; WIDEEP, which earlier versions of the operator set, was
// removed (NVIDIA/TensorRT-LLM#17797). The engine silently ignores the load balancer unless attention is data parallel,
// the expert-parallel size is above 1, and the architecture is on a list (NVIDIA/TensorRT-LLM#18626). check refuses
// such plans.
func options(launch engine.Launch) ([]byte, error) {
	all, err := parseOptions(launch.Options)
	if err != nil {
		return nil, err
	}
	all["enable_attention_dp"] = launch.AttentionDP
	if launch.ExpertMap != "" {
		moe, err := moeOptions(all)
		if err != nil {
			return nil, err
		}
		moe["load_balancer"] = launch.ExpertMap
		all["moe_config"] = moe
	}
	return yaml.Marshal(all)
}

// controlledMembers maps the members of the options file that other fields control to these fields.
var controlledMembers = map[string]string{
	"model": "spec.model.path", "enable_attention_dp": "spec.parallelism.attention",
	"tensor_parallel_size": "spec.parallelism.expertParallelSize", "moe_expert_parallel_size": "spec.parallelism.expertParallelSize",
	"moe_cluster_parallel_size": "spec.parallelism.expertParallelSize", "moe_tensor_parallel_size": "spec.parallelism.expertParallelSize",
	"pipeline_parallel_size": "spec.parallelism.expertParallelSize", "context_parallel_size": "spec.parallelism.expertParallelSize",
}

// checkOptions returns an error for user-provided options that cannot be parsed, or that other fields control.
func checkOptions(launch engine.Launch) error {
	all, err := parseOptions(launch.Options)
	if err != nil {
		return err
	}
	for _, member := range slices.Sorted(maps.Keys(all)) {
		if source := controlledMembers[member]; source != "" {
			return fmt.Errorf("%s: %s contradicts %s, which decides it: remove the member", engine.OptionsField, member, source)
		}
	}
	moe, err := moeOptions(all)
	if err != nil {
		return err
	}
	if _, has := moe["load_balancer"]; has && launch.NeedsKnownPlacement() {
		return fmt.Errorf("%s: moe_config.load_balancer contradicts %s, which decides it: remove the member", engine.OptionsField, engine.PlanSource)
	}
	return nil
}

// parseOptions parses the user's options, which may be empty.
func parseOptions(text string) (map[string]any, error) {
	all := map[string]any{}
	if err := yaml.UnmarshalStrict([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("%s is invalid: it is not a YAML object (%w)", engine.OptionsField, err)
	}
	if all == nil {
		all = map[string]any{}
	}
	return all, nil
}

// moeOptions returns the member moe_config, or a new object if it is missing.
func moeOptions(all map[string]any) (map[string]any, error) {
	switch moe := all["moe_config"].(type) {
	case nil:
		return map[string]any{}, nil
	case map[string]any:
		return moe, nil
	}
	return nil, fmt.Errorf("%s: moe_config is invalid: it must be an object", engine.OptionsField)
}

// mapTypes maps the model types for which the engine has a load balancer to the oldest release that was read and does.
// The engine compares the architecture of the outermost model, a wrapper if there is one, with a list
// (moe_model_arch_list). For any other model, it exits at startup or ignores the map (NVIDIA/TensorRT-LLM#13386).
// Checkpoints of kimi_k2 have the architecture of deepseek_v3.
func mapTypes() map[string]engine.Release {
	types := map[string]engine.Release{}
	for _, modelType := range family.Types() {
		if first := engine.ParseRelease(family.Lookup(modelType).TensorRTLLMMap); first.Known() {
			types[modelType] = first
		}
	}
	for wrapper, first := range family.TensorRTLLMWrappers {
		types[wrapper] = engine.ParseRelease(first)
	}
	return types
}

// checkStart refuses a release that exits at startup with the flags above.
func checkStart(s engine.Situation, verdict *engine.Support) {
	verdict.NeedsRelease(s, "TensorRTLLM", "spec.model.name", newest, "--served_model_name", "serve with another engine")
}

// backendsWithoutMap lists the backends without load balancer, and WIDEEP, which the first supported release no longer
// has (NVIDIA/TensorRT-LLM#17797).
var backendsWithoutMap = []string{"MARLIN", "TRITON", "VANILLA", "WIDEEP"}

func check(s engine.Situation, verdict *engine.Support) {
	if s.Realization != engine.EngineMap {
		return
	}
	types, outermost := mapTypes(), cmp.Or(s.Wrapper, s.Family)
	switch first, listed := types[outermost]; {
	case outermost == "":
	case !listed:
		verdict.Refuse("ExpertMapIgnored", "TensorRT-LLM has no load balancer for models of type %q, and exits at startup with an expert map, or ignores it: supported are %s", outermost, strings.Join(slices.Sorted(maps.Keys(types)), ", "))
	case s.Release.Before(first):
		verdict.Refuse("ExpertMapIgnored", "The source of TensorRT-LLM %s was not checked for expert maps of models of type %q: use %s or newer", s.Release, outermost, first)
	}
	if all, err := parseOptions(s.Launch.Options); err == nil {
		checkBackend(all, s.Family, verdict)
		checkDraft(all, s.Family, verdict)
	}
	verdict.Warn("RankPinningUnsupported", "TensorRT-LLM can neither pin requests to a rank nor return routed experts: the plan only co-locates experts that are activated together, and the local activation rate is unknown")
}

// checkBackend refuses options with which the engine ignores a map or exits at startup. On Hopper GPUs, the engine itself
// selects TRITON for gpt_oss (resolve_moe_backend in tensorrt_llm/_torch/model_config.py).
func checkBackend(all map[string]any, modelType string, verdict *engine.Support) {
	moe, err := moeOptions(all)
	if err != nil {
		return // checkOptions refuses them
	}
	switch backend, _ := moe["backend"].(string); {
	case slices.Contains(backendsWithoutMap, backend):
		verdict.Refuse(engine.ReasonExpertMapWithoutEffect, "%s sets moe_config.backend %s: TensorRT-LLM does not support a load balancer with it, or no longer has this backend. Remove the member", engine.OptionsField, backend)
	case modelType == "gpt_oss" && (backend == "" || backend == "AUTO"):
		verdict.Warn(engine.ReasonExpertMapWithoutEffect, "%s does not select moe_config.backend: on Hopper GPUs, TensorRT-LLM runs gpt_oss models with the backend TRITON, which has no load balancer. Set the member, for example to CUTLASS", engine.OptionsField)
	}
}

// checkDraft refuses speculative decoding by draft layers with experts: layers of multi-token prediction, and the draft
// inside of a checkpoint of DeepSeek-V4 (tensorrt_llm/_torch/models/modeling_dspark.py).
func checkDraft(all map[string]any, modelType string, verdict *engine.Support) {
	speculative, _ := all["speculative_config"].(map[string]any)
	kind, _ := speculative["decoding_type"].(string)
	if strings.HasPrefix(strings.ToUpper(kind), "MTP") || kind == "DSpark" && modelType == "deepseek_v4" {
		verdict.Refuse(engine.ReasonDraftModelExperts, "%s sets speculative_config.decoding_type %s: TensorRT-LLM exits at startup with a KeyError, because the map does not contain the MoE layers of the draft. Remove the member, or serve without a plan", engine.OptionsField, kind)
	}
}

// mechanisms lists the parts of TensorRT-LLM's interface that this package names. Stored versions of its files of
// releases 1.0 to 1.3 were read.
func mechanisms() []engine.Mechanism {
	one, open := engine.Release{Major: 1}, engine.Release{}
	const serve, args, balancer = "tensorrt_llm/commands/serve.py", "tensorrt_llm/llmapi/llm_args.py", "tensorrt_llm/_torch/modules/fused_moe/moe_load_balancer.py"
	mapTypesOf := func(release engine.Release) []string {
		types := mapTypes()
		maps.DeleteFunc(types, func(_ string, first engine.Release) bool { return first != release })
		return slices.Sorted(maps.Keys(types))
	}
	return slices.Concat(
		engine.NewMechanisms(engine.FlagKind, one, open, serve, engine.Read,
			"--host", "--port", "--tp_size --tensor_parallel_size", "--ep_size --moe_expert_parallel_size", "--cluster_size --moe_cluster_parallel_size",
			"--pp_size --pipeline_parallel_size", "--cp_size --context_parallel_size", "--extra_llm_api_options --config"),
		engine.NewMechanisms(engine.FlagKind, newest, open, "tensorrt_llm/commands/serve.py; NVIDIA/TensorRT-LLM#11711", engine.Read, "--served_model_name"),
		engine.NewMechanisms(engine.FlagKind, newest, open, serve, engine.Read, "--enable_attention_dp"),
		engine.NewMechanisms(engine.RouteKind, one, open, "tensorrt_llm/serve/openai_server.py", engine.Read, "/health", "/version"),
		engine.RouteMechanisms(routes()),
		engine.NewMechanisms(engine.MemberKind, one, open, args, engine.Read, slices.Sorted(maps.Keys(controlledMembers))...),
		engine.NewMechanisms(engine.MemberKind, one, open, args, engine.Read, "moe_config", "load_balancer", "speculative_config", "decoding_type", "num_slots", "layer_updates_per_iter", "initial_global_assignments"),
		engine.NewMechanisms(engine.ValueKind, one, engine.Release{Major: 1, Minor: 2}, "moe_config.backend; removed by NVIDIA/TensorRT-LLM#17797", engine.Read, "WIDEEP"),
		engine.NewMechanisms(engine.DraftKind, one, open, balancer+": it ends at start for a draft layer, which the map does not list", engine.Read, "MTP"),
		engine.NewMechanisms(engine.ValueKind, one, open, "moe_config.backend without load balancer: NVIDIA/TensorRT-LLM#18626", engine.Read, backendsWithoutMap[:3]...),
		engine.NewMechanisms(engine.ValueKind, newest, open, "moe_config.backend, selected for gpt_oss on Hopper GPUs: tensorrt_llm/_torch/model_config.py", engine.Read, "AUTO"),
		engine.NewMechanisms(engine.DraftKind, newest, open, "tensorrt_llm/_torch/models/modeling_dspark.py: as MTP, for the draft inside of a checkpoint of DeepSeek-V4", engine.Read, "DSpark"),
		engine.NewMechanisms(engine.ValueKind, one, open, "model types: moe_model_arch_list in "+balancer, engine.Read, mapTypesOf(one)...),
		engine.NewMechanisms(engine.ValueKind, newest, open, "model types: moe_model_arch_list in "+balancer+", moved by NVIDIA/TensorRT-LLM#17952 after 1.3.0rc24", engine.Read, mapTypesOf(newest)...),
	)
}

// loadBalancer is the file of moe_config.load_balancer.
type loadBalancer struct {
	Slots int `json:"num_slots"`
	// UpdatesPerIter must be 0 for a fixed placement. With a larger value, the engine moves experts by itself.
	UpdatesPerIter *int `json:"layer_updates_per_iter"`
	// Assignments maps the model's layer indices to the experts in slot order.
	Assignments map[int][]int `json:"initial_global_assignments"`
}

// writeMap writes the layers in ascending order, for human readers.
func writeMap(l engine.Layout) ([]byte, error) {
	var text strings.Builder
	fmt.Fprintf(&text, "num_slots: %d\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n", l.Placement.Ranks*l.Placement.SlotsPerRank)
	for _, layer := range l.Placement.Layers {
		fmt.Fprintf(&text, "  %d: [%s]\n", layer.Layer, strings.Trim(strings.Join(strings.Fields(fmt.Sprint(layer.Slots)), ", "), "[]"))
	}
	return []byte(text.String()), nil
}

func readMap(text []byte, shape engine.Shape) ([][]int, error) {
	var m loadBalancer
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		return nil, err
	}
	if m.UpdatesPerIter == nil || *m.UpdatesPerIter != 0 {
		return nil, fmt.Errorf("layer_updates_per_iter must be 0: the engine would move experts by itself")
	}
	if len(m.Assignments) != len(shape.MoELayers) {
		return nil, fmt.Errorf("initial_global_assignments has %d layers; the model has %d MoE layers", len(m.Assignments), len(shape.MoELayers))
	}
	var rows [][]int
	for _, layer := range shape.MoELayers {
		if len(m.Assignments[layer]) != m.Slots {
			return nil, fmt.Errorf("layer %d of initial_global_assignments has %d slots; num_slots is %d", layer, len(m.Assignments[layer]), m.Slots)
		}
		rows = append(rows, m.Assignments[layer])
	}
	return rows, nil
}
