// SPDX-License-Identifier: Apache-2.0

// Command crdtrim rewrites generated CustomResourceDefinitions in place. It removes the descriptions and CEL rules of
// embedded Kubernetes core types, which would make a CRD too large for clients and etcd (the descriptions of a pod
// template have half a megabyte). It makes the containers of an embedded pod template optional, because the template is
// an overlay. It limits quantities and ports to what clients decode. It writes each of the remaining schemas of core types
// on one line, and rejects a CRD that kubectl cannot apply.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// limit is the maximum size of the CRD as JSON, in bytes: kubectl apply stores this form in an annotation, and all
// annotations of an object have 256 KiB at most. The rest is for other annotations.
const limit = 255 << 10

func main() {
	if len(os.Args) < 2 {
		fail("usage: crdtrim CRD.yaml...")
	}
	for _, file := range os.Args[1:] {
		if err := trim(file); err != nil {
			fail("%s: %v", file, err)
		}
	}
}

func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "crdtrim: "+format+"\n", args...)
	os.Exit(1)
}

func trim(file string) error {
	in, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var crd map[string]any
	if err := yaml.Unmarshal(in, &crd); err != nil {
		return err
	}
	versions, _ := dig(crd, "spec", "versions").([]any)
	for _, version := range versions {
		schema, _ := dig(version, "schema", "openAPIV3Schema").(map[string]any)
		walk(schema, "")
		bound(schema)
	}
	applied, err := json.Marshal(crd)
	if err != nil {
		return err
	}
	if len(applied) > limit {
		return fmt.Errorf("%d bytes, above the limit of %d", len(applied), limit)
	}
	out, err := format(crd)
	if err != nil {
		return err
	}
	return os.WriteFile(file, out, 0o644)
}

// format formats a CRD for readers, with one line per field of this project, and one line per schema without
// descriptions.
func format(crd map[string]any) ([]byte, error) {
	sorted, err := yaml.Marshal(crd)
	if err != nil {
		return nil, err
	}
	var document yamlv3.Node
	if err := yamlv3.Unmarshal(sorted, &document); err != nil {
		return nil, err
	}
	fold(&document)
	out := bytes.NewBufferString("---\n")
	encoder := yamlv3.NewEncoder(out)
	encoder.SetIndent(2)
	if err := encoder.Encode(&document); err != nil {
		return nil, err
	}
	return out.Bytes(), encoder.Close()
}

// fold writes schemas below a node on one line if they have no descriptions. It reports whether a schema has a
// description.
func fold(node *yamlv3.Node) (described bool) {
	for i, child := range node.Content {
		key := ""
		if node.Kind == yamlv3.MappingNode {
			if i%2 == 0 {
				continue
			}
			key = node.Content[i-1].Value
		}
		inside := fold(child)
		if !inside && slices.Contains([]string{"properties", "items", "additionalProperties"}, key) {
			child.Style = yamlv3.FlowStyle
		}
		described = described || inside || key == "description"
	}
	return described
}

func dig(value any, keys ...string) any {
	for _, key := range keys {
		object, _ := value.(map[string]any)
		value = object[key]
	}
	return value
}

// walk finds embedded core types by the names of their fields. Each of these names has the same core type in the whole
// API.
func walk(schema map[string]any, path string) {
	properties, _ := schema["properties"].(map[string]any)
	for name, property := range properties {
		child, _ := property.(map[string]any)
		switch here := path + "." + name; {
		case strings.HasSuffix(here, ".template"):
			strip(child, false)
			if spec, ok := dig(child, "properties", "spec").(map[string]any); ok {
				delete(spec, "required")
			}
		case strings.HasSuffix(here, ".volume"), strings.HasSuffix(here, ".env"):
			strip(child, false)
		default:
			walk(child, here)
			if items, ok := child["items"].(map[string]any); ok {
				walk(items, here+"[]")
			}
		}
	}
}

// quantity is the pattern of a quantity that clients decode at once. That of resource.Quantity also accepts exponents with
// fractions, which clients cannot decode, and with nine digits, which take them minutes.
const quantity = `^[+-]?([0-9]{1,32}(\.[0-9]{0,32})?|\.[0-9]{1,32})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$`

// bound limits integers or strings to what clients can decode: one object that they cannot decode would stop the operator.
func bound(schema map[string]any) {
	if schema["x-kubernetes-int-or-string"] == true {
		if _, isQuantity := schema["pattern"]; isQuantity {
			schema["pattern"] = quantity
		} else {
			schema["minimum"], schema["maximum"] = math.MinInt32, math.MaxInt32
		}
	}
	for _, key := range []string{"items", "additionalProperties"} {
		if child, ok := schema[key].(map[string]any); ok {
			bound(child)
		}
	}
	properties, _ := schema["properties"].(map[string]any)
	for _, property := range properties {
		if child, ok := property.(map[string]any); ok {
			bound(child)
		}
	}
}

// strip removes descriptions and rules below a schema. It keeps the description of the schema itself, which belongs to
// this project.
func strip(schema map[string]any, inner bool) {
	delete(schema, "x-kubernetes-validations")
	if _, text := schema["description"].(string); text && inner {
		delete(schema, "description")
	}
	for _, key := range []string{"items", "additionalProperties"} {
		if child, ok := schema[key].(map[string]any); ok {
			strip(child, true)
		}
	}
	properties, _ := schema["properties"].(map[string]any)
	for _, property := range properties {
		if child, ok := property.(map[string]any); ok {
			strip(child, true)
		}
	}
}
