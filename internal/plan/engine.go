// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"bytes"
	"path"
	"reflect"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

// engineDir is the directory of the engines' expert maps.
const engineDir = "engine"

// MapFile returns the name of the file of an engine's expert map in the directory of a plan, or the empty string if the
// engine reads no map.
func MapFile(adapter engine.Adapter) string {
	if adapter.ExpertMap == nil {
		return ""
	}
	return path.Join(engineDir, adapter.ExpertMap.File)
}

// mapOf returns the format of an engine's expert map by file name, or nil if the file is not a map.
func mapOf(name string) *engine.ExpertMap {
	for _, adapter := range registry.All() {
		if name != "" && MapFile(adapter) == name {
			return adapter.ExpertMap
		}
	}
	return nil
}

func addEngineFiles(files map[string][]byte, p *solver.Plan) (err error) {
	for _, adapter := range registry.All() {
		if adapter.ExpertMap == nil {
			continue
		}
		if files[MapFile(adapter)], err = adapter.ExpertMap.Encode(engine.Layout{Placement: p.Placement, HiddenLayers: p.HiddenLayers}); err != nil {
			return err
		}
	}
	if !p.Placement.Redundant() {
		files[GatePermutationFile], err = encodeJSON(gatePermutation(p.Placement))
	}
	return err
}

// CheckMap decodes an engine's expert map, and returns an error if it differs from the placement. It reports false if
// the file is not a map.
func CheckMap(name string, content []byte, p *placement.Placement, hiddenLayers int) (isMap bool, err error) {
	format := mapOf(name)
	if format == nil {
		return false, nil
	}
	layout := engine.Layout{Placement: p, HiddenLayers: hiddenLayers}
	if err := checkSlots(p, hiddenLayers); err != nil {
		return true, err
	}
	written, err := format.Encode(layout)
	if err != nil {
		return true, invalidf("%v", err)
	}
	if bytes.Equal(content, written) {
		return true, nil
	}
	// White space and the names of members differ between versions of this program. A file that is longer is not a map
	// of the placement, and parsing it would need a multiple of its size.
	if maxBytes := 4*len(written) + 4096; len(content) > maxBytes {
		return true, invalidf("%s: %d bytes are too many: a map of %s has at most %d", name, len(content), PlacementFile, maxBytes)
	}
	read, err := format.Decode(content, layout.Shape())
	if err != nil {
		return true, invalidf("%v", err)
	}
	read.CopyRule = p.CopyRule // maps do not contain the copy rule
	if !reflect.DeepEqual(read, p) {
		return true, invalidf("%s does not place experts as %s does", name, PlacementFile)
	}
	return true, nil
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
