// SPDX-License-Identifier: Apache-2.0

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

// Release is the number of an engine's release, without suffixes for candidates and post-releases: 0.5.12 also
// represents 0.5.12rc1 and 0.5.12.post1. The zero value is an unknown release.
type Release struct{ Major, Minor, Patch int }

// releaseText matches the release at the beginning of a version or of an image tag: 0.5.17, v0.22.0-cu130,
// 0.25.1rc1+empty.
var releaseText = regexp.MustCompile(`^v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:[-._+]|rc|a|b|dev|post|$)`)

// ParseRelease parses a version as reported by an engine, or an image tag. It returns the zero value for any other
// text.
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

// Compare returns -1, 0 or 1, like cmp.Compare.
func (r Release) Compare(other Release) int {
	return cmp.Or(cmp.Compare(r.Major, other.Major), cmp.Compare(r.Minor, other.Minor), cmp.Compare(r.Patch, other.Patch))
}

// Before reports whether the release is known and older than other.
func (r Release) Before(other Release) bool { return r.Known() && r.Compare(other) < 0 }

// AtLeast reports whether the release is known and other or newer.
func (r Release) AtLeast(other Release) bool { return r.Known() && r.Compare(other) >= 0 }

// String returns the number, such as 0.5.17, or an empty string for an unknown release.
func (r Release) String() string {
	if !r.Known() {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", r.Major, r.Minor, r.Patch)
}

// ImageRelease returns the release in the tag of an image. It returns the zero value if the repository of the image
// does not end in one of the adapter's Images, such as for a user-built image, or if the tag contains no release.
func (a Adapter) ImageRelease(image string) Release {
	image, _, _ = strings.Cut(image, "@")
	at := strings.LastIndex(image, "/")
	name, tag, _ := strings.Cut(image[at+1:], ":") // a colon before the last slash separates a registry's port
	repository := image[:at+1] + name
	if !slices.ContainsFunc(a.Images, func(known string) bool { return repository == known || strings.HasSuffix(repository, "/"+known) }) {
		return Release{}
	}
	return ParseRelease(tag)
}

// ReadRelease parses the response of the adapter's ReleasePath. It returns the zero value if the response contains no
// release.
func ReadRelease(answer []byte) Release {
	var report struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(answer, &report) != nil {
		return Release{}
	}
	return ParseRelease(report.Version)
}

// ReasonReleaseTooOld is the reason for a release that lacks a feature required by the spec.
const ReasonReleaseTooOld = "EngineReleaseTooOld"

// checkNewest adds a warning if the release is newer than the newest checked release.
func (a Adapter) checkNewest(s Situation, verdict *Support) {
	if a.Newest.Before(s.Release) {
		verdict.Warn("UnknownRelease", "%s %s is newer than %s, the newest release whose source was read: it is assumed to behave in the same way", a.Type, s.Release, a.Newest)
	}
}

// StartupSupport returns why an engine would fail at startup in the situation, or not behave as requested, with or without a
// plan. Limitations of a release are refused only if the release is known.
func (a Adapter) StartupSupport(s Situation) Support {
	var verdict Support
	if a.CheckStart != nil {
		a.CheckStart(s, &verdict)
	}
	return verdict
}

// NeedsRelease refuses a known release older than first. field is the field that requires the newer release. advice is
// an alternative to a newer image.
func (s *Support) NeedsRelease(situation Situation, engineType, field string, first Release, what, advice string) {
	if situation.Release.Before(first) {
		s.Refuse(ReasonReleaseTooOld, "spec.engine.image: %s %s is invalid with %s: %s needs %s or newer; use a newer image, or %s",
			engineType, situation.Release, field, what, first, advice)
	}
}
