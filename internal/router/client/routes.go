// SPDX-License-Identifier: Apache-2.0

package client

import (
	"net/http"
	"net/url"
	"path"
	"strings"
)

// Routes are the routes of a service.
type Routes struct{ mux *http.ServeMux }

// NewRoutes returns the routes of a table of path patterns by method, and OPTIONS for each of them: browsers ask with
// this method before they send a request to another origin.
func NewRoutes(table map[string][]string) Routes {
	mux, known := http.NewServeMux(), map[string]bool{}
	for method, paths := range table {
		for _, path := range paths {
			for _, pattern := range []string{method + " " + path, http.MethodOptions + " " + path} {
				if !known[pattern] {
					known[pattern] = true
					mux.Handle(pattern, http.NotFoundHandler())
				}
			}
		}
	}
	return Routes{mux}
}

// RouteOf returns the route of a path, which may end in a slash. Engines redirect such a path, or serve it.
func RouteOf(path string) string {
	if len(path) > 1 {
		return strings.TrimSuffix(path, "/")
	}
	return path
}

// Has reports whether a request is for one of the routes, with or without a trailing slash. It is false for a path that a
// server may interpret differently.
func (t Routes) Has(r *http.Request) bool { return t.match(r) != "" }

// match returns the pattern of the route of a request, with its method; empty if there is none.
func (t Routes) match(r *http.Request) string {
	route := RouteOf(r.URL.Path)
	if route != path.Clean(route) {
		return ""
	}
	if route != r.URL.Path {
		r = &http.Request{Method: r.Method, Host: r.Host, URL: &url.URL{Path: route}}
	}
	_, pattern := t.mux.Handler(r)
	return pattern
}

// Pattern returns the path pattern of the route of a request; empty if there is none.
func (t Routes) Pattern(r *http.Request) string {
	_, path, _ := strings.Cut(t.match(r), " ")
	return path
}

const (
	// maxPathBytes and maxPrefixSegments bound the work of In for a path, which a client chooses: In parses each suffix
	// of the path. maxPrefixSegments is the maximum number of segments in front of a route.
	maxPathBytes      = 4 << 10
	maxPrefixSegments = 8
)

// In returns the longest unescaped route that an escaped path equals or ends with: a gateway may report a path before it
// removes its prefix. A path that a server may interpret differently has no route. A path with a # has none either,
// because a server may cut it off there.
func (t Routes) In(method, escaped string) (route string, ok bool) {
	if len(escaped) > maxPathBytes || strings.Contains(escaped, "#") {
		return "", false
	}
	whole, err := url.ParseRequestURI(escaped)
	if err != nil || whole.Host != "" || RouteOf(whole.Path) != path.Clean(whole.Path) {
		return "", false
	}
	end := escaped
	for range maxPrefixSegments + 1 {
		target, err := url.ParseRequestURI(end)
		if err == nil && t.Has(&http.Request{Method: method, URL: target}) {
			return RouteOf(target.Path), true
		}
		_, after, more := strings.Cut(end[1:], "/")
		if !more {
			return "", false
		}
		end = "/" + after
	}
	return "", false
}

// Only serves the routes, and calls other for all other requests.
func (t Routes) Only(handler http.Handler, other http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !t.Has(r) {
			other(w, r)
			return
		}
		handler.ServeHTTP(w, r)
	})
}
