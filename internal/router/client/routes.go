package client

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/semmoe/operator/internal/router/wire"
)

// Routes tells which requests are for a service.
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

// Has tells that a request is for one of the routes. A path that a server may understand as another one is for none.
func (t Routes) Has(r *http.Request) bool {
	if r.URL.Path != path.Clean(r.URL.Path) {
		return false
	}
	_, pattern := t.mux.Handler(r)
	return pattern != ""
}

const (
	// longestPath and mostCut, the segments that may stand in front of a route, bound what In does for a path, which a client chooses:
	// it reads each end of the path anew.
	longestPath = 4 << 10
	mostCut     = 8
)

// others are routes of engines that end in one of a service's and take other requests: vLLM's for token ids, and SGLang's for clients of
// Ollama.
var others = map[string]bool{"/inference/v1/generate": true, "/api/generate": true}

// In is the route, unescaped, that an escaped path is, or ends in: a gateway may tell a path before it cuts off what stands in front of
// a service's own. A path that a server may understand as another one ends in none; one with a # may be cut off there.
func (t Routes) In(method, escaped string) (route string, ok bool) {
	if len(escaped) > longestPath || strings.Contains(escaped, "#") {
		return "", false
	}
	whole, err := url.ParseRequestURI(escaped)
	if err != nil || whole.Host != "" || whole.Path != path.Clean(whole.Path) {
		return "", false
	}
	end := escaped
	for range mostCut + 1 {
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

// Only serves the routes, and says of anything else that it is none.
func (t Routes) Only(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !t.Has(r) {
			wire.WriteError(w, r.URL.Path, http.StatusNotFound, wire.NotFound, fmt.Sprintf("%s %s is not a route of this service", r.Method, r.URL.Path))
			return
		}
		handler.ServeHTTP(w, r)
	})
}
