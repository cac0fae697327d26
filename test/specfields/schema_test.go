// SPDX-License-Identifier: Apache-2.0

package specfields

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// schema is the part of an OpenAPI schema from which values are generated.
type schema struct {
	Type       string            `json:"type"`
	Enum       []any             `json:"enum"`
	Default    any               `json:"default"`
	Properties map[string]schema `json:"properties"`
	Required   []string          `json:"required"`
	Items      *schema           `json:"items"`
	Minimum    *int64            `json:"minimum"`
	Maximum    *int64            `json:"maximum"`
	MinLength  *int64            `json:"minLength"`
	MaxLength  *int64            `json:"maxLength"`
	MaxItems   *int64            `json:"maxItems"`
	Pattern    string            `json:"pattern"`
}

// specSchema reads the schema of a kind's spec from its custom resource definition.
func specSchema(t *testing.T, plural string) schema {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "config", "crd", "semmoe.io_"+plural+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var definition struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					OpenAPIV3Schema schema `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(text, &definition); err != nil {
		t.Fatal(err)
	}
	if len(definition.Spec.Versions) != 1 {
		t.Fatalf("%s has %d versions, want 1: specify the version to test", plural, len(definition.Spec.Versions))
	}
	return definition.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
}

// field is a leaf of a spec: a number, a string, a list of strings or numbers, or a Kubernetes type, whose fields are
// not tested.
type field struct {
	path   []string
	schema schema
	// core is the name of a Kubernetes type, a map type, or the type of a list of objects; empty for other leaves.
	core string
}

func (f field) String() string { return "spec." + strings.Join(f.path, ".") }

// fieldsOf returns the leaves of a spec, sorted by name, from its schema and its Go type.
func fieldsOf(t *testing.T, path []string, s schema, goType reflect.Type) []field {
	t.Helper()
	for goType.Kind() == reflect.Pointer {
		goType = goType.Elem()
	}
	element := goType
	if goType.Kind() == reflect.Slice {
		element = goType.Elem()
	}
	if strings.HasPrefix(element.PkgPath(), "k8s.io/") {
		name := element.Name()
		if element != goType {
			name = "[]" + name
		}
		return []field{{path, s, name}}
	}
	switch {
	case goType.Kind() == reflect.Map:
		return []field{{path, s, goType.String()}}
	case goType.Kind() == reflect.Slice && element.Kind() == reflect.Struct:
		return []field{{path, s, "[]" + element.Name()}}
	}
	switch s.Type {
	case "object":
		var fields []field
		for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
			member, found := memberOf(goType, name)
			if !found {
				t.Fatalf("%v has no field for spec.%s", goType, strings.Join(append(path, name), "."))
			}
			fields = append(fields, fieldsOf(t, append(slices.Clone(path), name), s.Properties[name], member)...)
		}
		return fields
	case "array":
		if s.Items == nil || s.Items.Type != "string" && s.Items.Type != "integer" {
			t.Fatalf("spec.%s is a list of an unsupported type: extend fieldsOf and candidates", strings.Join(path, "."))
		}
	case "string", "integer":
	default:
		t.Fatalf("spec.%s has unsupported type %q: extend fieldsOf and candidates", strings.Join(path, "."), s.Type)
	}
	return []field{{path: path, schema: s}}
}

// memberOf returns the type of a struct field by its JSON name. Fields of inlined structs are included.
func memberOf(structType reflect.Type, name string) (reflect.Type, bool) {
	for i := range structType.NumField() {
		member := structType.Field(i)
		tag, options, _ := strings.Cut(member.Tag.Get("json"), ",")
		if tag == name {
			return member.Type, true
		}
		if member.Anonymous && strings.Contains(options, "inline") {
			if found, ok := memberOf(member.Type, name); ok {
				return found, true
			}
		}
	}
	return nil, false
}

// spec is a spec in decoded JSON.
type spec map[string]any

// specOf decodes a spec from YAML. It panics if the YAML is invalid.
func specOf(text string) spec {
	s := spec{}
	if err := yaml.Unmarshal([]byte(text), &s); err != nil {
		panic(err)
	}
	return s
}

func (s spec) clone() spec {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // decoded JSON can be encoded
	}
	copied := spec{}
	if err := json.Unmarshal(text, &copied); err != nil {
		panic(err)
	}
	return copied
}

// get returns the value at a path; nil if there is none.
func (s spec) get(path []string) any {
	var value any = map[string]any(s)
	for _, name := range path {
		object, _ := value.(map[string]any)
		if value = object[name]; value == nil {
			return nil
		}
	}
	return value
}

// with returns a copy with the value at a path. It creates missing objects on the path, with minimal values for the
// other fields that their schema requires.
func (s spec) with(root schema, path []string, value any) spec {
	changed := s.clone()
	object, at := map[string]any(changed), root
	for i, name := range path[:len(path)-1] {
		at = at.Properties[name]
		next, present := object[name].(map[string]any)
		if !present {
			next = map[string]any{}
			for _, required := range at.Required {
				if required != path[i+1] {
					next[required] = minimal(required, at.Properties[required])
				}
			}
			object[name] = next
		}
		object = next
	}
	object[path[len(path)-1]] = value
	return changed
}

// without returns a copy without the value at a path.
func (s spec) without(path []string) spec {
	changed := s.clone()
	object, _ := spec(changed).get(path[:len(path)-1]).(map[string]any)
	if len(path) == 1 {
		object = changed
	}
	delete(object, path[len(path)-1])
	return changed
}

// minimal returns a minimal value that a schema accepts.
func minimal(name string, s schema) any {
	switch {
	case s.Default != nil:
		return s.Default
	case len(s.Enum) > 0:
		return s.Enum[0]
	case name == "volume":
		return map[string]any{"hostPath": map[string]any{"path": "/srv/minimal"}}
	}
	switch s.Type {
	case "integer":
		if s.Minimum != nil {
			return *s.Minimum
		}
		return int64(0)
	case "string":
		return name
	case "object":
		object := map[string]any{}
		for _, required := range s.Required {
			object[required] = minimal(required, s.Properties[required])
		}
		return object
	}
	panic(fmt.Sprintf("%s has unsupported type %q: extend minimal", name, s.Type))
}
