package client

import (
	"fmt"
	"net/http"
	"path"

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
