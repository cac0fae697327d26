package plan

import (
	"fmt"
	"strings"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

func addEngineFiles(files map[string][]byte, p *solver.Plan) (err error) {
	if files[SGLangFile], err = encodeJSON(sglangMap(p)); err != nil {
		return err
	}
	if files[VLLMAscendFile], err = encodeJSON(vllmAscendMap(p.Placement)); err != nil {
		return err
	}
	files[TensorRTLLMFile] = tensorRTLLMMap(p.Placement)
	if !p.Placement.Redundant() {
		files[GatePermutationFile], err = encodeJSON(gatePermutation(p.Placement))
	}
	return err
}

// GatePermutation is the content of gate-permutation.json: new expert j of a layer is old expert NewToOld[j].
type GatePermutation struct {
	Layers []LayerPermutation `json:"layers"`
}

// LayerPermutation is the permutation of one MoE layer.
type LayerPermutation struct {
	Layer    int   `json:"layer"`
	NewToOld []int `json:"new_to_old"`
}

func gatePermutation(p *placement.Placement) GatePermutation {
	var g GatePermutation
	for _, layer := range p.Layers {
		g.Layers = append(g.Layers, LayerPermutation{layer.Layer, layer.Slots})
	}
	return g
}

// sglang holds one row for each hidden layer. The engine passes the keys on as arguments: it refuses any other key.
type sglang struct {
	PhysicalToLogicalMap [][]int `json:"physical_to_logical_map"`
}

func sglangMap(p *solver.Plan) sglang {
	slots := p.Placement.Ranks * p.Placement.SlotsPerRank
	m := sglang{make([][]int, p.HiddenLayers)}
	for _, layer := range p.Placement.Layers {
		m.PhysicalToLogicalMap[layer.Layer] = layer.Slots
	}
	for i, row := range m.PhysicalToLogicalMap {
		if row != nil {
			continue
		}
		// A dense layer: the row means nothing, but must be there.
		for slot := range slots {
			m.PhysicalToLogicalMap[i] = append(m.PhysicalToLogicalMap[i], slot%p.Placement.Experts)
		}
	}
	return m
}

// vllmAscend counts MoE layers from 0.
type vllmAscend struct {
	MoELayerCount int               `json:"moe_layer_count"`
	LayerList     []vllmAscendLayer `json:"layer_list"`
}

type vllmAscendLayer struct {
	LayerID     int                `json:"layer_id"`
	DeviceCount int                `json:"device_count"`
	DeviceList  []vllmAscendDevice `json:"device_list"`
}

type vllmAscendDevice struct {
	DeviceID     int   `json:"device_id"`
	DeviceExpert []int `json:"device_expert"`
}

func vllmAscendMap(p *placement.Placement) vllmAscend {
	m := vllmAscend{MoELayerCount: len(p.Layers)}
	for i, layer := range p.Layers {
		entry := vllmAscendLayer{LayerID: i, DeviceCount: p.Ranks}
		for rank := range p.Ranks {
			entry.DeviceList = append(entry.DeviceList, vllmAscendDevice{rank, layer.Slots[rank*p.SlotsPerRank : (rank+1)*p.SlotsPerRank]})
		}
		m.LayerList = append(m.LayerList, entry)
	}
	return m
}

// tensorRTLLMMap is YAML with the model's layer indices as keys. An update interval of 0 keeps the engine from moving
// experts by itself.
func tensorRTLLMMap(p *placement.Placement) []byte {
	var text strings.Builder
	fmt.Fprintf(&text, "num_slots: %d\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n", p.Ranks*p.SlotsPerRank)
	for _, layer := range p.Layers {
		fmt.Fprintf(&text, "  %d: [%s]\n", layer.Layer, strings.Trim(strings.Join(strings.Fields(fmt.Sprint(layer.Slots)), ", "), "[]"))
	}
	return []byte(text.String())
}
