// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/engine"
)

// Dialect reproduces the HTTP API of a release of an engine, including its validation and the fields that it ignores.
// It covers the parts that the operator, the request router and their tests use. An empty Name is the API of the
// reference engine, which is SGLang's API with less validation.
type Dialect struct {
	// Name is the name and the release of the engine, for example vllm-0.32.0.
	Name    string
	Release engine.Release

	// health lists the patterns of health routes. routes contains the handlers of the other routes, by pattern.
	health []string
	routes map[string]handler
	// routing reads the requested rank, and whether the request asks for routed experts.
	routing func(e *Engine, r *http.Request, p *parameters) error
	// failure returns the body of an error on a route. missing returns the error for an unknown route or method.
	failure func(route string, e *apiError) any
	missing func(r *http.Request, status int) *apiError
	// tooLong returns the error for a prompt and a requested answer that together exceed the context length, all in
	// tokens. Clients recognize the words.
	tooLong func(length, prompt, answer int) *apiError
	// guards reports whether requests for a path need the API key, if there is one. It is nil for engines without keys.
	guards func(path string) bool
	// form, if not nil, edits a response or a part of a stream. It is not called for SGLang's native route.
	form func(d Dialect, answer map[string]any, p part)
	// members, if not nil, edits the other responses and events: those of tokenize, Messages and Responses. g is nil if
	// nothing is generated.
	members func(d Dialect, members object, g *generation)
	// meta, if not nil, edits the meta_info of SGLang's native route.
	meta func(m object, g *generation, end *outcome)
	// card, if not nil, edits the entry of /v1/models.
	card func(e *Engine, card map[string]any)
	// anyModel disables the comparison of the model name in requests with the served model.
	anyModel bool
	// refusesInStream, if not nil, reports whether a route reports an invalid rank of a streaming request as an event.
	// refuseMessage sends it on the Messages API.
	refusesInStream func(route string) bool
	refuseMessage   func(stream *eventStream, head message, refused *apiError)
	// endsCompleted ends the stream of a response with status completed, also if the response is incomplete.
	endsCompleted bool
	// alwaysCompleted reports incomplete responses as completed.
	alwaysCompleted bool
	// incompleteItems reports the item of an incomplete response as incomplete.
	incompleteItems bool
	// failsOnRank lists the routes that respond with status 500 to an invalid rank.
	failsOnRank []string
	// strictCompletions rejects completions without a prompt, and of 0 tokens, as malformed.
	strictCompletions bool
	// responsesHeadroom is the number of tokens that the Responses API subtracts from the requested length.
	responsesHeadroom int
	// crashesOnUnknownTokens ends the engine at a prompt with a token id outside of the vocabulary.
	crashesOnUnknownTokens bool
	// sglangNative validates requests of the native route like SGLang: an unknown sampling parameter is an internal error,
	// and token ids take precedence over a text.
	sglangNative bool
	// refusesNoTokens rejects requests for 0 tokens without an echo of the prompt.
	refusesNoTokens bool
	// chosenOnTop adds the selected token to the most likely tokens.
	chosenOnTop bool
	metrics     metricNames
}

// part is the content of a response, or of a part of a stream. end is nil before the last part.
type part struct {
	g   *generation
	end *outcome
	// whole is true for a response that is not streamed. first and last are true for the first and the last part of a
	// stream.
	whole, first, last bool
}

// engines contains the dialects by engine name, with the supported releases.
var engines = []struct {
	name     string
	releases []engine.Release
	dialect  func(engine.Release) Dialect
}{
	{"sglang", []engine.Release{{Minor: 5, Patch: 12}, {Minor: 5, Patch: 17}, {Minor: 5, Patch: 23}}, sglangDialect},
	{"vllm", []engine.Release{{Minor: 22}, {Minor: 25, Patch: 1}, {Minor: 32}, {Minor: 33}}, vllmDialect},
	{"vllm-ascend", []engine.Release{{Minor: 25, Patch: 1}, {Minor: 30}}, vllmDialect},
	{"tensorrt-llm", []engine.Release{{Major: 1, Minor: 2}, {Major: 1, Minor: 3}}, trtllmDialect},
}

// Dialects returns the names of all dialects.
func Dialects() []string {
	var names []string
	for _, e := range engines {
		for _, release := range e.releases {
			names = append(names, e.name+"-"+release.String())
		}
	}
	return names
}

// HasKeys reports whether the engine supports an API key.
func (d Dialect) HasKeys() bool { return d.guards != nil }

// FindDialect returns a dialect by its name. The empty name selects the API of the reference engine.
func FindDialect(name string) (Dialect, error) {
	if name == "" {
		return ownDialect(), nil
	}
	at := strings.LastIndex(name, "-")
	for _, e := range engines {
		release := engine.ParseRelease(name[at+1:])
		if at > 0 && e.name == name[:at] && slices.Contains(e.releases, release) {
			d := e.dialect(release)
			d.Name, d.Release = name, release
			return d, nil
		}
	}
	return Dialect{}, fmt.Errorf("%q is invalid: allowed are %s", name, strings.Join(Dialects(), ", "))
}

// from reports whether the release of the dialect is at least the given release.
func (d Dialect) from(minor, patch int) bool {
	return d.Release.AtLeast(engine.Release{Major: d.Release.Major, Minor: minor, Patch: patch})
}

// noRoute returns the error for an unknown route or method.
func (d Dialect) noRoute(mux *http.ServeMux, r *http.Request) *apiError {
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		other := r.Clone(r.Context())
		other.Method = method
		if _, pattern := mux.Handler(other); pattern != "/" {
			return d.missing(r, http.StatusMethodNotAllowed)
		}
	}
	return d.missing(r, http.StatusNotFound)
}

// shape converts a response, or a part of a stream, to the form of the dialect.
func (d Dialect) shape(answer openAIResponse, p part) any {
	if d.form == nil {
		return answer
	}
	members := asObject(answer)
	d.form(d, members, p)
	return members
}

// edit adds the members of the dialect to another response or event.
func (d Dialect) edit(members object, g *generation) {
	if d.members != nil {
		d.members(d, members, g)
	}
}

// lastEvent returns the name of the last event of a response with a status.
func (d Dialect) lastEvent(status string) string {
	if d.endsCompleted {
		return "completed"
	}
	return status
}

// asObject returns the members of a struct.
func asObject(value any) object {
	var members object
	text, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(text, &members)
	}
	if err != nil {
		panic(err) // responses only contain strings and numbers
	}
	return members
}

// integer parses a rank like Python's int, except for non-ASCII digits and underscores.
func integer(text string) (int, error) {
	return strconv.Atoi(strings.Trim(text, " \t\n\r\v\f"))
}

// ownDialect returns the API of the reference engine.
func ownDialect() Dialect {
	return Dialect{
		health: []string{"GET /health"},
		routes: map[string]handler{
			"GET /v1/models":            (*Engine).models,
			"POST /v1/completions":      (*Engine).completions,
			"POST /v1/chat/completions": (*Engine).chatCompletions,
			"POST /generate":            (*Engine).generate,

			"POST " + messagesPath:                   (*Engine).messages,
			"POST " + messagesPath + "/count_tokens": (*Engine).countTokens,
			"POST " + responsesPath:                  (*Engine).responses,
			"GET " + responsesPath + "/{id}":         (*Engine).storedResponse,
			"POST " + responsesPath + "/{id}/cancel": (*Engine).storedResponse,

			"POST /v1/tokenize": (*Engine).tokenize,
			"POST /tokenize":    (*Engine).tokenize,
			"GET /v1/loads":     (*Engine).loads,
			"GET /metrics":      (*Engine).metricsPage,
		},
		routing: sglangRouting("/generate", responsesPath), tooLong: sglangTooLong, guards: sglangGuards,
		failure: func(route string, e *apiError) any {
			if strings.HasPrefix(route, messagesPath) {
				return anthropicError(e)
			}
			return map[string]any{"error": e}
		},
		missing: func(r *http.Request, status int) *apiError {
			e := badRequest("", "no route %s %s", r.Method, r.URL.Path)
			e.status = http.StatusNotFound
			return e
		},
		metrics: sglangMetrics,
	}
}
