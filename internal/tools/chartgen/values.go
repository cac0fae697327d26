// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
)

// tableBegin and tableEnd enclose the table of values in the README.
const tableBegin, tableEnd = "<!-- values: by make generate from values.yaml -->\n", "<!-- end of values -->\n"

// documentValues writes the table of values to the README of the chart.
func documentValues(chart string) error {
	text, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	if err != nil {
		return err
	}
	table, err := valuesTable(text)
	if err != nil {
		return fmt.Errorf("values.yaml: %w", err)
	}
	readme := filepath.Join(chart, "README.md")
	old, err := os.ReadFile(readme)
	if err != nil {
		return err
	}
	before, rest, begins := strings.Cut(string(old), tableBegin)
	_, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		return fmt.Errorf("%s lacks the lines %q and %q", readme, tableBegin, tableEnd)
	}
	return os.WriteFile(readme, []byte(before+tableBegin+table+tableEnd+after), 0o644)
}

// valuesTable returns a Markdown table of all values with their defaults and their comments.
func valuesTable(text []byte) (string, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return "", err
	}
	if len(document.Content) != 1 {
		return "", errors.New("is empty")
	}
	var table strings.Builder
	table.WriteString("| value | default | meaning |\n| --- | --- | --- |\n")
	if err := writeRows(&table, "", document.Content[0]); err != nil {
		return "", err
	}
	return table.String(), nil
}

// writeRows writes a row for each value with a comment. A mapping without a comment contains nested values.
func writeRows(table *strings.Builder, prefix string, mapping *yaml.Node) error {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		path := prefix + key.Value
		if key.HeadComment == "" {
			if value.Kind != yaml.MappingNode || len(value.Content) == 0 {
				return fmt.Errorf("line %d: %s has no comment", key.Line, path)
			}
			if err := writeRows(table, path+".", value); err != nil {
				return err
			}
			continue
		}
		var content any
		if err := value.Decode(&content); err != nil {
			return fmt.Errorf("line %d: %s: %w", key.Line, path, err)
		}
		literal, err := json.Marshal(content)
		if err != nil {
			return fmt.Errorf("line %d: %s: %w", key.Line, path, err)
		}
		fmt.Fprintf(table, "| `%s` | `%s` | %s |\n", path, literal, meaning(key.HeadComment))
	}
	return nil
}

// meaning converts a comment to one line for a table cell.
func meaning(comment string) string {
	lines := strings.Split(comment, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(strings.TrimPrefix(line, "#"))
	}
	return strings.ReplaceAll(strings.Join(lines, " "), "|", `\|`)
}
