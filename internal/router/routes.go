package router

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/wire"
)

// posts lists the routes for POST requests of clients in addition to the inference routes.
var posts = []string{"/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize", "/v1/messages/count_tokens"}

// routes lists the proxied routes by method. Requests about a stored response are routed so that they can be rejected
// with a reason.
var routes = client.NewRoutes(map[string][]string{
	http.MethodGet:    {"/v1/models", "/v1/models/{model...}", "/v1/responses/{id}", "/v1/responses/{id}/input_items"},
	http.MethodPost:   append(append(slices.Sorted(maps.Keys(inference)), posts...), "/v1/responses/{id}/cancel"),
	http.MethodDelete: {"/v1/responses/{id}"},
})

// inferenceRoute is a route with tokens that activate experts.
type inferenceRoute struct {
	// smallest is the smallest request, which pin checks send. A %s in it is replaced by the model name as JSON. It is
	// empty if no engine reads a rank on the route.
	smallest string
	// reportsExperts is true if responses can contain the routed experts.
	reportsExperts bool
}

var inference = map[string]inferenceRoute{
	"/v1/completions":      {`{"prompt":"a","max_tokens":1}`, true},
	"/v1/chat/completions": {`{"messages":[{"role":"user","content":"a"}],"max_tokens":1}`, true},
	"/generate":            {`{"text":"a","sampling_params":{"max_new_tokens":1}}`, true},
	"/v1/messages":         {`{"model":%s,"messages":[{"role":"user","content":"a"}],"max_tokens":1}`, false},
	wire.ResponsesPath:     {"", false},
}

// pinnedRoutes are the inference routes on which engines read a rank, in order.
var pinnedRoutes = slices.DeleteFunc(slices.Sorted(maps.Keys(inference)), func(route string) bool { return inference[route].smallest == "" })

// lacking lists, by route, the engine types that lack the route in all supported releases. A release may lack more
// routes.
var lacking = func() map[string]map[string]bool {
	lists := map[string]map[string]bool{}
	for _, route := range append(slices.Sorted(maps.Keys(inference)), posts...) {
		for _, adapter := range registry.All() {
			if adapter.HasRoute(route) {
				continue
			}
			if lists[route] == nil {
				lists[route] = map[string]bool{}
			}
			lists[route][adapter.Type] = true
		}
	}
	return lists
}()

var (
	// errLacksRoute is returned if the engines of all pods lack a route.
	errLacksRoute = errors.New("the engine of this service has no such route")
	// errStored is returned for requests about a stored response, and for requests that ask to store one.
	errStored = errors.New("responses are not stored: each would be on one pod only, and the next request may go to another one")
)

func lacksRoute(path string) string { return fmt.Sprintf("%v: POST %s", errLacksRoute, path) }

// maxNotFoundBytes bounds the size of a "not found" response.
const maxNotFoundBytes = 4 << 10

// explainNotFound replaces the response of an engine release that lacks a route. The web framework of the engine
// answers only that something was not found.
func explainNotFound(response *http.Response, path string) {
	if _, infers := inference[path]; response.StatusCode != http.StatusNotFound || !infers && !slices.Contains(posts, path) {
		return
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxNotFoundBytes))
	if err != nil || !wire.IsNotFoundResponse(text) {
		response.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(text), response.Body), response.Body}
		return
	}
	text = wire.ErrorBody(path, http.StatusNotFound, wire.NotFound, lacksRoute(path))
	response.Body = struct {
		io.Reader
		io.Closer
	}{bytes.NewReader(text), response.Body}
	response.ContentLength = int64(len(text))
	response.Header.Set("Content-Length", strconv.Itoa(len(text)))
	response.Header.Set("Content-Type", "application/json")
}
