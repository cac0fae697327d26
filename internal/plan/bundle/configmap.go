package bundle

import (
	"fmt"
	"path"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/plan"
)

// maxConfigMapBytes leaves room below the 1 MiB that the API server takes, for metadata and its encoding.
const maxConfigMapBytes = 900 << 10

// ConfigMapData is what the ConfigMap of a plan holds for an engine: manifest.json, placement.json, gate-permutation.json
// where the plan has one, and the engine's map, where it reads one, under its base name. An engine that reads none needs
// the permutation. drift.json, which the operator reads, and schedule.json with the hardware.json that it is for, for plug-ins of the
// engine, come along where there is room: engines serve without them.
func ConfigMapData(a *plan.Artifact, engineType string) (map[string]string, error) {
	adapter, err := registry.For(engineType)
	if err != nil {
		return nil, err
	}
	names := []string{plan.ManifestFile, plan.PlacementFile, plan.GatePermutationFile}
	mapFile := plan.MapFile(adapter)
	if mapFile != "" {
		names = append(names, mapFile)
	}
	data, size := map[string]string{}, 0
	for _, name := range names {
		content, has := a.Files[name]
		if !has && name == plan.GatePermutationFile {
			if mapFile == "" {
				return nil, fmt.Errorf("the plan has redundant experts: engine %s reads no expert map, and a permuted checkpoint has each expert once", engineType)
			}
			continue
		}
		if !has {
			return nil, fmt.Errorf("plan %s has no %s", a.Digest, name)
		}
		data[path.Base(name)] = string(content)
		size += len(path.Base(name)) + len(content)
	}
	for _, name := range []string{plan.DriftFile, plan.ScheduleFile, plan.HardwareFile} {
		if content, has := a.Files[name]; has && size+len(name)+len(content) <= maxConfigMapBytes {
			data[name] = string(content)
			size += len(name) + len(content)
		}
	}
	if size > maxConfigMapBytes {
		return nil, fmt.Errorf("the layout has %d bytes; a ConfigMap may hold %d: the model has too many layers and experts for one", size, maxConfigMapBytes)
	}
	return data, nil
}
