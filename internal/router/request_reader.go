// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/tokenize"
	"github.com/semmoe/operator/internal/router/wire"
)

// requestReader is the first stage: it reads the properties of a client request that the later stages need.
type requestReader struct {
	engine        *engine.Adapter // of pods that do not name their engine
	tokenizer     *tokenize.Remote
	stored        *storedResponses
	samplePercent int
	// readsPrompts reports whether a later stage reads prompts.
	readsPrompts func() bool
}

// requestFields and startFields are the body fields of all supported engines. Every field is checked on every request:
// pods of several engines may serve together, and a client does not know which engine answers.
var (
	requestFields = registry.Names(func(a engine.Adapter) string { return a.RoutedExperts.RequestField })
	startFields   = registry.Names(func(a engine.Adapter) string { return a.RoutedExperts.StartField })
	idsFields     = registry.Names(func(a engine.Adapter) string { return a.RoutedExperts.TokenIDs.RequestField })
)

// writtenFields are the body fields that later stages look for before they add them.
var writtenFields = requestFields

// withoutTokenIDs are members of requests for which engines refuse to return the ids of tokens, or answer otherwise with
// them: SGLang streams no ids, and vLLM with echo does not decode an empty answer (0.32: needs_detokenization in
// entrypoints/openai/completion/protocol.py).
var withoutTokenIDs = []string{"stream", "echo"}

// HeaderRequestID identifies a request; the router gives one to a request that has none.
const HeaderRequestID = "X-Request-Id"

var (
	errRankChosen = errors.New("the request body is invalid: it must be JSON, and must not choose a data-parallel rank")
	// errTokenOutside is returned for a prompt that would end the engine.
	errTokenOutside = errors.New("the prompt is invalid")
	errCompressed   = errors.New("the request body is invalid: it must not be compressed")
)

// checkRank rejects bodies that could choose a rank in a form that wire.Body.DropRank does not recognize. An engine may
// parse bodies that the router cannot.
func checkRank(header http.Header, body wire.Body) error {
	switch {
	case len(body.Bytes()) > 0 && wire.Compressed(header):
		return errCompressed
	case !body.IsJSON() && wire.MayChooseRank(body.Bytes()):
		return errRankChosen
	}
	return nil
}

// checkTokens rejects a prompt with a token id that the vocabulary lacks, if it would end the engine of a backend with a
// known vocabulary. Sent to another pod, it would end that one, too.
func (s *requestReader) checkTokens(b discovery.Backend, body wire.Body) error {
	if b.Shape == nil || b.Shape.Vocabulary == 0 || !b.Adapter(s.engine).CrashesOnUnknownTokens {
		return nil
	}
	if id, found := body.TokenOutside(b.Shape.Vocabulary); found {
		return fmt.Errorf("%w: token id %s is not in the vocabulary of the model; 0 to %d is allowed", errTokenOutside, id, b.Shape.Vocabulary-1)
	}
	return nil
}

// read reads a client request whose body has passed checkRank and chooses no rank. The context is the context of the
// request. The header has the credentials of the client.
func (s *requestReader) read(ctx context.Context, api engine.API, id string, header http.Header, body wire.Body) *request {
	r, path := newRequest(api, id, body, s.samplePercent > 0 || s.readsPrompts()), api.Path
	r.body = body.Only(writtenFields)
	r.tokenize = s.tokenizer.For(ctx)
	r.lacking = lacking[path]
	r.shifted = r.reportsExperts && body.RequestsAny(startFields)
	r.sampled = r.reportsExperts && !r.shifted && sampled(rand.Uint64(), s.samplePercent)
	r.asksExperts = r.reportsExperts && body.RequestsAny(requestFields) || api.AlwaysReports
	r.writable = body.IsObject()
	r.addsTokenIDs = api.ReturnsTokenIDs && r.writable && !slices.ContainsFunc(idsFields, body.Has) && !body.RequestsAny(withoutTokenIDs)
	if stored := neededID(path, body); stored != "" {
		if endpoint, found := s.stored.server(ctx, stored, header); found {
			r.eligible = func(other string) bool { return other == endpoint }
		}
	}
	neverPinned := api.Computes && api.Smallest == ""
	r.pins = func(b discovery.Backend) bool {
		routes := b.Adapter(s.engine).RankRoutes
		return !neverPinned && !slices.Contains(routes.Unpinned, path) && (r.writable || routes.FieldOn(path) == "")
	}
	return r
}

// sampled reports whether a request with this random number is in the sample. The router draws the number, so neither
// load nor rank nor client biases the sample.
func sampled(random uint64, percent int) bool { return random%100 < uint64(percent) }

// newRequest returns a request with a body of any content. It has a prompt if readsPrompt is true.
func newRequest(api engine.API, id string, b wire.Body, readsPrompt bool) *request {
	path := api.Path
	r := &request{id: id, path: path, planRandom: rand.Uint64(), tokens: 1}
	if r.inference = api.Computes; !r.inference {
		return r
	}
	r.reportsExperts = api.ReportsExperts
	r.route = path
	r.answers, r.copies = b.Answers(path)
	if api.Limit != "" {
		r.output = b.Output(r.answers)
	}
	r.answerTokens = b.ExpectedAnswerTokens()
	if readsPrompt {
		r.prompt = wire.PromptOf(path, b)
	} else {
		r.prompt.Media = wire.MediaOf(path, b)
	}
	if r.exact = isExact(path, b, &r.prompt); r.exact {
		r.model = b.Text("model", maxModelBytes)
	}
	media := r.prompt.Media
	r.tokens = int64((len(b.Bytes())-media.Bytes)/wire.BytesPerToken) + media.Tokens() + r.output + 1
	return r
}
