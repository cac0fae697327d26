// Command crdtrim rewrites generated CustomResourceDefinitions in place: it drops the descriptions and CEL rules of
// embedded Kubernetes core types, which would make a CRD larger than clients and etcd like (a pod template alone has
// half a megabyte of prose), and makes the containers of an embedded pod template optional, since ours is an overlay.
// It refuses a CRD that is still above 256 KiB.
package main

import (
	"fmt"
	"os"
	"strings"

	"sigs.k8s.io/yaml"
)

// limit is on the compact JSON form, which is what clients send and etcd stores.
const limit = 256 << 10

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
	}
	out, err := yaml.Marshal(crd)
	if err != nil {
		return err
	}
	compact, err := yaml.YAMLToJSON(out)
	if err != nil {
		return err
	}
	if len(compact) > limit {
		return fmt.Errorf("%d bytes, above the limit of %d", len(compact), limit)
	}
	return os.WriteFile(file, append([]byte("---\n"), out...), 0o644)
}

func dig(value any, keys ...string) any {
	for _, key := range keys {
		object, _ := value.(map[string]any)
		value = object[key]
	}
	return value
}

// walk finds embedded core types by the fields that hold them; each of these names stands for one core type throughout
// the API.
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

// strip drops descriptions and rules below a schema; its own description, which is ours, stays.
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
