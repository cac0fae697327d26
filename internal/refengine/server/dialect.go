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

// Dialect is the HTTP surface of a release of an engine, as strict and as deaf as that release. It covers what the operator, the request
// router and their tests use. The zero value of Name is the reference engine's own surface, which is SGLang's with fewer rules.
type Dialect struct {
	// Name is the engine's name and its release, such as vllm-0.32.0.
	Name    string
	Release engine.Release

	// health are the patterns of routes that answer whether the engine serves, routes those of the others with their handlers.
	health []string
	routes map[string]handler
	// routing reads the rank that a request asks for, and its wish for routed experts.
	routing func(e *Engine, r *http.Request, p *parameters) error
	// failure returns the body of an error on a route. missing returns the error of a route or a method that the engine does not have.
	failure func(route string, e *apiError) any
	missing func(r *http.Request, status int) *apiError
	// form edits an answer, or a part of a stream; nil leaves it as it is. It is not called for SGLang's native route.
	form func(d Dialect, answer map[string]any, p part)
	// members edits the other answers and events: those of tokenize, Messages and Responses; nil leaves them as they are. g is nil where nothing
	// is generated.
	members func(d Dialect, members object, g *generation)
	// card edits the entry of /v1/models; nil leaves it as it is.
	card func(e *Engine, card map[string]any)
	// anyModel says that the model that requests name is not compared with the served one.
	anyModel bool
	// refusesInStream says that a stream whose rank does not exist begins, and has the error as its only event.
	refusesInStream bool
	// endsCompleted ends the stream of a response as completed, also where it is incomplete.
	endsCompleted bool
	// failsOnRank are routes that answer 500 to a rank that does not exist.
	failsOnRank []string
	// refusesNoTokens refuses an answer of no tokens, unless it has the prompt.
	refusesNoTokens bool
	// chosenOnTop adds the chosen token to the most likely ones.
	chosenOnTop bool
	metrics     metricNames
}

// part is what an answer, or a part of a stream, is about. end is nil before the last part.
type part struct {
	g   *generation
	end *outcome
	// whole says that the answer is not streamed, first and last that it is the first and the last part of a stream.
	whole, first, last bool
}

// engines are the dialects by the engine's name, each with the releases that it was written for.
var engines = []struct {
	name     string
	releases []engine.Release
	dialect  func(engine.Release) Dialect
}{
	{"sglang", []engine.Release{{Minor: 5, Patch: 12}, {Minor: 5, Patch: 17}, {Minor: 5, Patch: 23}}, sglangDialect},
	{"vllm", []engine.Release{{Minor: 22}, {Minor: 25, Patch: 1}, {Minor: 32}}, vllmDialect},
	{"vllm-ascend", []engine.Release{{Minor: 25, Patch: 1}}, vllmDialect},
	{"tensorrt-llm", []engine.Release{{Major: 1, Minor: 2}, {Major: 1, Minor: 3}}, trtllmDialect},
}

// Dialects lists the names that FindDialect knows.
func Dialects() []string {
	var names []string
	for _, e := range engines {
		for _, release := range e.releases {
			names = append(names, e.name+"-"+release.String())
		}
	}
	return names
}

// FindDialect returns a dialect by its name. The empty name is the reference engine's own surface.
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

// from reports whether the release is at least another of the same engine.
func (d Dialect) from(minor, patch int) bool {
	return d.Release.From(engine.Release{Major: d.Release.Major, Minor: minor, Patch: patch})
}

// noRoute returns the error of a request to a route, or with a method, that the engine does not have.
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

// shape returns an answer, or a part of a stream, in the form of the dialect.
func (d Dialect) shape(answer openAIResponse, p part) any {
	if d.form == nil {
		return answer
	}
	members := asObject(answer)
	d.form(d, members, p)
	return members
}

// edit gives another answer, or an event, the members of the dialect.
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
		panic(err) // answers consist of texts and numbers
	}
	return members
}

// integer reads a rank as Python's int does, but for digits of other scripts and underscores.
func integer(text string) (int, error) {
	return strconv.Atoi(strings.Trim(text, " \t\n\r\v\f"))
}

// ownDialect is the reference engine's own surface.
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
		routing: sglangRouting("/generate", responsesPath),
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
