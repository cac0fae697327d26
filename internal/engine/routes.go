// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// PromptForm is the way in which the body of a request contains its prompt.
type PromptForm string

const (
	// NoPrompt means that no prompt is read: the length of the body is the only measure of the request.
	NoPrompt PromptForm = ""
	// Texts means that members contain texts, token ids, lists of either, or chat messages (member messages).
	Texts PromptForm = "texts"
	// Blocks means that the first member contains the instructions, and the second one items of content blocks.
	Blocks PromptForm = "blocks"
)

// API describes the requests to a route. It is the same for all engines that have the route.
type API struct {
	Path string
	// Form is the way in which the members Prompt contain the prompt.
	Form   PromptForm
	Prompt []string
	// Limit is the member that limits the generated tokens, with its outer member if it has one. It is empty if the
	// request generates none.
	Limit string
	// Computes reports whether the tokens of the request activate experts. Other requests, such as tokenization, have no
	// load and no rank.
	Computes bool
	// Streams reports whether responses can be streams. Stateful reports whether the engine may keep the response for
	// later requests, which must reach the same server.
	Streams, Stateful bool
	// Put reports whether an engine also accepts the method PUT.
	Put bool
	// ReportsExperts reports whether responses can contain the routed experts, if a request member asks for them.
	// AlwaysReports reports that they contain them whenever the engine captures them, because clients of the route use
	// them.
	ReportsExperts, AlwaysReports bool
	// ReturnsTokenIDs reports whether complete responses can contain the ids of all tokens (TokenIDs).
	ReturnsTokenIDs bool
	// Smallest is the smallest request, with which the router checks whether an engine reads a rank. A %s in it is
	// replaced by the model name as JSON. It is empty if no engine reads a rank on the route.
	Smallest string
}

// textsAPI returns the API of a route without generated tokens.
func textsAPI(path string, prompt ...string) API {
	return API{Path: path, Form: Texts, Prompt: prompt, Computes: true}
}

// utility returns the API of a route whose requests activate no experts.
func utility(path string) API { return API{Path: path} }

const smallestChat = `{"messages":[{"role":"user","content":"a"}],"max_tokens":1}`

// apis lists the routes for POST requests of clients. Routes of engines for administration, weights, caches, sessions
// and profiles are missing, so that the request router rejects them.
var apis = func() map[string]API {
	byPath := map[string]API{}
	for _, api := range []API{
		{Path: "/v1/completions", Form: Texts, Prompt: []string{"prompt"}, Limit: "max_tokens", Computes: true, Streams: true, ReportsExperts: true, ReturnsTokenIDs: true, Smallest: `{"prompt":"a","max_tokens":1}`},
		{Path: "/v1/chat/completions", Form: Texts, Prompt: []string{"messages"}, Limit: "max_completion_tokens", Computes: true, Streams: true, ReportsExperts: true, ReturnsTokenIDs: true, Smallest: smallestChat},
		{Path: "/v1/chat/completions/batch", Form: Texts, Prompt: []string{"messages"}, Limit: "max_completion_tokens", Computes: true, Smallest: `{"messages":[[{"role":"user","content":"a"}]],"max_tokens":1}`},
		{Path: "/v1/messages", Form: Blocks, Prompt: []string{"system", "messages"}, Limit: "max_tokens", Computes: true, Streams: true, Smallest: `{"model":%s,"messages":[{"role":"user","content":"a"}],"max_tokens":1}`},
		{Path: "/v1/responses", Form: Blocks, Prompt: []string{"instructions", "input"}, Limit: "max_output_tokens", Computes: true, Streams: true, Stateful: true, Smallest: `{"model":%s,"input":"a","max_output_tokens":3,"store":false}`},
		{Path: "/generate", Form: Texts, Prompt: []string{"text", "input_ids"}, Limit: "sampling_params.max_new_tokens", Computes: true, Streams: true, Put: true, ReportsExperts: true, Smallest: `{"text":"a","sampling_params":{"max_new_tokens":1}}`},
		{Path: "/inference/v1/generate", Form: Texts, Prompt: []string{"token_ids"}, Limit: "sampling_params.max_tokens", Computes: true, Streams: true, AlwaysReports: true, Smallest: `{"token_ids":[1],"sampling_params":{"max_tokens":1}}`},
		{Path: "/invocations", Form: Texts, Prompt: []string{"messages", "prompt"}, Limit: "max_tokens", Computes: true, Streams: true, Smallest: smallestChat},
		{Path: "/vertex_generate", Computes: true, Limit: "parameters.sampling_params.max_new_tokens"},
		{Path: "/api/chat", Form: Texts, Prompt: []string{"messages"}, Limit: "options.num_predict", Computes: true, Streams: true},
		{Path: "/api/generate", Form: Texts, Prompt: []string{"system", "prompt"}, Limit: "options.num_predict", Computes: true, Streams: true},
		{Path: "/cohere/v2/chat", Form: Texts, Prompt: []string{"messages"}, Limit: "max_tokens", Computes: true, Streams: true},

		textsAPI("/v1/embeddings", "messages", "input"), textsAPI("/v2/embed", "texts", "inputs"), textsAPI("/pooling", "messages", "input", "data"),
		{Path: "/encode", Form: Texts, Prompt: []string{"text", "input_ids"}, Computes: true, Put: true},
		{Path: "/classify", Form: Texts, Prompt: []string{"messages", "input", "text", "input_ids"}, Computes: true, Put: true},
		textsAPI("/v1/classify", "input"),
		textsAPI("/score", "queries", "query", "text_1", "documents", "items", "text_2"), textsAPI("/v1/score", "queries", "query", "text_1", "documents", "items", "text_2"),
		textsAPI("/rerank", "query", "documents"), textsAPI("/v2/rerank", "query", "documents"),
		{Path: "/v1/rerank", Form: Texts, Prompt: []string{"query", "documents"}, Computes: true, Put: true},
		textsAPI("/generative_scoring", "query", "items"), textsAPI("/v1/decisions", "input"), textsAPI("/v1/systemone", "input"),
		{Path: "/v1/audio/transcriptions", Computes: true, Limit: "max_completion_tokens", Streams: true},
		{Path: "/v1/audio/translations", Computes: true, Limit: "max_completion_tokens", Streams: true},

		utility("/tokenize"), utility("/v1/tokenize"), utility("/detokenize"), utility("/v1/detokenize"), utility("/v1/messages/count_tokens"),
		utility("/v1/completions/render"), utility("/v1/chat/completions/render"), utility("/v1/messages/render"), utility("/v1/responses/render"), utility("/cohere/v2/chat/render"),
		utility("/v1/completions/derender"), utility("/v1/chat/completions/derender"),
		utility("/api/show"), utility("/parse_function_call"), utility("/separate_reasoning"),
	} {
		byPath[api.Path] = api
	}
	return byPath
}()

// APIs returns the routes for POST requests of clients, ordered by path.
func APIs() []API {
	return slices.SortedFunc(maps.Values(apis), func(a, b API) int { return strings.Compare(a.Path, b.Path) })
}

// APIOf returns the API of a route. Its path is empty for another route.
func APIOf(path string) API { return apis[path] }

// Pin is the way in which an engine reads the rank of a request to a route.
type Pin string

const (
	// ByLoad means that the engine picks the rank, so the request is only balanced by load.
	ByLoad Pin = "balanced by load"
	// ByHeader means that the engine reads Adapter.RankHeader.
	ByHeader Pin = "header"
	// ByMember means that the engine ignores the header, and reads the member RankRoutes.Field of the body.
	ByMember Pin = "member"
)

// Route is a route of an engine.
type Route struct {
	Path string
	Pin  Pin
	// First and Last are the first and the last checked release with the route and this Pin. An empty Last means the
	// adapter's Newest.
	First, Last Release
	// Source and Evidence are those of a Mechanism.
	Source   string
	Evidence Evidence
}

// NewRoutes returns routes with the same releases, source and evidence.
func NewRoutes(pin Pin, first, last Release, source string, evidence Evidence, paths ...string) []Route {
	var all []Route
	for _, path := range paths {
		all = append(all, Route{path, pin, first, last, source, evidence})
	}
	return all
}

// RouteMechanisms returns routes as mechanisms.
func RouteMechanisms(routes []Route) []Mechanism {
	var all []Mechanism
	for _, r := range routes {
		all = append(all, Mechanism{RouteKind, []string{r.Path}, r.First, r.Last, r.Source, r.Evidence})
	}
	return all
}

// NewRankRoutes returns the routes of APIs that are pinned in at least one release by a member with this name, and
// those that are pinned in none or not in all. Routes that the engine lacks are not pinned.
func NewRankRoutes(routes []Route, field, reported string) RankRoutes {
	r := RankRoutes{Field: field, Reported: reported}
	for _, api := range APIs() {
		has := func(pin Pin) bool {
			return slices.ContainsFunc(routes, func(r Route) bool { return r.Path == api.Path && r.Pin == pin })
		}
		if has(ByLoad) && (has(ByHeader) || has(ByMember)) {
			r.Mixed = append(r.Mixed, api.Path)
		}
		switch {
		case has(ByMember):
			r.InField = append(r.InField, api.Path)
		case !has(ByHeader):
			r.Unpinned = append(r.Unpinned, api.Path)
		}
	}
	return r
}

// MaxPassThrough is the maximum number of further routes. maxPassThroughBytes bounds the length of each.
const MaxPassThrough, maxPassThroughBytes = 16, 128

var passThroughPath = regexp.MustCompile(`^(?:/[A-Za-z0-9._~-]+)+$`)

// CheckPassThrough returns an error if a path cannot be a further route of the request router. administrative lists the
// routes that it must neither equal nor be below.
func CheckPassThrough(route string, administrative []string) error {
	if len(route) > maxPassThroughBytes || !passThroughPath.MatchString(route) || path.Clean(route) != route {
		return fmt.Errorf("%.140q is invalid: it must be an absolute path without a trailing slash, of at most %d letters, digits and characters of -._~/", route, maxPassThroughBytes)
	}
	for _, private := range administrative {
		if strings.EqualFold(route, private) || len(route) > len(private) && strings.EqualFold(route[:len(private)], private) && route[len(private)] == '/' {
			return fmt.Errorf("%q is invalid: %s is an administrative route of an engine, which clients must not reach", route, private)
		}
	}
	return nil
}
