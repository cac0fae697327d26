// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const widgets = `
spec:
  names: {kind: Widget, shortNames: [wid]}
  versions:
  - name: v1alpha1
    schema:
      openAPIV3Schema:
        description: |-
          Widget is
          a thing.
        properties:
          spec:
            x-kubernetes-validations: [{message: one of the two}]
            required: [size]
            properties:
              size: {type: integer, minimum: 1, maximum: 8, default: 2, description: "size is a|b."}
              mode: {type: string, enum: [A, B], description: mode <x>.}
              parts:
                type: array
                maxItems: 4
                description: parts.
                items: {type: object, properties: {name: {type: string, maxLength: 9, description: name.}}}
              volume: {type: object, description: volume., properties: {hostPath: {type: object}}}
          status:
            properties:
              since: {type: string, format: date-time, description: since.}
`

const want = "\n## Widget\n\nShort name `wid`. Widget is a thing.\n" +
	"\n### Widget: spec\n\n* one of the two\n\n" +
	"| field | type | default | meaning |\n| --- | --- | --- | --- |\n" +
	"| `mode` | `A`, `B` |  | mode &lt;x>. |\n" +
	"| `parts` | list of at most 4: object |  | parts. |\n" +
	"| `parts[].name` | string, at most 9 characters |  | name. |\n" +
	"| **`size`** | integer, 1 to 8 | `2` | size is a\\|b. |\n" +
	"| `volume` | object |  | volume. |\n" +
	"\n### Widget: status\n\n" +
	"| field | type | default | meaning |\n| --- | --- | --- | --- |\n" +
	"| `since` | time |  | since. |\n"

func TestReference(t *testing.T) {
	var d definition
	if err := yaml.Unmarshal([]byte(widgets), &d); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	if err := write(&got, d); err != nil {
		t.Fatal(err)
	}
	if got.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", got.String(), want)
	}
	d.Spec.Versions = nil
	if err := write(&got, d); err == nil {
		t.Error("write accepts a definition without versions")
	}
}
