// SPDX-License-Identifier: Apache-2.0

package router

import (
	"time"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/telemetry"
	"github.com/semmoe/operator/internal/router/waitqueue"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/dispatch"
)

// request contains the properties of a client request that the choice of a rank needs. It belongs to one goroutine.
type request struct {
	id string
	// path is the route of the request.
	path string
	// route is the path of an inference request; empty for others.
	route string
	// planRandom is the random number that selects the plan. It stays the same when the request is sent again.
	planRandom uint64
	// output is the expected number of generated tokens. tokens is the total load, estimated from the length of the
	// request.
	output, tokens int64
	// answers is the number of answers to the request. copies is the number of answers that contain the prompt.
	answers, copies int64
	// answerTokens is the expected maximum number of tokens of one answer.
	answerTokens int64
	// sampled is true if the routed experts are requested, provided that the pod is sampled.
	sampled bool
	// shifted is true if the client excludes the first tokens from the reported experts. Such a request is not in the
	// population of the sample.
	shifted bool
	// inference is true if the tokens of the request activate experts. reportsExperts is true if the response can
	// contain them.
	inference, reportsExperts bool
	// addsTokenIDs is true if the router may request the ids of the tokens: the client requests a complete response of a
	// route that can return them, and does not request them itself.
	addsTokenIDs bool
	// lacking contains the engine types that lack the route of the request.
	lacking map[string]bool
	// pins reports whether the request can be pinned to a rank of a backend with ranks that share an endpoint; nil
	// means always.
	pins func(discovery.Backend) bool
	// body is the body of the client without rank members, for the writer. Only the members in writtenFields can be
	// found. It is released once a response has begun.
	body wire.Body
	// writable reports whether a member can be added to the body.
	writable bool
	// asksExperts is true if the client requests the routed experts.
	asksExperts bool
	// eligible limits the endpoints to choose from; nil allows all.
	eligible func(endpoint string) bool
	// prompt is empty if its tokens cannot be determined.
	prompt wire.Prompt
	// tokenize gets the tokens of texts from an engine that serves under a plan, if the router cannot tokenize them;
	// nil if no engine is asked.
	tokenize func(plan string, texts []string) wire.Prompt
	// forecast is the latest forecast. It is reused when the request is sent again to pods of the same plan.
	forecast forecast
	// prefixes are the prefix hashes of the text (dispatch.TextPrefixHashes) or of the ids (dispatch.PrefixHashes), once
	// hashed is true.
	prefixes []uint64
	hashed   bool
	// observed are the leading tokens of the prompt that ranks have cached, by their KV events, at observedAt. It is nil
	// until it is looked up, and if the tokens that the engine computes are not known.
	observed   map[kvevents.Place]int
	observedAt time.Time
	// exact is true if the engine computes exactly the tokens of the prompt, after a token for the beginning of a text if
	// it adds one. leading tokenizes them.
	exact   bool
	model   string
	leading leadingTokens
	// scheduler has chosen the place, at rank. The request counts in that scheduler once, however often it is sent.
	scheduler *dispatch.Scheduler
	rank      int
	// mayWait is true if the request may queue for a rank. queued is its entry in the queue.
	mayWait bool
	queued  *waitqueue.Entry[waiting]
	// waiter is the entry of a request that waits for a place; nil if it does not wait. priority and client order the
	// requests that wait.
	waiter   *waitqueue.Waiter[filter]
	priority int
	client   string
	// refused is the reason why the last attempt to reserve a place failed; nil if no place exists.
	refused error
	// record describes the request for spans and the access log; nil if it is not recorded.
	record *telemetry.Record
	// failedBy lists the revisions with pods that have failed to serve the request.
	failedBy []string
}

// promptEstimate returns the length of the prompt in tokens, estimated from its bytes. It does not depend on the
// tokenizer of a plan, because revisions are compared by it.
func (r *request) promptEstimate() int64 { return max(0, r.tokens-r.output-1) }

// recordBody records what the client requests.
func (r *request) recordBody(record *telemetry.Record, body wire.Body) {
	if r.record = record; record != nil {
		record.Model, record.Stream, record.PromptTokens = body.Text("model", maxModelBytes), body.True("stream"), r.promptEstimate()
	}
}

// maxModelBytes bounds the recorded name of a model, which a client can choose.
const maxModelBytes = 256

// recordPlace records where the request is served.
func (r *request) recordPlace(lease *Lease, header time.Duration) {
	record := r.record
	if record == nil {
		return
	}
	record.Pod, record.Engine, record.Rank, record.Header = lease.Backend.Pod, lease.Backend.Engine, lease.knownRank(), header
	if lease.scored {
		record.Plan = artifact.Digest(lease.layout.Tables).Short()
		predicted := share(float64(r.forecast.scores[lease.Rank]))
		record.Predicted = &predicted
	}
}

// answered releases the body, and the prompt, once a response has begun. The prompt is needed only to count experts.
func (r *request) answered(done capture) {
	r.body = wire.Body{}
	if !done.sampled {
		r.prompt = wire.Prompt{}
	}
}
