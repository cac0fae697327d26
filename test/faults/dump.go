// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Dump returns the objects of some kinds in a namespace as text, by kind and name, without fields that differ between
// any two runs: fields that the cluster sets (versions, times, addresses), annotations of Touch, the figures of a
// failure, the start time of a live profile, and the name of the namespace. It replaces UIDs of dumped objects with
// their kinds and names. Of the status it keeps only the conditions' status and reason, and only for the operator's own
// kinds.
func Dump(ctx context.Context, c client.Client, namespace string, kinds []client.ObjectList) (map[string]string, error) {
	state := map[string]string{}
	same := []string{namespace, "NAMESPACE"}
	for _, list := range kinds {
		if err := c.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return nil, err
		}
		if err := meta.EachListItem(list, func(item runtime.Object) error {
			gvk, err := apiutil.GVKForObject(item, c.Scheme())
			if err != nil {
				return err
			}
			object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(item)
			if err != nil {
				return err
			}
			text, err := json.MarshalIndent(essence(gvk.Group, gvk.Kind, object), "", " ")
			name := gvk.Kind + " " + item.(client.Object).GetName()
			state[name] = string(text)
			same = append(same, string(item.(client.Object).GetUID()), "identity of "+name)
			return err
		}); err != nil {
			return nil, fmt.Errorf("dump %T: %w", list, err)
		}
	}
	replacer := strings.NewReplacer(same...)
	for name, text := range state {
		state[name] = replacer.Replace(text)
	}
	return state, nil
}

// ownGroup is the API group of the operator's kinds. Only their conditions are part of a dump.
const ownGroup = "semmoe.io"

// essence returns the fields of an object that must be equal in two runs.
func essence(group, kind string, object map[string]any) map[string]any {
	kept := map[string]any{}
	for field, value := range object {
		switch field {
		case "apiVersion", "kind", "metadata", "status":
		default:
			kept[field] = value
		}
	}
	metadata, _ := object["metadata"].(map[string]any)
	kept["labels"] = without(metadata["labels"], "batch.kubernetes.io/controller-uid", "controller-uid")
	kept["annotations"] = reasons(without(metadata["annotations"], "deployment.kubernetes.io/revision", ForeignAnnotation))
	kept["finalizers"] = metadata["finalizers"]
	kept["owners"] = owners(metadata)
	spec, _ := object["spec"].(map[string]any)
	switch kind {
	case "Service":
		kept["spec"] = without(spec, "clusterIP", "clusterIPs")
	case "Job": // the Job controller adds the UID of the Job to selector and labels
		trimmed := without(spec, "selector")
		if template, ok := spec["template"].(map[string]any); ok {
			trimmed["template"] = without(template, "metadata")
		}
		kept["spec"] = trimmed
	case "AffinityProfile": // a live profile contains the time since which requests are sampled
		trimmed := without(spec)
		if live, ok := spec["live"]; ok {
			trimmed["live"] = without(live, "since")
		}
		kept["spec"] = trimmed
	}
	if group == ownGroup {
		kept["conditions"] = conditions(object)
	}
	return kept
}

// without returns a copy of a map without some keys. It returns an empty map if value is not a map.
func without(value any, keys ...string) map[string]any {
	all, _ := value.(map[string]any)
	kept := map[string]any{}
	for key, value := range all {
		kept[key] = value
	}
	for _, key := range keys {
		delete(kept, key)
	}
	return kept
}

// failurePrefix is the prefix of annotations with a plan's failures: the reason, and the figures after a colon.
const failurePrefix = "failed.semmoe.io/"

// reportAnnotation is the annotation of a plan's ConfigMap with the figures of the plan.
const reportAnnotation = "semmoe.io/report"

// provenAnnotation is the annotation of a workload with the time since which only this workload has served.
const provenAnnotation = "semmoe.io/proven"

// releaseAnnotation is the annotation of a workload with the engine release. It is written when the first pod answers,
// at a time that differs between runs.
const releaseAnnotation = "semmoe.io/engine-release"

// reasons removes parts of annotations that differ between runs: the figures of failures, times, and the engine
// release.
func reasons(annotations map[string]any) map[string]any {
	delete(annotations, releaseAnnotation)
	for key, value := range annotations {
		text, _ := value.(string)
		if strings.HasPrefix(key, failurePrefix) {
			annotations[key], _, _ = strings.Cut(text, ":")
		}
		if _, err := time.Parse(time.RFC3339, text); err == nil && key == provenAnnotation {
			annotations[key] = "a time"
		}
	}
	return annotations
}

// owners returns the kinds and names of the owners.
func owners(metadata map[string]any) []string {
	references, _ := metadata["ownerReferences"].([]any)
	var names []string
	for _, reference := range references {
		if fields, ok := reference.(map[string]any); ok {
			names = append(names, fmt.Sprintf("%v %v controller=%v", fields["kind"], fields["name"], fields["controller"]))
		}
	}
	return names
}

// followsTraffic is the condition that depends on the sampled requests. It is not part of a dump.
const followsTraffic = "LocalityOnTarget"

// conditions returns status and reason of each condition, by type.
func conditions(object map[string]any) map[string]string {
	status, _ := object["status"].(map[string]any)
	list, _ := status["conditions"].([]any)
	states := map[string]string{}
	for _, item := range list {
		if c, ok := item.(map[string]any); ok && c["type"] != followsTraffic {
			states[fmt.Sprint(c["type"])] = fmt.Sprintf("%v %v", c["status"], c["reason"])
		}
	}
	return states
}

// Rename replaces names that differ between two runs in a dump or in the counts of a Journal. names maps each name to
// its replacement. Rename removes the data and the report of a ConfigMap with a replaced name, because the name is
// derived from the data.
func Rename(state, names map[string]string) map[string]string {
	var pairs []string
	for _, name := range slices.SortedFunc(maps.Keys(names), func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) }) {
		pairs = append(pairs, name, names[name]) // longest first, because a digest begins with its short form
	}
	replacer := strings.NewReplacer(pairs...)
	renamed := map[string]string{}
	for object, text := range state {
		name := replacer.Replace(object)
		if name != object && strings.HasPrefix(object, "ConfigMap ") {
			text = withoutContent(text)
		}
		renamed[name] = replacer.Replace(text)
	}
	return renamed
}

// withoutContent removes the data and the report annotation from the JSON text of an object. It returns other texts
// unchanged.
func withoutContent(text string) string {
	var object map[string]any
	if json.Unmarshal([]byte(text), &object) != nil {
		return text
	}
	object = without(object, "data")
	object["annotations"] = without(object["annotations"], reportAnnotation)
	shorter, err := json.MarshalIndent(object, "", " ")
	if err != nil {
		return text
	}
	return string(shorter)
}
