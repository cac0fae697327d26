// SPDX-License-Identifier: Apache-2.0

package specfields

import (
	"strings"
)

// coreValues contains valid values of Kubernetes types, of maps, and of lists of objects.
var coreValues = map[string][]any{
	"VolumeSource": {
		map[string]any{"hostPath": map[string]any{"path": "/srv/other"}},
		map[string]any{"persistentVolumeClaim": map[string]any{"claimName": "other"}},
	},
	"PodTemplateSpec": {
		map[string]any{"metadata": map[string]any{"labels": map[string]any{"team": "a"}}, "spec": map[string]any{
			"containers":   []any{map[string]any{"name": "engine", "resources": map[string]any{"requests": map[string]any{"cpu": "3"}}}},
			"nodeSelector": map[string]any{"pool": "other"},
		}},
		map[string]any{"spec": map[string]any{"containers": []any{}, "imagePullSecrets": []any{map[string]any{"name": "other"}}}},
	},
	"map[string]string": {map[string]any{"other": "a"}},
	"[]Toleration":      {[]any{map[string]any{"key": "other", "operator": "Exists"}}},
	"Affinity": {map[string]any{"nodeAffinity": map[string]any{"preferredDuringSchedulingIgnoredDuringExecution": []any{map[string]any{
		"weight": int64(1), "preference": map[string]any{"matchExpressions": []any{map[string]any{"key": "other", "operator": "Exists"}}},
	}}}}},
	"[]TopologySpreadConstraint": {[]any{map[string]any{"maxSkew": int64(1), "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}}},
	"[]RouterContainer": {[]any{map[string]any{"name": "router", "resources": map[string]any{
		"requests": map[string]any{"cpu": "1500m", "memory": "0.5Gi"}, "limits": map[string]any{"memory": "2048Mi"},
	}}}},
	"IntOrString": {int64(4), int64(8), int64(0)}, // redundantExperts
	"Quantity":    {"1Gi", int64(1 << 20)},
	"Time":        {"2026-01-01T00:00:00Z", "2099-01-01T00:00:00Z"},
	"[]EnvVar": {
		[]any{map[string]any{"name": "OTHER", "value": "1"}},
		[]any{map[string]any{"name": "POD_IP", "value": "127.0.0.1"}}, // reserved for the operator: a condition must name it
	},
}

// largest is the maximum of the numbers that are tried. Large numbers, such as of replicas, show no further effect.
const largest = 1 << 20

// digestPattern is the pattern of fields with a SHA-256 digest.
const digestPattern = "^[0-9a-f]{64}$"

// candidates returns values to try instead of the present value, which may be nil. The API server may refuse some of
// them.
func (f field) candidates(present any) []any {
	if f.core != "" {
		return coreValues[f.core]
	}
	if len(f.schema.Enum) > 0 {
		return f.schema.Enum
	}
	if present == nil {
		present = f.schema.Default
	}
	switch f.schema.Type {
	case "integer":
		return f.numbers(present)
	case "array":
		if f.schema.Items.Type == "integer" {
			return []any{[]any{int64(4096)}, []any{int64(1), int64(65536)}}
		}
		return []any{[]any{"--other-option"}, []any{"/bin/other", "run"}}
	}
	if f.schema.Pattern == digestPattern {
		return []any{strings.Repeat("1", 64)}
	}
	text, _ := present.(string)
	var texts []any
	for _, candidate := range []string{text + "/other", text + "other", "other", "/models/other", "other/path", "example.com/other"} {
		texts = append(texts, candidate)
	}
	return texts
}

func (f field) numbers(present any) []any {
	now := int64(0)
	switch n := present.(type) {
	case int64:
		now = n
	case float64:
		now = int64(n)
	}
	var numbers []any
	add := func(n int64) {
		if f.schema.Minimum != nil && n < *f.schema.Minimum || f.schema.Maximum != nil && n > *f.schema.Maximum || n > largest {
			return
		}
		numbers = append(numbers, n)
	}
	add(now + 1)
	add(now - 1)
	if f.schema.Minimum != nil {
		add(*f.schema.Minimum)
		add(*f.schema.Minimum + 1)
	}
	return numbers
}

// invalid returns values that the schema forbids.
func (f field) invalid() []any {
	s := f.schema
	if f.core != "" || s.Type == "array" {
		values := []any{"text"}
		if s.MaxItems != nil {
			many := make([]any, *s.MaxItems+1)
			for i := range many {
				many[i] = "x"
			}
			if f.core == "" {
				values = append(values, many)
			}
		}
		return values
	}
	if s.Type == "integer" {
		values := []any{"text", 1.5, map[string]any{"a": "b"}}
		if s.Minimum != nil {
			values = append(values, *s.Minimum-1)
		}
		if s.Maximum != nil {
			values = append(values, *s.Maximum+1)
		}
		return values
	}
	values := []any{int64(7), []any{"text"}}
	switch {
	case len(s.Enum) > 0:
		values = append(values, "NoSuchValue", "")
	case s.Pattern != "":
		values = append(values, "no such pattern!")
	}
	if s.MinLength != nil && *s.MinLength > 0 {
		values = append(values, "")
	}
	if s.MaxLength != nil {
		values = append(values, strings.Repeat("x", int(*s.MaxLength)+1))
	}
	return values
}
