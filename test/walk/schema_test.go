package walk

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

// schema is the part of an OpenAPI schema that values are made from.
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
		t.Fatalf("%s has %d versions: tell which one to walk", plural, len(definition.Spec.Versions))
	}
	return definition.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
}

// field is a leaf of a spec: a number, a text, a list of texts, or a type of Kubernetes' own, which is not ours to take apart.
type field struct {
	path   []string
	schema schema
	// core is the name of the Kubernetes type, or of a map or a list of objects; empty for any other leaf of ours.
	core string
}

func (f field) String() string { return "spec." + strings.Join(f.path, ".") }

// fieldsOf are the leaves of a spec, given its schema and its Go type, in the order of their names.
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
			t.Fatalf("spec.%s is a list of other than texts and numbers: teach this test to make such lists", strings.Join(path, "."))
		}
	case "string", "integer":
	default:
		t.Fatalf("spec.%s has type %q: teach this test to make such values", strings.Join(path, "."), s.Type)
	}
	return []field{{path: path, schema: s}}
}

// memberOf is the type of a member of a struct, by its name in JSON; members of embedded structs are the struct's own.
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

// spec is a spec as JSON has it.
type spec map[string]any

// specOf reads a spec from YAML of this package.
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
		panic(err) // it was read from JSON
	}
	copied := spec{}
	if err := json.Unmarshal(text, &copied); err != nil {
		panic(err)
	}
	return copied
}

// get is the value at a path; nil where there is none.
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

// with is a copy with another value at a path. Objects on the way that are missing are made, with the least that their schema
// requires beside it.
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
					next[required] = least(required, at.Properties[required])
				}
			}
			object[name] = next
		}
		object = next
	}
	object[path[len(path)-1]] = value
	return changed
}

// without is a copy in which nothing is at a path.
func (s spec) without(path []string) spec {
	changed := s.clone()
	object, _ := spec(changed).get(path[:len(path)-1]).(map[string]any)
	if len(path) == 1 {
		object = changed
	}
	delete(object, path[len(path)-1])
	return changed
}

// least is a small value that a schema accepts.
func least(name string, s schema) any {
	switch {
	case s.Default != nil:
		return s.Default
	case len(s.Enum) > 0:
		return s.Enum[0]
	case name == "volume":
		return map[string]any{"hostPath": map[string]any{"path": "/srv/least"}}
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
			object[required] = least(required, s.Properties[required])
		}
		return object
	}
	panic(fmt.Sprintf("%s has type %q: teach this test to make such values", name, s.Type))
}
