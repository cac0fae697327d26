// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"fmt"
	"path"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/plan"
)

// maxConfigMapBytes leaves room within the limit of 1 MiB of the API server for metadata and encoding.
const maxConfigMapBytes = 900 << 10

// ConfigMapData returns the content of the ConfigMap of a plan for an engine: manifest.json, placement.json,
// gate-permutation.json if the plan has one, and the expert map of the engine, if it reads one, under its base name. An
// engine that reads no map needs the permutation. drift.json (for the operator) and schedule.json with its
// hardware.json (for plug-ins of engines) are included if they fit, because engines serve without them.
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
				return nil, fmt.Errorf("the plan has redundant experts, but engine %s reads no expert map, and a permuted checkpoint contains each expert once", engineType)
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
		return nil, fmt.Errorf("the layout has %d bytes, but a ConfigMap may contain at most %d: the model has too many layers and experts", size, maxConfigMapBytes)
	}
	return data, nil
}
