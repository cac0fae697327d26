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

// In is the route, unescaped, that an escaped path is, or ends in: a gateway may tell a path before it cuts off what stands in front of
// a service's own. A path that a server may understand as another one ends in none.
func (t Routes) In(method, escaped string) (route string, ok bool) {
	whole, err := url.ParseRequestURI(escaped)
	if err != nil || whole.Host != "" || whole.Path != path.Clean(whole.Path) {
		return "", false
	}
	for end := escaped; ; {
		target, err := url.ParseRequestURI(end)
		if err == nil && t.Has(&http.Request{Method: method, URL: target}) {
			return target.Path, true
		}
		_, after, more := strings.Cut(end[1:], "/")
		if !more {
			return "", false
		}
		end = "/" + after
	}
}

// Only serves the routes, and says of anything else that it is none.
func (t Routes) Only(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !t.Has(r) {
			wire.WriteError(w, http.StatusNotFound, wire.NotFound, fmt.Sprintf("%s %s is not a route of this service", r.Method, r.URL.Path))
			return
		}
		handler.ServeHTTP(w, r)
	})
}
