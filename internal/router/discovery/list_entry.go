// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"strings"

	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

const (
	engineMap  = string(semmoev1.RealizationEngineMap)
	reshuffled = string(semmoev1.RealizationReshuffledWeights)
)

// printableName matches names that are valid in a header and in a log.
var printableName = regexp.MustCompile(`^[A-Za-z0-9.:_\[\]-]{1,253}$`)

// entry is a backend in a file.
type entry struct {
	// Address is host:port, or an http or https URL.
	Address string `json:"address"`
	// Name identifies the backend in headers; the default is the address.
	Name string `json:"name"`
	// Ranks is the number of ranks that accept requests; 0 if the engine picks the rank.
	Ranks int `json:"ranks"`
	// Engine is the engine type; the default is that of the router.
	Engine string `json:"engine"`
	// PlanDir is the directory of the plan that the engine serves under, relative to the file.
	PlanDir string `json:"planDir"`
	// Realization is how the plan reached the engine.
	Realization string `json:"realization"`

	// at is the location of the entry in messages. dir is the directory of the file; empty for a URL.
	at, dir string
}

const entryFields = "address, name, ranks, engine, planDir and realization are allowed"

// parseEntries parses a JSON or YAML list of backends. The name of the file is used in messages.
func parseEntries(file string, text []byte) ([]entry, error) {
	text, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return nil, fmt.Errorf("%s is invalid: %s", file, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	var items []json.RawMessage
	if err := json.Unmarshal(text, &items); err != nil || len(items) == 0 {
		return nil, fmt.Errorf("%s is invalid: a JSON or YAML list of at least one backend is allowed", file)
	}
	directory, err := filepath.Abs(filepath.Dir(file))
	if err != nil {
		return nil, err
	}
	if len(items) > maxListed {
		return nil, fmt.Errorf("%s is invalid: it has %d backends, at most %d are allowed", file, len(items), maxListed)
	}
	var entries []entry
	for i, item := range items {
		e := entry{at: fmt.Sprintf("%s: [%d]", file, i), dir: directory}
		decoder := json.NewDecoder(bytes.NewReader(item))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&e); err != nil {
			return nil, entryError(e.at, err)
		}
		if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%s is invalid: %s", e.at, entryFields)
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// entryError names the field that cannot be decoded.
func entryError(at string, err error) error {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) && wrong.Field != "" {
		return fmt.Errorf("%s.%s: a %s is invalid: %s is allowed", at, wrong.Field, wrong.Value, wrong.Type)
	}
	if field, unknown := strings.CutPrefix(err.Error(), "json: unknown field "); unknown {
		return fmt.Errorf("%s: field %s is unknown: %s", at, field, entryFields)
	}
	return fmt.Errorf("%s is invalid: %s", at, entryFields)
}
