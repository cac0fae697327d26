package bundle

import (
	"fmt"
	"path"

	"github.com/semmoe/operator/internal/plan"
)

// maxConfigMapBytes leaves room below the 1 MiB that the API server takes, for metadata and its encoding.
const maxConfigMapBytes = 900 << 10

// engineFiles are the expert maps that engines read, by spec.engine.type.
var engineFiles = map[string]string{"SGLang": plan.SGLangFile}

// ConfigMapData is what the ConfigMap of a plan holds for an engine: manifest.json, placement.json, gate-permutation.json
// where the plan has one, and the engine's map under its base name.
func ConfigMapData(a *plan.Artifact, engine string) (map[string]string, error) {
	engineFile, known := engineFiles[engine]
	if !known {
		return nil, fmt.Errorf("engine %q has no expert map: use SGLang", engine)
	}
	data, size := map[string]string{}, 0
	for _, name := range []string{plan.ManifestFile, plan.PlacementFile, plan.GatePermutationFile, engineFile} {
		content, has := a.Files[name]
		if !has && name == plan.GatePermutationFile {
			continue
		}
		if !has {
			return nil, fmt.Errorf("plan %s has no %s", a.Digest, name)
		}
		data[path.Base(name)] = string(content)
		size += len(path.Base(name)) + len(content)
	}
	if size > maxConfigMapBytes {
		return nil, fmt.Errorf("the layout has %d bytes; a ConfigMap may hold %d: the model has too many layers and experts for one", size, maxConfigMapBytes)
	}
	return data, nil
}
