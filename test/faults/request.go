package faults

import (
	"net/http"
	"slices"
	"strings"
)

// purpose is what a request is for.
type purpose int

const (
	// aside is what decides nothing: events, leases, reviews, discovery. It is not hit by faults but death and blindness.
	aside   purpose = iota
	reading         // of one object
	listing
	watching
	writing
)

// purposeOf tells it from the method and the path: /api/v1 or /apis/GROUP/VERSION, [namespaces/NAME], RESOURCE, [NAME, [SUBRESOURCE]].
func purposeOf(r *http.Request) purpose {
	segments := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case len(segments) > 2 && segments[0] == "api":
		segments = segments[2:]
	case len(segments) > 3 && segments[0] == "apis":
		segments = segments[3:]
	default:
		return aside
	}
	if len(segments) > 2 && segments[0] == "namespaces" {
		segments = segments[2:]
	}
	if slices.Contains([]string{"events", "leases", "tokenreviews", "subjectaccessreviews"}, segments[0]) {
		return aside
	}
	switch {
	case r.Method != http.MethodGet:
		return writing
	case r.URL.Query().Get("watch") == "true":
		return watching
	case len(segments) == 1:
		return listing
	}
	return reading
}
