package walk

import (
	"regexp"
	"strings"

	"github.com/google/go-cmp/cmp"
)

// planConfigMap is the name of a plan's ConfigMap: the plan's, and the digest of what it holds.
var planConfigMap = regexp.MustCompile(`\b(m-[0-9a-f]{8})-([0-9a-f]{16})\b`)

// otherEnd tells how the end of a way differs from what the same spec leads to without the way; it is empty where it does not.
//
// A way may leave two things, on purpose. What was profiled is not profiled again, with whatever engine that was, and so profiles
// may be older, and without Jobs. And where a plan of other inputs was found to be the same layout, pods go on with the ConfigMap
// that they mount: its plan, and what that is made from, stay as long as they do.
func otherEnd(without, with map[string]string) string {
	kept := map[string]bool{} // plans that pods mount, of the layout that pods would mount without the way
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

// prefixOf is the first part of the names of what belongs to a plan or a profile.
func prefixOf(name string) string {
	parts := strings.SplitN(name, "-", 3)
	return strings.Join(parts[:min(len(parts), 2)], "-")
}

var profileRef = regexp.MustCompile(`"profileRef": \{\s*"name": "([^"]+)"`)

// profileOf is the profile that a plan is made from.
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

// ofProfile are the Jobs of a profile.
var ofProfile = regexp.MustCompile(`^Job (profile-|m-[0-9a-f]{8}-inspect-)`)

// comparable takes from an object what a way may leave in it.
func comparable(name, text string) string {
	switch kind, _, _ := strings.Cut(name, " "); kind {
	case "AffinityProfile":
		return ""
	case "StatefulSet":
		return planConfigMap.ReplaceAllString(text, "PLAN-$2")
	}
	return text
}
