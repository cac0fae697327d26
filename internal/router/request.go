package router

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
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
	// lacking contains the engine types that lack the route of the request.
	lacking map[string]bool
	// pins reports whether the request can be pinned to a rank of a backend with ranks that share an endpoint; nil
	// means always.
	pins func(discovery.Backend) bool
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
	// prefixes are the prefix hashes of the text (dispatch.TextPrefixHashes), once hashed is true. They are used for
	// pods if the text cannot be tokenized with their plan.
	prefixes []uint64
	hashed   bool
	// scheduler has chosen the place, at rank. The request counts in that scheduler once, however often it is sent.
	scheduler *dispatch.Scheduler
	rank      int
	// mayWait is true if the request may queue for a rank. queued is its entry in the queue.
	mayWait bool
	queued  *waitqueue.Entry[waiting]
	// refused is the reason why the last attempt to reserve a place failed; nil if no place exists.
	refused error
	// failedBy lists the revisions with pods that have failed to serve the request.
	failedBy []string
}

// forecast contains the scores of a layout for a request.
type forecast struct {
	layout *plans.Layout
	// scores are the expected local shares by rank. They are nil if the request was not scored; unscored is then the
	// reason.
	scores   []float32
	unscored string
	// best is the rank with the highest score.
	best int
	// known and pairs are the shares of the tokens, and of the token pairs, that the tables were trained on. They are
	// set for sampled requests only.
	known, pairs float64
	// tokens is the load of the request, with the tokenized length of its prompt.
	tokens int64
	// prefixes are the prefix hashes of the tokens (dispatch.PrefixHashes); nil if the tokens are not known.
	prefixes []uint64
}

// newRequest parses a request body of any content.
func newRequest(path, id string, data []byte) *request {
	r := &request{id: id, path: path, planRandom: rand.Uint64(), tokens: 1}
	var route inferenceRoute
	if route, r.inference = inference[path]; !r.inference {
		return r
	}
	r.reportsExperts = route.reportsExperts
	r.route = path
	b := wire.ParseBody(data)
	r.answers, r.copies = b.Answers(path)
	r.output = b.Output(r.answers)
	r.answerTokens = b.ExpectedAnswerTokens()
	r.prompt = wire.PromptOf(path, b)
	media := r.prompt.Media
	r.tokens = int64((len(data)-media.Bytes)/wire.BytesPerToken) + media.Tokens() + r.output + 1
	return r
}

// promptEstimate returns the length of the prompt in tokens, estimated from its bytes. It does not depend on the
// tokenizer of a plan, because revisions are compared by it.
func (r *request) promptEstimate() int64 { return max(0, r.tokens-r.output-1) }

// answered releases the prompt once a response has begun. The prompt is needed only to count experts.
func (r *request) answered(done capture) {
	if !done.sampled {
		r.prompt = wire.Prompt{}
	}
}

// score computes the forecast of a layout. It takes as long as tokenization; no lock may be held.
func (r *request) score(l *plans.Layout) {
	f := forecast{layout: l, tokens: r.tokens}
	from := r.prompt
	var ids []int32
	if f.scores, f.prefixes, ids, f.unscored = l.Score(from); f.unscored == plans.NoTokenizer && r.tokenize != nil {
		if prompt := r.tokenize(l.Digest, r.prompt.Texts); !prompt.Empty() {
			prompt.Tools = from.Tools
			from = prompt
			f.scores, f.prefixes, ids, f.unscored = l.Score(from)
		}
	}
	if f.scores != nil {
		f.best = slices.Index(f.scores, slices.Max(f.scores))
		f.tokens = int64(len(ids)+len(from.Tools)/wire.BytesPerToken+from.More) + r.prompt.Media.Tokens() + r.output + 1
		if r.sampled {
			f.known, f.pairs = l.Known(ids)
		}
	}
	r.forecast = f
}

// ask returns the request to the scheduler of a plan. The latest forecast must belong to that plan.
func (r *request) ask(plan *scheduled) dispatch.Request {
	asked := dispatch.Request{Tokens: int(r.tokens)}
	if plan != nil && r.forecast.scores != nil {
		asked.Tokens = int(r.forecast.tokens)
	}
	asked.Prompt = max(0, asked.Tokens-int(r.output))
	return asked
}

// on returns the forecast for the rank that served the request. The forecast must have scores.
func (f *forecast) on(rank int) *lar.Forecast {
	return &lar.Forecast{
		Tables: f.layout.Tables, Best: f.best, Highest: share(float64(f.scores[f.best])), Predicted: share(float64(f.scores[rank])),
		Known: share(f.known), Pairs: share(f.pairs),
	}
}

// share rounds a share to six decimals, more than the precision of a table. This halves the length of a list of shares
// as JSON.
func share(value float64) float64 { return math.Round(1e6*value) / 1e6 }

// hash computes the prefix hashes of the text, or of the token ids if the client sent ids.
func (r *request) hash() {
	r.hashed = true
	if texts := r.prompt.AllTexts(); len(texts) > 0 {
		r.prefixes = dispatch.TextPrefixHashes(nil, texts)
	} else {
		r.prefixes = dispatch.PrefixHashes(nil, r.prompt.IDs)
	}
}
