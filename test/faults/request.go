// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"net/http"
	"slices"
	"strings"
)

// purpose classifies a request.
type purpose int

const (
	// exempt is for requests that affect no decision: events, leases, reviews, discovery. Only InterruptWatches and a
	// crash fail them.
	exempt  purpose = iota
	reading         // get of one object
	listing
	watching
	writing
)

// purposeOf derives the purpose from the method and the path: /api/v1 or /apis/GROUP/VERSION, [namespaces/NAME],
// RESOURCE, [NAME, [SUBRESOURCE]].
func purposeOf(r *http.Request) purpose {
	segments := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case len(segments) > 2 && segments[0] == "api":
		segments = segments[2:]
	case len(segments) > 3 && segments[0] == "apis":
		segments = segments[3:]
	default:
		return exempt
	}
	if len(segments) > 2 && segments[0] == "namespaces" {
		segments = segments[2:]
	}
	if slices.Contains([]string{"events", "leases", "tokenreviews", "subjectaccessreviews"}, segments[0]) {
		return exempt
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
