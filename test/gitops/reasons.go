package gitops

import (
	"regexp"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/sets"
)

// quoting are the conditions that tell of a plan also why another one is not made, or not used, in the words of a reason.
var quoting = sets.New("LocalityOnTarget", "Planned", "RolledOut")

// quoted is a reason in a message, as in "DailyReplanLimit: two plans were made" and in "no plan is made for it now (DailyReplanLimit): two plans".
var quoted = regexp.MustCompile(`(?:^|\. |\()([A-Z][A-Za-z]+)\)?: `)

// Reasons are those that the conditions of an object have, and that their messages quote.
func Reasons(object *unstructured.Unstructured) sets.Set[string] {
	told := sets.New[string]()
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	for _, item := range conditions {
		condition, _ := item.(map[string]any)
		text := func(field string) string { value, _ := condition[field].(string); return value }
		told.Insert(text("reason"))
		if !quoting.Has(text("type")) {
			continue
		}
		for _, match := range quoted.FindAllStringSubmatch(text("message"), -1) {
			told.Insert(match[1])
		}
	}
	return told
}
