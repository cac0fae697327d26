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

// MapFile is the file of an engine's expert map, by its name in a plan's directory; empty where the engine reads none.
func MapFile(adapter engine.Adapter) string {
	if adapter.ExpertMap == nil {
		return ""
	}
	return path.Join(engineDir, adapter.ExpertMap.File)
}

// mapOf is the format of an engine's expert map; nil where the name is of another file.
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

// CheckMap reads an engine's expert map back, and refuses one that is not of the placement. It reports false where the
// name is of another file.
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
	// Spaces and names of members differ between versions of this program. Anything longer is not a map of the placement, and parsing it
	// would need a multiple of its size.
	if most := 4*len(written) + 4096; len(content) > most {
		return true, invalidf("%s: holds %d bytes; a map of %s has at most %d", name, len(content), PlacementFile, most)
	}
	read, err := format.Decode(content, layout.Shape())
	if err != nil {
		return true, invalidf("%v", err)
	}
	read.CopyRule = p.CopyRule // no map names it
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
