package client

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/semmoe/operator/internal/router/wire"
)

// Routes are the routes of a service.
type Routes struct{ mux *http.ServeMux }

// NewRoutes returns the routes of a table of path patterns by method.
func NewRoutes(table map[string][]string) Routes {
	mux := http.NewServeMux()
	for method, paths := range table {
		for _, path := range paths {
			mux.Handle(method+" "+path, http.NotFoundHandler())
		}
	}
	return Routes{mux}
}

// Has reports whether a request is for one of the routes. It is false for a path that a server may interpret
// differently.
func (t Routes) Has(r *http.Request) bool {
	if r.URL.Path != path.Clean(r.URL.Path) {
		return false
	}
	_, pattern := t.mux.Handler(r)
	return pattern != ""
}

// Pattern returns the path pattern of the route of a request; empty if there is none.
func (t Routes) Pattern(r *http.Request) string {
	if !t.Has(r) {
		return ""
	}
	_, pattern := t.mux.Handler(r)
	_, path, _ := strings.Cut(pattern, " ")
	return path
}

const (
	// maxPathBytes and maxPrefixSegments bound the work of In for a path, which a client chooses: In parses each suffix
	// of the path. maxPrefixSegments is the maximum number of segments in front of a route.
	maxPathBytes      = 4 << 10
	maxPrefixSegments = 8
)

// others are engine routes that end like a route of the service but take other requests: vLLM's for token ids, and
// SGLang's for Ollama clients.
var others = map[string]bool{"/inference/v1/generate": true, "/api/generate": true}

// In returns the unescaped route that an escaped path equals or ends with: a gateway may report a path before it
// removes its prefix. A path that a server may interpret differently has no route. A path with a # has none either,
// because a server may cut it off there.
func (t Routes) In(method, escaped string) (route string, ok bool) {
	if len(escaped) > maxPathBytes || strings.Contains(escaped, "#") {
		return "", false
	}
	whole, err := url.ParseRequestURI(escaped)
	if err != nil || whole.Host != "" || whole.Path != path.Clean(whole.Path) {
		return "", false
	}
	end := escaped
	for range maxPrefixSegments + 1 {
		target, err := url.ParseRequestURI(end)
		switch {
		case err == nil && t.Has(&http.Request{Method: method, URL: target}):
			return target.Path, true
		case err == nil && others[target.Path]:
			return "", false
		}
		_, after, more := strings.Cut(end[1:], "/")
		if !more {
			return "", false
		}
		end = "/" + after
	}
	return "", false
}

// Only serves the routes and answers all other requests with 404.
func (t Routes) Only(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !t.Has(r) {
			wire.WriteError(w, r.URL.Path, http.StatusNotFound, wire.NotFound, fmt.Sprintf("%s %s is not a route of this service", r.Method, r.URL.Path))
			return
		}
		handler.ServeHTTP(w, r)
	})
}
