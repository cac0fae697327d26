package calibration

import (
	"bytes"
	"encoding/json"

	"sigs.k8s.io/yaml"
)

// Manifest is the Job of a spec and the ConfigMap with its script, as YAML to keep in a repository and apply.
func Manifest(spec Spec) ([]byte, error) {
	var documents [][]byte
	for _, object := range []any{spec.ConfigMap(), spec.Job()} {
		data, err := json.Marshal(object)
		if err != nil {
			return nil, err
		}
		var fields map[string]any
		if err := json.Unmarshal(data, &fields); err != nil {
			return nil, err
		}
		delete(fields, "status") // who applies an object does not say how it is
		document, err := yaml.Marshal(fields)
		if err != nil {
			return nil, err
		}
		documents = append(documents, document)
	}
	return bytes.Join(documents, []byte("---\n")), nil
}
