package engine

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Release is the number of an engine's release, without what marks candidates and repairs: 0.5.12 is also 0.5.12rc1 and 0.5.12.post1. The
// zero value is a release that is not known.
type Release struct{ Major, Minor, Patch int }

// releaseText matches the release at the beginning of a version or of an image's tag: 0.5.17, v0.22.0-cu130, 0.25.1rc1+empty.
var releaseText = regexp.MustCompile(`^v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:[-._+]|rc|a|b|dev|post|$)`)

// ParseRelease reads a version as engines report it, or the tag of an image. It returns the zero value for any other text.
func ParseRelease(text string) Release {
	match := releaseText.FindStringSubmatch(text)
	if match == nil {
		return Release{}
	}
	var numbers [3]int
	for i := range numbers {
		numbers[i], _ = strconv.Atoi(match[i+1]) // at most four digits
	}
	return Release{numbers[0], numbers[1], numbers[2]}
}

// Known reports whether the release is known.
func (r Release) Known() bool { return r != Release{} }

// Compare returns -1, 0 or 1, as cmp.Compare does.
func (r Release) Compare(other Release) int {
	return cmp.Or(cmp.Compare(r.Major, other.Major), cmp.Compare(r.Minor, other.Minor), cmp.Compare(r.Patch, other.Patch))
}

// Before reports whether the release is known, and older than another.
func (r Release) Before(other Release) bool { return r.Known() && r.Compare(other) < 0 }

// From reports whether the release is known, and another or newer.
func (r Release) From(other Release) bool { return r.Known() && r.Compare(other) >= 0 }

// String returns the number, such as 0.5.17; empty for a release that is not known.
func (r Release) String() string {
	if !r.Known() {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", r.Major, r.Minor, r.Patch)
}

// ImageRelease returns the release that the tag of an image names. It returns the zero value for an image whose repository does not end in
// one of the adapter's Images, such as a user's own, and for a tag that names no release.
func (a Adapter) ImageRelease(image string) Release {
	image, _, _ = strings.Cut(image, "@")
	at := strings.LastIndex(image, "/")
	name, tag, _ := strings.Cut(image[at+1:], ":") // a colon before is that of a registry's port
	repository := image[:at+1] + name
	if !slices.ContainsFunc(a.Images, func(known string) bool { return repository == known || strings.HasSuffix(repository, "/"+known) }) {
		return Release{}
	}
	return ParseRelease(tag)
}

// ReadRelease reads the answer of the adapter's ReleasePath. It returns the zero value where the answer names no release.
func ReadRelease(answer []byte) Release {
	var report struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(answer, &report) != nil {
		return Release{}
	}
	return ParseRelease(report.Version)
}

// ReasonReleaseTooOld is that the engine's release lacks what the spec needs.
const ReasonReleaseTooOld = "EngineReleaseTooOld"

// checkNewest warns of a release that is newer than the newest one whose source was read.
func (a Adapter) checkNewest(s Situation, verdict *Support) {
	if a.Newest.Before(s.Release) {
		verdict.Warn("UnknownRelease", "%s %s is newer than %s, the newest release whose source was read: what is known of that one is assumed to hold", a.Type, s.Release, a.Newest)
	}
}

// Starts returns why an engine would not start as the situation asks for, or would not do what is asked for, whether it serves under a plan
// or not. What depends on a release is refused only where the release is known.
func (a Adapter) Starts(s Situation) Support {
	var verdict Support
	if a.CheckStart != nil {
		a.CheckStart(s, &verdict)
	}
	return verdict
}

// NeedsRelease refuses a release that is known and older than the first one that has what a spec needs. field is the field that asks for it,
// advice what to do other than to use a newer release.
func (s *Support) NeedsRelease(situation Situation, engineType, field string, first Release, what, advice string) {
	if situation.Release.Before(first) {
		s.Refuse(ReasonReleaseTooOld, "spec.engine.image: %s %s is invalid with %s: %s needs %s or newer; use a newer image, or %s",
			engineType, situation.Release, field, what, first, advice)
	}
}
