// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/solver/placement"
)

// small returns the layout of the files in testdata: a dense layer, then two MoE layers of four experts on two ranks.
func small() engine.Layout {
	return engine.Layout{HiddenLayers: 3, Placement: &placement.Placement{Ranks: 2, Experts: 4, SlotsPerRank: 2, Layers: []placement.Layer{
		{Layer: 1, Slots: []int{2, 0, 3, 1}}, {Layer: 2, Slots: []int{0, 3, 1, 2}},
	}}}
}

// redundant returns small with two more slots.
func redundant() engine.Layout {
	return engine.Layout{HiddenLayers: 3, Placement: &placement.Placement{Ranks: 2, Experts: 4, SlotsPerRank: 3, Layers: []placement.Layer{
		{Layer: 1, Slots: []int{2, 0, 3, 1, 2, 3}}, {Layer: 2, Slots: []int{0, 3, 1, 2, 0, 1}},
	}}}
}

// maps returns the formats by engine type.
func maps() map[string]*engine.ExpertMap {
	formats := map[string]*engine.ExpertMap{}
	for _, adapter := range registry.All() {
		if adapter.ExpertMap != nil {
			formats[adapter.Type] = adapter.ExpertMap
		}
	}
	return formats
}

// TestExpertMapsAreGolden compares encoded maps with files written by hand from the engines' documentation.
func TestExpertMapsAreGolden(t *testing.T) {
	formats := maps()
	if len(formats) != 3 {
		t.Fatalf("%d engines have a map format", len(formats))
	}
	for name, format := range formats {
		extension := path.Ext(format.File)
		for file, layout := range map[string]engine.Layout{
			format.File: small(), strings.TrimSuffix(format.File, extension) + "-redundant" + extension: redundant(),
		} {
			want, err := os.ReadFile(filepath.Join("testdata", file))
			if err != nil {
				t.Fatal(err)
			}
			got, err := format.Encode(layout)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", name, file, diff)
			}
			read, err := format.Decode(want, layout.Shape())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(layout.Placement, read); diff != "" {
				t.Errorf("%s, %s is decoded differently (-want +got):\n%s", name, file, diff)
			}
		}
	}
}

// randomLayout returns a layout with redundant experts in half of all cases, and dense layers at random positions.
func randomLayout(random *rand.Rand) engine.Layout {
	ranks := 1 + random.IntN(4)
	perRank := 1 + random.IntN(4)
	p := &placement.Placement{Ranks: ranks, Experts: ranks * perRank, SlotsPerRank: perRank}
	if ranks > 1 && random.IntN(2) == 0 {
		p.SlotsPerRank++
	}
	l := engine.Layout{Placement: p, HiddenLayers: 1 + random.IntN(6)}
	moe := random.IntN(l.HiddenLayers) // this layer is an MoE layer
	for layer := range l.HiddenLayers {
		if layer != moe && random.IntN(2) == 0 {
			continue
		}
		order := random.Perm(p.Experts)
		var slots []int
		for rank := range ranks {
			slots = append(slots, order[rank*perRank:(rank+1)*perRank]...)
			if p.SlotsPerRank > perRank { // one expert of another rank
				slots = append(slots, order[((rank+1)%ranks)*perRank])
			}
		}
		p.Layers = append(p.Layers, placement.Layer{Layer: layer, Slots: slots})
	}
	return l
}

func TestExpertMapsRoundTrip(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		layout := randomLayout(random)
		for name, format := range maps() {
			text, err := format.Encode(layout)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			read, err := format.Decode(text, layout.Shape())
			if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, text)
			}
			if diff := cmp.Diff(layout.Placement, read); diff != "" {
				t.Fatalf("%s (-written +read):\n%s", name, diff)
			}
		}
	}
}

// TestInvalidLayoutsAreNotWritten passes layouts to every writer with which engines fail without a clear error, or
// compute wrong outputs.
func TestInvalidLayoutsAreNotWritten(t *testing.T) {
	for name, test := range map[string]struct {
		change func(l *engine.Layout)
		want   string
	}{
		"missing expert":     {func(l *engine.Layout) { l.Placement.Layers[0].Slots[0] = 1 }, "expert 2 has no slot"},
		"two on a rank":      {func(l *engine.Layout) { l.Placement.Layers[0].Slots = []int{2, 2, 0, 1, 3, 2} }, "expert 2 is twice on rank 0"},
		"unknown expert":     {func(l *engine.Layout) { l.Placement.Layers[1].Slots[3] = 4 }, "expert 4"},
		"short row":          {func(l *engine.Layout) { l.Placement.Layers[1].Slots = []int{0, 1, 2, 3, 0} }, "layer 2 has 5 slots"},
		"layer out of model": {func(l *engine.Layout) { l.HiddenLayers = 2 }, "the model has 2 layers"},
	} {
		for _, format := range maps() {
			layout := redundant()
			if name == "missing expert" || name == "unknown expert" {
				layout = small()
			}
			test.change(&layout)
			if _, err := format.Encode(layout); err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), format.File) {
				t.Errorf("%s, %s: error %v", name, format.File, err)
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	shape := small().Shape()
	for name, test := range map[string]struct{ engine, text, want string }{
		"SGLang: another member":         {"SGLang", `{"physical_to_logical_map":[],"logical_count":[]}`, "logical_count"},
		"SGLang: only MoE layers":        {"SGLang", `{"physical_to_logical_map":[[2,0,3,1],[0,3,1,2]]}`, "has 2 rows; the model has 3 layers"},
		"SGLang: dense layer with a map": {"SGLang", `{"physical_to_logical_map":[[1,0,2,3],[2,0,3,1],[0,3,1,2]]}`, "row 0 of physical_to_logical_map places experts of a dense layer"},
		"SGLang: ragged":                 {"SGLang", `{"physical_to_logical_map":[[0,1,2,3],[2,0,3,1,0],[0,3,1,2]]}`, "row 1 of physical_to_logical_map has 5 slots"},
		"SGLang: text after":             {"SGLang", `{"physical_to_logical_map":[]}{}`, "text after"},
		"Ascend: layer by model index": {"VLLMAscend", `{"moe_layer_count":2,"layer_list":[{"layer_id":1,"device_count":2,"device_list":[{"device_id":0,"device_expert":[2,0]},{"device_id":1,"device_expert":[3,1]}]},{"layer_id":2,"device_count":2,"device_list":[]}]}`,
			"entry 0 of layer_list is layer 1"},
		"Ascend: count":          {"VLLMAscend", `{"moe_layer_count":3,"layer_list":[]}`, "moe_layer_count is 3; layer_list has 0"},
		"Ascend: devices":        {"VLLMAscend", `{"moe_layer_count":1,"layer_list":[{"layer_id":0,"device_count":4,"device_list":[]}]}`, "device_count 4; want layer 0 of 2"},
		"Ascend: uneven devices": {"VLLMAscend", `{"moe_layer_count":1,"layer_list":[{"layer_id":0,"device_count":2,"device_list":[{"device_id":0,"device_expert":[2,0,3]},{"device_id":1,"device_expert":[1]}]}]}`, "with 1 experts"},
		"TensorRT: moving":       {"TensorRTLLM", "num_slots: 4\nlayer_updates_per_iter: 1\ninitial_global_assignments: {1: [2, 0, 3, 1], 2: [0, 3, 1, 2]}", "layer_updates_per_iter must be 0"},
		"TensorRT: moving?":      {"TensorRTLLM", "num_slots: 4\ninitial_global_assignments: {1: [2, 0, 3, 1], 2: [0, 3, 1, 2]}", "layer_updates_per_iter must be 0"},
		"TensorRT: MoE index":    {"TensorRTLLM", "num_slots: 4\nlayer_updates_per_iter: 0\ninitial_global_assignments: {0: [2, 0, 3, 1], 1: [0, 3, 1, 2]}", "layer 2 of initial_global_assignments has 0 slots"},
		"TensorRT: layers":       {"TensorRTLLM", "num_slots: 4\nlayer_updates_per_iter: 0\ninitial_global_assignments: {1: [2, 0, 3, 1]}", "has 1 layers; the model has 2"},
		"TensorRT: unknown key":  {"TensorRTLLM", "num_slots: 4\nslots: 4", "slots"},
		"a missing expert":       {"TensorRTLLM", "num_slots: 4\nlayer_updates_per_iter: 0\ninitial_global_assignments: {1: [2, 0, 3, 1], 2: [0, 3, 1, 1]}", "expert 1 is twice on rank 1"},
		"odd slots":              {"TensorRTLLM", "num_slots: 5\nlayer_updates_per_iter: 0\ninitial_global_assignments: {1: [2, 0, 3, 1, 2], 2: [0, 3, 1, 1, 2]}", "5 slots cannot be spread over 2 ranks"},
	} {
		format := maps()[test.engine]
		if _, err := format.Decode([]byte(test.text), shape); err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), format.File) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
	for name, format := range maps() {
		if _, err := format.Decode([]byte("[]"), engine.Shape{}); err == nil {
			t.Errorf("%s: an empty map of an empty model is accepted", name)
		}
	}
}

// FuzzExpertMaps passes any text to every reader. An accepted map can be encoded, and decoding it gives the same map.
func FuzzExpertMaps(f *testing.F) {
	for _, format := range maps() {
		for _, layout := range []engine.Layout{small(), redundant()} {
			text, err := format.Encode(layout)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(text, 2, 4, 3)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, ranks, experts, hidden int) {
		if hidden < 0 || hidden > 64 || experts > 1<<16 || len(text) > 1<<16 {
			return
		}
		shape := engine.Shape{HiddenLayers: hidden, Ranks: ranks, Experts: experts}
		for layer := 1; layer < hidden; layer++ {
			shape.MoELayers = append(shape.MoELayers, layer)
		}
		for name, format := range maps() {
			p, err := format.Decode(text, shape)
			if err != nil {
				continue
			}
			layout := engine.Layout{Placement: p, HiddenLayers: hidden}
			again, err := format.Encode(layout)
			if err != nil {
				t.Fatalf("%s: a decoded map cannot be encoded: %v", name, err)
			}
			if read, err := format.Decode(again, layout.Shape()); err != nil || !cmp.Equal(p, read) {
				t.Fatalf("%s: error %v: %s", name, err, cmp.Diff(p, read))
			}
		}
	})
}
