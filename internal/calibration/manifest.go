// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"bytes"
	"encoding/json"

	"sigs.k8s.io/yaml"
)

// Manifest returns the Job of a spec and the ConfigMap of its script as YAML, for a repository or kubectl apply.
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
		delete(fields, "status") // a manifest has no status
		document, err := yaml.Marshal(fields)
		if err != nil {
			return nil, err
		}
		documents = append(documents, document)
	}
	return bytes.Join(documents, []byte("---\n")), nil
}
