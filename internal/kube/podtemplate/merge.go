// SPDX-License-Identifier: Apache-2.0

package podtemplate

import (
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// Merge merges users, which may be nil, over ours, as kubectl patch does: containers and volumes by name.
func Merge(ours, users *corev1.PodTemplateSpec) (*corev1.PodTemplateSpec, error) {
	if users == nil {
		return ours.DeepCopy(), nil
	}
	original, err := json.Marshal(ours)
	if err != nil {
		return nil, err
	}
	patch, err := withoutNulls(users)
	if err != nil {
		return nil, err
	}
	merged, err := strategicpatch.StrategicMergePatch(original, patch, corev1.PodTemplateSpec{})
	if err != nil {
		return nil, err
	}
	template := &corev1.PodTemplateSpec{}
	return template, json.Unmarshal(merged, template)
}

// withoutNulls returns the JSON of a pod template without nulls: an absent list of containers marshals as null, which
// would delete the operator's list.
func withoutNulls(template *corev1.PodTemplateSpec) ([]byte, error) {
	data, err := json.Marshal(template)
	if err != nil {
		return nil, err
	}
	var tree map[string]any
	if err := json.Unmarshal(data, &tree); err != nil {
		return nil, err
	}
	dropNulls(tree)
	return json.Marshal(tree)
}

func dropNulls(value any) {
	switch value := value.(type) {
	case map[string]any:
		for key, child := range value {
			if child == nil {
				delete(value, key)
				continue
			}
			dropNulls(child)
		}
	case []any:
		for _, child := range value {
			dropNulls(child)
		}
	}
}

// Env returns the variables that a template, which may be nil, adds to or changes in a container of the operator.
func Env(users *corev1.PodTemplateSpec, container string) []corev1.EnvVar {
	if users == nil {
		return nil
	}
	for _, theirs := range users.Spec.Containers {
		if theirs.Name == container {
			return theirs.Env
		}
	}
	return nil
}
