// SPDX-License-Identifier: Apache-2.0

package client

import (
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"
)

// FuzzRoutes looks up arbitrary paths. A route that is found is in the table, clean, and the end of the path. The path
// equals the route, or has a few segments before it.
func FuzzRoutes(f *testing.F) {
	routes := NewRoutes(map[string][]string{
		http.MethodGet:  {"/v1/models", "/v1/models/{model...}"},
		http.MethodPost: {"/v1/completions", "/generate"},
	})
	for _, target := range []string{
		"/v1/completions", "/a/b/v1/completions", "/generate", "/api/generate", "/v1/models/a%2Fb", "/v1//completions", "/generate/", "/generate//", "/", "/v1/../generate", "/generate#x",
		"//host/generate", "/%2e%2e/generate", "/a/v1/models/x/v1/completions", strings.Repeat("/a", 9) + "/generate",
	} {
		f.Add(http.MethodPost, target)
		f.Add(http.MethodGet, target)
	}
	f.Fuzz(func(t *testing.T, method, escaped string) {
		route, ok := routes.In(method, escaped)
		if target, err := url.ParseRequestURI(escaped); err == nil && !ok && len(escaped) <= maxPathBytes && !strings.Contains(escaped, "#") &&
			target.Host == "" && routes.Has(&http.Request{Method: method, URL: target}) {
			t.Errorf("%s %q is a route and not found", method, escaped)
		}
		if !ok {
			return
		}
		whole, err := url.ParseRequestURI(escaped)
		if err != nil || len(escaped) > maxPathBytes {
			t.Fatalf("%q has the route %q", escaped, route)
		}
		if !strings.HasSuffix(RouteOf(whole.Path), route) || route != path.Clean(route) || !routes.Has(&http.Request{Method: method, URL: &url.URL{Path: route}}) {
			t.Errorf("%q has the route %q", escaped, route)
		}
		if again, ok := routes.In(method, (&url.URL{Path: route}).EscapedPath()); !ok || again != route {
			t.Errorf("the route %q of %q becomes %q", route, escaped, again)
		}
	})
}
