// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"regexp"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/sets"
)

// quoting contains the conditions whose messages may also contain the reason why no other plan is made or used.
var quoting = sets.New("LocalityOnTarget", "Planned", "RolledOut")

// quoted matches a reason in a message, as in "DailyReplanLimit: two plans were made" and in "no plan is made for it
// now (DailyReplanLimit): two plans".
var quoted = regexp.MustCompile(`(?:^|\. |\()([A-Z][A-Za-z]+)\)?: `)

// Reasons returns the reasons of the conditions of an object, and the reasons that their messages quote.
func Reasons(object *unstructured.Unstructured) sets.Set[string] {
	found := sets.New[string]()
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	for _, item := range conditions {
		condition, _ := item.(map[string]any)
		text := func(field string) string { value, _ := condition[field].(string); return value }
		found.Insert(text("reason"))
		if !quoting.Has(text("type")) {
			continue
		}
		for _, match := range quoted.FindAllStringSubmatch(text("message"), -1) {
			found.Insert(match[1])
		}
	}
	return found
}
