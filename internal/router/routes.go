// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/wire"
)

// newRoutes returns the proxied routes: those of the engines' tables, and further ones for requests of any of these
// methods. Administrative routes are in neither.
func newRoutes(passThrough []string) client.Routes {
	table := map[string][]string{
		http.MethodGet:    append([]string{"/v1/models", "/v1/models/{model...}", "/v1/responses/{id}", "/v1/responses/{id}/input_items", "/api/tags"}, passThrough...),
		http.MethodPost:   append([]string{"/v1/responses/{id}/cancel"}, passThrough...),
		http.MethodPut:    slices.Clone(passThrough),
		http.MethodDelete: append([]string{"/v1/responses/{id}"}, passThrough...),
	}
	for _, api := range engine.APIs() {
		table[http.MethodPost] = append(table[http.MethodPost], api.Path)
		if api.Put {
			table[http.MethodPut] = append(table[http.MethodPut], api.Path)
		}
	}
	return client.NewRoutes(table)
}

// apiOf returns the API of a request. A further route has an unknown form, and counts as one that generates tokens.
func apiOf(method, path string, passThrough []string) engine.API {
	if method != http.MethodPost && method != http.MethodPut {
		return engine.API{Path: path}
	}
	if api := engine.APIOf(path); api.Path != "" {
		return api
	}
	further := slices.Contains(passThrough, path)
	return engine.API{Path: path, Computes: further, Limit: map[bool]string{true: "max_tokens"}[further]}
}

// pinnedRoutes are the routes on which engines read a rank, in order.
var pinnedRoutes = func() (routes []string) {
	for _, api := range engine.APIs() {
		if api.Smallest != "" {
			routes = append(routes, api.Path)
		}
	}
	return routes
}()

// lacking lists, by route, the engine types that lack the route in all supported releases. A release may lack more
// routes.
var lacking = func() map[string]map[string]bool {
	lists := map[string]map[string]bool{}
	for _, api := range engine.APIs() {
		for _, adapter := range registry.All() {
			if adapter.HasRoute(api.Path) {
				continue
			}
			if lists[api.Path] == nil {
				lists[api.Path] = map[string]bool{}
			}
			lists[api.Path][adapter.Type] = true
		}
	}
	return lists
}()

var (
	// errNoRoute is returned for a request that is not for one of the routes.
	errNoRoute = errors.New("not a route of this service")
	// errLacksRoute is returned if the engines of all pods lack a route.
	errLacksRoute = errors.New("the engine of this service has no such route")
)

func lacksRoute(path string) string { return fmt.Sprintf("%v: POST %s", errLacksRoute, path) }

// maxNotFoundBytes bounds the size of a "not found" response.
const maxNotFoundBytes = 4 << 10

// explainNotFound replaces the response of an engine release that lacks a route. The web framework of the engine
// answers only that something was not found.
func explainNotFound(response *http.Response, path string) {
	if response.StatusCode != http.StatusNotFound || engine.APIOf(path).Path == "" {
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

// hideAddress removes the address of a pod from a redirect, such as the one from a path with a trailing slash. The
// client then repeats the request to the router.
func hideAddress(response *http.Response, scheme, endpoint string) {
	if location, found := strings.CutPrefix(response.Header.Get("Location"), scheme+"://"+endpoint); found && strings.HasPrefix(location, "/") {
		response.Header.Set("Location", location)
	}
}
