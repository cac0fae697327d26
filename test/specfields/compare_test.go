// SPDX-License-Identifier: Apache-2.0

package specfields

import (
	"regexp"
	"strings"

	"github.com/google/go-cmp/cmp"
)

// planConfigMap matches the name of the ConfigMap of a plan: the name of the plan, and the digest of the content.
var planConfigMap = regexp.MustCompile(`\b(m-[0-9a-f]{8})-([0-9a-f]{16})\b`)

// otherEnd returns the difference between the state after a walk and the state of the same spec without the walk; empty
// if there is none.
//
// Two differences are intended. First, a model is not profiled again for another engine, so that profiles may be older
// and may have no Jobs. Second, if a plan of other inputs has the same layout, pods keep the ConfigMap that they mount,
// and the plan and the profile of this ConfigMap stay as long as the pods.
func otherEnd(without, with map[string]string) string {
	kept := map[string]bool{} // plans that pods mount, with the layout that pods would mount without the walk
	for name, text := range with {
		if !strings.HasPrefix(name, "StatefulSet ") {
			continue
		}
		for _, mounted := range planConfigMap.FindAllStringSubmatch(text, -1) {
			if anyContains(without, "StatefulSet ", mounted[2]) {
				kept[mounted[1]] = true
				kept[profileOf(with["PlacementPlan "+mounted[1]])] = true
			}
		}
	}
	wanted, got := map[string]string{}, map[string]string{}
	for name, text := range without {
		if !ofProfile.MatchString(name) {
			wanted[name] = comparable(name, text)
		}
	}
	for name, text := range with {
		_, object, _ := strings.Cut(name, " ")
		_, expected := without[name]
		if left := kept[object] || kept[prefixOf(object)]; !ofProfile.MatchString(name) && (expected || !left) {
			got[name] = comparable(name, text)
		}
	}
	return cmp.Diff(wanted, got)
}

// prefixOf returns the common name prefix of the objects of a plan or a profile.
func prefixOf(name string) string {
	parts := strings.SplitN(name, "-", 3)
	return strings.Join(parts[:min(len(parts), 2)], "-")
}

var profileRef = regexp.MustCompile(`"profileRef": \{\s*"name": "([^"]+)"`)

// profileOf returns the name of the profile of a plan.
func profileOf(plan string) string {
	if found := profileRef.FindStringSubmatch(plan); found != nil {
		return found[1]
	}
	return "none"
}

func anyContains(texts map[string]string, prefix, part string) bool {
	for name, text := range texts {
		if strings.HasPrefix(name, prefix) && strings.Contains(text, part) {
			return true
		}
	}
	return false
}

// ofProfile matches the Jobs of a profile.
var ofProfile = regexp.MustCompile(`^Job (profile-|m-[0-9a-f]{8}-inspect-)`)

// comparable removes the intended differences from the text of an object.
func comparable(name, text string) string {
	switch kind, _, _ := strings.Cut(name, " "); kind {
	case "AffinityProfile":
		return ""
	case "StatefulSet":
		return planConfigMap.ReplaceAllString(text, "PLAN-$2")
	}
	return text
}
