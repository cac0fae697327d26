// SPDX-License-Identifier: Apache-2.0

// Package vllmascend describes vLLM with the vllm-ascend plugin: vLLM's interface, and an expert map.
package vllmascend

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/vllm"
	"github.com/semmoe/operator/solver/placement"
)

// Adapter returns the plugin's adapter.
func Adapter() engine.Adapter {
	a := vllm.Adapter()
	a.Type = "VLLMAscend"
	a.ExpertMap = &engine.ExpertMap{File: "vllm-ascend.json", Write: writeMap, Read: readMap}
	a.CopyRule = placement.RankModuloCopy
	a.Flags, a.Variables = flags, variables
	a.CountsActivations = false // the counting plug-in supports only vLLM's own MoE layers
	a.Check = check             // vLLM's all-to-all backends are for other devices
	ofVLLM := a.CheckStart
	a.CheckStart = func(s engine.Situation, verdict *engine.Support) {
		ofVLLM(s, verdict)
		checkCapture(s, verdict)
	}
	a.CheckOverlap = nil // vLLM's backends with overlap are for other devices
	a.OverlapThresholds = nil
	a.Images, a.Oldest, a.Newest = []string{"vllm-ascend"}, oldest, newest
	a.Mechanisms = slices.Concat(slices.DeleteFunc(a.Mechanisms, func(m engine.Mechanism) bool {
		// The flags of later releases of vLLM are set and refused as vLLM's adapter does.
		return newest.Before(m.First) && m.Kind != engine.FlagKind || m.Kind == engine.DraftKind
	}), mechanisms())
	a.Routes = slices.DeleteFunc(a.Routes, func(r engine.Route) bool { return newest.Before(r.First) })
	for i, r := range a.Routes {
		if newest.Before(r.Last) {
			a.Routes[i].Last = engine.Release{}
		}
	}
	a.RankRoutes = engine.NewRankRoutes(a.Routes, "", "")
	return a
}

// The releases of the plugin have the numbers of the vLLM releases that they support.
var (
	oldest = engine.Release{Minor: 13}
	newest = engine.Release{Minor: 30}
	// v2Capture is the first release that captures routed experts in the V2 model runner only
	// (vllm_ascend/platform.py: _validate_routing_replay_config).
	v2Capture = engine.Release{Minor: 30}
)

// mechanisms lists the parts of the plugin's interface that this package names, in addition to those of vLLM. The tags
// v0.13.0 to v0.30.0rc2 were read.
func mechanisms() []engine.Mechanism {
	open := engine.Release{}
	return slices.Concat(
		engine.NewMechanisms(engine.DraftKind, oldest, open, "vllm_ascend/eplb/core/eplb_utils.py: the first draft layer has the default order; it ends at start with a second one", engine.Read, "mtp"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "--additional-config: vllm_ascend/ascend_config.py", engine.Read, "eplb_config", "dynamic_eplb", "num_redundant_experts"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "--additional-config: vllm_ascend/ascend_config.py; V1 model runner only", engine.Read, "expert_map_path"),
		engine.NewMechanisms(engine.MemberKind, oldest, open, "the map: vllm_ascend/eplb/core/eplb_utils.py", engine.Read, "moe_layer_count", "layer_list", "layer_id", "device_count", "device_list", "device_id", "device_expert"),
		engine.NewMechanisms(engine.VariableKind, oldest, open, "vllm_ascend/envs.py", engine.Read, "DYNAMIC_EPLB", "EXPERT_MAP_RECORD"),
	)
}

// check adds the limitations of the plugin's map. A file that lists n MoE layers applies to layers 0 to n-1. Layer n, a
// draft model's layer, gets the default order of experts. With further layers, the engine exits at startup
// (vllm_ascend/eplb/core/eplb_utils.py).
func check(s engine.Situation, verdict *engine.Support) {
	if s.Realization != engine.EngineMap {
		return
	}
	if runner, known := s.Value(vllm.RunnerVariable); s.Sets(vllm.RunnerVariable) && !(known && runner == "0") {
		verdict.Warn("MapNeedsV1Runner", "%s is set in the engine's environment: with the V2 model runner, vllm-ascend up to 0.26 reads no expert map, and later releases exit at startup. Set it to 0, or use %s", vllm.RunnerVariable, engine.ReshuffledWeights)
	}
	if flag := vllm.DraftFlag(s.UserArgs); flag != "" {
		verdict.Warn(engine.ReasonDraftModelExperts, "spec.engine.args sets %s: vllm-ascend loads the first MoE layer of a draft model in the default order of experts, and exits at startup with a second one. With more than one, use %s", flag, engine.ReshuffledWeights)
	}
}

// checkCapture refuses routed experts where the plugin exits at startup. Only the V2 model runner captures them, and only
// the V1 model runner reads a map. The variable selects the runner: vLLM's own choice is not used
// (vllm_ascend/patch/platform/patch_use_v2_model_runner.py).
func checkCapture(s engine.Situation, verdict *engine.Support) {
	if !s.Launch.RoutedExperts || !s.Release.AtLeast(v2Capture) {
		return
	}
	const because = "vllm-ascend %s and newer return routed experts, which spec.profiling.dataset and spec.routing.samplePercent need, only with the V2 model runner"
	runner, known := s.Value(vllm.RunnerVariable)
	switch {
	case s.Launch.ExpertMap != "":
		verdict.Refuse(engine.ReasonCapture, because+", which reads no expert map. Use %s, or %s", v2Capture, engine.ReshuffledWeights, vllm.AdviceCapture)
	case !s.Sets(vllm.RunnerVariable), known && runner != "1":
		verdict.Refuse(engine.ReasonCapture, because+": set %s to 1 in spec.engine.env, or %s", v2Capture, vllm.RunnerVariable, vllm.AdviceCapture)
	}
}

// flags returns vLLM's flags and --additional-config. With a map, a user-provided --additional-config is refused.
// Without one, only its members for the plugin's own map and load balancer are refused, which would move experts away
// from their known locations.
func flags(launch engine.Launch) []engine.Flag {
	all := vllm.Flags(launch)
	config := engine.Flag{Names: []string{"--additional-config"}, Source: engine.PlanSource}
	switch {
	case !launch.NeedsKnownPlacement():
		return all
	case launch.ExpertMap != "":
		// The plugin refuses unknown members and accepts only one such flag, so the user's flag cannot be combined with
		// the operator's.
		config.Value = eplbConfig(launch)
	default:
		config.Forbidden, config.Members = true, []string{"eplb_config", "dynamic_eplb", "expert_map_path"} // the last two are the names used in 2025
	}
	return append(all, config)
}

func eplbConfig(launch engine.Launch) string {
	type eplb struct {
		ExpertMapPath    string `json:"expert_map_path"`
		RedundantExperts int32  `json:"num_redundant_experts,omitempty"`
	}
	text, err := json.Marshal(map[string]eplb{"eplb_config": {launch.ExpertMap, launch.RedundantExperts}})
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return string(text)
}

// variables returns the variables that let the plugin record a map or move experts.
func variables(launch engine.Launch) []engine.Variable {
	if !launch.NeedsKnownPlacement() {
		return nil
	}
	return []engine.Variable{{Name: "DYNAMIC_EPLB", Source: engine.PlanSource}, {Name: "EXPERT_MAP_RECORD", Source: engine.PlanSource}}
}

// expertMap numbers MoE layers from 0. All devices have the same number of experts.
type expertMap struct {
	MoELayerCount int        `json:"moe_layer_count"`
	LayerList     []mapLayer `json:"layer_list"`
}

type mapLayer struct {
	LayerID     int         `json:"layer_id"`
	DeviceCount int         `json:"device_count"`
	DeviceList  []mapDevice `json:"device_list"`
}

type mapDevice struct {
	DeviceID int `json:"device_id"`
	// DeviceExpert lists the logical ids in slot order.
	DeviceExpert []int `json:"device_expert"`
}

func writeMap(l engine.Layout) ([]byte, error) {
	p := l.Placement
	m := expertMap{MoELayerCount: len(p.Layers)}
	for i, layer := range p.Layers {
		entry := mapLayer{LayerID: i, DeviceCount: p.Ranks}
		for rank := range p.Ranks {
			entry.DeviceList = append(entry.DeviceList, mapDevice{rank, layer.Slots[rank*p.SlotsPerRank : (rank+1)*p.SlotsPerRank]})
		}
		m.LayerList = append(m.LayerList, entry)
	}
	return engine.EncodeJSON(m)
}

func readMap(text []byte, shape engine.Shape) ([][]int, error) {
	var m expertMap
	if err := engine.DecodeJSON(text, &m); err != nil {
		return nil, err
	}
	if m.MoELayerCount != len(m.LayerList) {
		return nil, fmt.Errorf("moe_layer_count is %d; layer_list has %d layers", m.MoELayerCount, len(m.LayerList))
	}
	var rows [][]int
	for i, layer := range m.LayerList {
		if layer.LayerID != i || layer.DeviceCount != shape.Ranks || len(layer.DeviceList) != shape.Ranks {
			return nil, fmt.Errorf("entry %d of layer_list is layer %d of %d devices, device_count %d; want layer %d of %d", i, layer.LayerID, len(layer.DeviceList), layer.DeviceCount, i, shape.Ranks)
		}
		var row []int
		for d, device := range layer.DeviceList {
			if device.DeviceID != d || len(device.DeviceExpert) != len(layer.DeviceList[0].DeviceExpert) {
				return nil, fmt.Errorf("layer %d: entry %d of device_list is device %d with %d experts; want device %d with as many as the first", i, d, device.DeviceID, len(device.DeviceExpert), d)
			}
			row = slices.Concat(row, device.DeviceExpert)
		}
		rows = append(rows, row)
	}
	return rows, nil
}
