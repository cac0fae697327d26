// Package trtllm knows TensorRT-LLM's command line (trtllm-serve) and its options file.
package trtllm

import (
	"fmt"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/internal/engine"
)

// Adapter returns TensorRT-LLM's adapter. It takes an expert map, but neither pins requests to ranks nor tells the experts
// of a request.
func Adapter() engine.Adapter {
	return engine.Adapter{
		Type:       "TensorRTLLM",
		Command:    []string{"trtllm-serve"},
		HealthPath: "/health",
		ExpertMap:  &engine.ExpertMap{File: "trtllm.yaml", Write: writeMap, Read: readMap},
		Flags:      flags,
		Options:    options,
		Check:      check,
	}
}

// flags: attention data parallelism and the expert map can only be said in the options file, so that the file is the
// operator's. What else it could hold, most of it, has flags of its own.
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
		{Names: []string{"--extra_llm_api_options", "--config"}, Value: launch.OptionsFile, Source: "spec.parallelism.attention (the operator writes the options file)"},
		{Names: []string{"--enable_attention_dp"}, Source: "spec.parallelism.attention", Forbidden: true},
	}
}

// options is the file of --extra_llm_api_options. The engine ignores the load balancer, without a word, unless attention is
// data parallel and the expert-parallel size above 1 (NVIDIA/TensorRT-LLM#18626): check refuses such plans.
func options(launch engine.Launch) []byte {
	text := fmt.Sprintf("enable_attention_dp: %t\n", launch.AttentionDP)
	if launch.ExpertMap != "" {
		text += fmt.Sprintf("moe_config:\n  backend: WideEP\n  load_balancer: %s\n", launch.ExpertMap)
	}
	return []byte(text)
}

func check(s engine.Situation, verdict *engine.Support) {
	if s.Realization == engine.EngineMap {
		verdict.Warn("CannotPin", "Requests cannot be sent to a rank of TensorRT-LLM, nor does it tell the experts of a request: a plan only puts experts together that fire together, and the local activation rate stays unknown")
	}
}

// loadBalancer is the file of moe_config.load_balancer.
type loadBalancer struct {
	Slots int `json:"num_slots"`
	// UpdatesPerIter is 0 for a placement that stays: above it, the engine moves experts by itself.
	UpdatesPerIter *int `json:"layer_updates_per_iter"`
	// Assignments are the experts in slot order, by the model's layer index.
	Assignments map[int][]int `json:"initial_global_assignments"`
}

// writeMap keeps the layers in order, as a person reads them.
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
