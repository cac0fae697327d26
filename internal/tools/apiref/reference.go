// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// definition contains the fields of a CustomResourceDefinition that the reference needs.
type definition struct {
	Spec struct {
		Names struct {
			Kind       string   `json:"kind"`
			ShortNames []string `json:"shortNames"`
		} `json:"names"`
		Versions []struct {
			Name   string `json:"name"`
			Schema struct {
				OpenAPIV3Schema schema `json:"openAPIV3Schema"`
			} `json:"schema"`
		} `json:"versions"`
	} `json:"spec"`
}

// schema contains the properties of a field that the reference needs.
type schema struct {
	Description string            `json:"description"`
	Type        string            `json:"type"`
	Format      string            `json:"format"`
	Pattern     string            `json:"pattern"`
	Enum        []string          `json:"enum"`
	Default     json.RawMessage   `json:"default"`
	Minimum     *float64          `json:"minimum"`
	Maximum     *float64          `json:"maximum"`
	MaxItems    *int64            `json:"maxItems"`
	MaxLength   *int64            `json:"maxLength"`
	IntOrString bool              `json:"x-kubernetes-int-or-string"`
	Required    []string          `json:"required"`
	Properties  map[string]schema `json:"properties"`
	Items       *schema           `json:"items"`
	Rules       []struct {
		Message string `json:"message"`
	} `json:"x-kubernetes-validations"`
}

// write writes the description of a kind, and the tables of its spec and its status.
func write(to *strings.Builder, d definition) error {
	if len(d.Spec.Versions) != 1 {
		return fmt.Errorf("%d versions instead of one", len(d.Spec.Versions))
	}
	kind := d.Spec.Versions[0].Schema.OpenAPIV3Schema
	fmt.Fprintf(to, "\n## %s\n\nShort name `%s`. %s\n", d.Spec.Names.Kind, strings.Join(d.Spec.Names.ShortNames, "`, `"), oneLine(kind.Description))
	for _, part := range []string{"spec", "status"} {
		of, ok := kind.Properties[part]
		if !ok {
			return errors.New("lacks " + part)
		}
		fmt.Fprintf(to, "\n### %s: %s\n", d.Spec.Names.Kind, part)
		for _, rule := range of.Rules {
			fmt.Fprintf(to, "\n* %s", oneLine(rule.Message))
		}
		if len(of.Rules) > 0 {
			to.WriteString("\n")
		}
		to.WriteString("\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n")
		rows(to, "", of)
	}
	return nil
}

// rows writes a row for each field below a path, with parents before their children.
func rows(to *strings.Builder, path string, of schema) {
	for _, name := range slices.Sorted(maps.Keys(of.Properties)) {
		field := of.Properties[name]
		title := "`" + path + name + "`"
		if slices.Contains(of.Required, name) {
			title = "**" + title + "**"
		}
		value := ""
		if len(field.Default) > 0 {
			value = "`" + string(field.Default) + "`"
		}
		meaning := oneLine(field.Description)
		for _, rule := range field.Rules {
			meaning += " Rule: " + oneLine(rule.Message) + "."
		}
		fmt.Fprintf(to, "| %s | %s | %s | %s |\n", title, typeOf(field), escape(value), escape(meaning))
		below, parent := path+name+".", field
		if field.Items != nil {
			below, parent = path+name+"[].", *field.Items
		}
		if described(parent) {
			rows(to, below, parent)
		}
	}
}

// described reports whether a type belongs to this project. The descriptions of Kubernetes types were removed
// (crdtrim).
func described(of schema) bool {
	for _, field := range of.Properties {
		if field.Description != "" {
			return true
		}
	}
	return false
}

// typeOf returns the type of a field with its limits.
func typeOf(field schema) string {
	if field.Items != nil {
		if field.MaxItems != nil {
			return fmt.Sprintf("list of at most %d: %s", *field.MaxItems, typeOf(*field.Items))
		}
		return "list: " + typeOf(*field.Items)
	}
	text := field.Type
	switch {
	case field.IntOrString:
		text = "integer or string"
	case len(field.Enum) > 0:
		return "`" + strings.Join(field.Enum, "`, `") + "`"
	case field.Format == "date-time":
		text = "time"
	case field.Type == "integer":
		text = "integer" + bounds(field)
	case field.MaxLength != nil:
		text += fmt.Sprintf(", at most %d characters", *field.MaxLength)
	}
	return text
}

func bounds(field schema) string {
	switch {
	case field.Minimum != nil && field.Maximum != nil:
		return fmt.Sprintf(", %.0f to %.0f", *field.Minimum, *field.Maximum)
	case field.Minimum != nil:
		return fmt.Sprintf(", at least %.0f", *field.Minimum)
	case field.Maximum != nil:
		return fmt.Sprintf(", at most %.0f", *field.Maximum)
	}
	return ""
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// escape escapes a text for a table cell, so that cell separators and HTML tags stay visible.
func escape(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;").Replace(text)
}
