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

// Dump is what a namespace holds of some kinds, by kind and name, without all that differs between any two runs: what the
// cluster gives (versions, times, addresses), what a foreign writer left (see Touch), the figures of a failure, the time that a live
// profile begins at, and the name of the namespace. Where an object names the identity of another, the dump names the other. Of a
// status it has the conditions' reasons, where the kind is one of the operator's own.
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

// ownGroup is the API group whose conditions are part of an end state.
const ownGroup = "semmoe.io"

// essence is what two runs must agree on of an object.
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
	case "Job": // its controller puts its identity into selector and labels
		trimmed := without(spec, "selector")
		if template, ok := spec["template"].(map[string]any); ok {
			trimmed["template"] = without(template, "metadata")
		}
		kept["spec"] = trimmed
	case "AffinityProfile": // a live profile is of what was sampled since a time
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

// without is a copy of a map that lacks some keys; an empty one where it is none.
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

// failurePrefix begins the annotations of a plan that tell why it has failed: a reason, and after a colon the figures.
const failurePrefix = "failed.semmoe.io/"

// reportAnnotation is what a plan's ConfigMap tells of the figures of its plan.
const reportAnnotation = "semmoe.io/report"

// provenAnnotation is what a workload tells of the time since which it has served alone.
const provenAnnotation = "semmoe.io/proven"

// releaseAnnotation is what a workload's engine reports of its release. The time of the first pod that answers decides when it is written.
const releaseAnnotation = "semmoe.io/engine-release"

// reasons leaves out the figures of annotations that report failures, times, and what is written at a time of chance.
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

// owners are the kinds and names of the owners.
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

// followsTraffic is the condition that depends on which requests were sampled: it is no part of an end state.
const followsTraffic = "LocalityOnTarget"

// conditions are status and reason of each condition, by type.
func conditions(object map[string]any) map[string]string {
	status, _ := object["status"].(map[string]any)
	list, _ := status["conditions"].([]any)
	told := map[string]string{}
	for _, item := range list {
		if c, ok := item.(map[string]any); ok && c["type"] != followsTraffic {
			told[fmt.Sprint(c["type"])] = fmt.Sprintf("%v %v", c["status"], c["reason"])
		}
	}
	return told
}

// Rename tells an end state, or a record of a Journal, by what is meant where two runs cannot agree on names: names holds, by each
// name, what to say instead. What a ConfigMap of such a name holds, and reports of that, is left out: its name follows from it.
func Rename(state, names map[string]string) map[string]string {
	var pairs []string
	for _, name := range slices.SortedFunc(maps.Keys(names), func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) }) {
		pairs = append(pairs, name, names[name]) // the longest first: a digest begins with its short form
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

// withoutContent is the text of an object without its data and the report on them; what is no object stays as it is.
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
