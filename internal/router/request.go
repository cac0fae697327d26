package router

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/line"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/dispatch"
)

// request is what the choice of a rank needs to know. It belongs to one goroutine.
type request struct {
	id string
	// path is the route of the request.
	path string
	// route is the path of an inference request; empty for others.
	route string
	// lot is the random number that chooses the request's plan, however often the request is sent.
	lot uint64
	// output is what the request is expected to generate, tokens its whole load as estimated from its length.
	output, tokens int64
	// answers is how many answers it gets, copies how many of them a prompt has.
	answers, copies int64
	// usual is how many tokens each of its answers is expected to have at most.
	usual int64
	// sampled tells that it is one of those whose experts are asked for, if its pod is one that is asked.
	sampled bool
	// shifted tells that the client leaves out what is told of its first tokens: such a request is not in the population that the
	// sample is drawn from.
	shifted bool
	// inference tells that the request's tokens activate experts, and reportsExperts that its answer can contain them.
	inference, reportsExperts bool
	// lacking are the types of the engines that lack the request's route.
	lacking map[string]bool
	// pins reports whether the request can be sent to a rank of a backend whose ranks share an endpoint; nil where it always can.
	pins func(discovery.Backend) bool
	// writable reports whether a member can be added to the body.
	writable bool
	// asksExperts tells that the client wants to know the routed experts itself.
	asksExperts bool
	// eligible tells the endpoints that there are to choose from; nil where all are.
	eligible func(endpoint string) bool
	// prompt is empty where its tokens cannot be told.
	prompt wire.Prompt
	// tokenize asks an engine under a plan for the tokens of texts that cannot be told here; nil where nobody is asked.
	tokenize func(plan string, texts []string) wire.Prompt
	// forecast is the latest one; a request that is sent again to pods of the same plan keeps it.
	forecast forecast
	// prefixes identify the beginnings of its text (dispatch.TextPrefixHashes) once it is hashed: for pods by whose plan it cannot be
	// tokenized.
	prefixes []uint64
	hashed   bool
	// scheduler is the one that has chosen its place, and rank what it chose: a request counts there once, however often it is sent.
	scheduler *dispatch.Scheduler
	rank      int
	// patient tells that it may stand in line for a rank, standing that it does.
	patient  bool
	standing *line.Standing[waiting]
	// refused says why the latest attempt to take a place has failed, where it is not that there is none.
	refused error
	// failedBy are the revisions whose pods have failed to serve it.
	failedBy []string
}

// forecast is what a layout says of a request.
type forecast struct {
	layout *plans.Layout
	// scores are the expected local shares by rank; nil where unscored says why there are none.
	scores   []float32
	unscored string
	// best is the rank with the highest of them.
	best int
	// known and pairs are the shares of its tokens, and of pairs of them, that the tables have learnt from; told for sampled
	// requests alone.
	known, pairs float64
	// tokens is the request's load, its prompt counted.
	tokens int64
	// prefixes identify the beginnings of its tokens (dispatch.PrefixHashes); nil where they cannot be told.
	prefixes []uint64
}

// newRequest reads a request's body, which may be anything.
func newRequest(path, id string, data []byte) *request {
	r := &request{id: id, path: path, lot: rand.Uint64(), tokens: 1}
	var route inferenceRoute
	if route, r.inference = inference[path]; !r.inference {
		return r
	}
	r.reportsExperts = route.reportsExperts
	r.route = path
	b := wire.ParseBody(data)
	r.answers, r.copies = b.Answers(path)
	r.output = b.Output(r.answers)
	r.usual = b.Usual()
	r.prompt = wire.PromptOf(path, b)
	media := r.prompt.Media
	r.tokens = int64((len(data)-media.Bytes)/wire.BytesPerToken) + media.Tokens() + r.output + 1
	return r
}

// promptEstimate returns the length of the prompt in tokens as estimated from its bytes, whatever a plan's tokenizer
// says: revisions are compared by it.
func (r *request) promptEstimate() int64 { return max(0, r.tokens-r.output-1) }

// answered drops what is needed no more once an answer has begun: who counts its experts needs the prompt.
func (r *request) answered(done look) {
	if !done.sampled {
		r.prompt = wire.Prompt{}
	}
}

// score makes the forecast of a layout. It takes as long as tokenizing does: no lock may be held.
func (r *request) score(l *plans.Layout) {
	f := forecast{layout: l, tokens: r.tokens}
	from := r.prompt
	var ids []int32
	if f.scores, f.prefixes, ids, f.unscored = l.Score(from); f.unscored == plans.NoTokenizer && r.tokenize != nil {
		if told := r.tokenize(l.Digest, r.prompt.Texts); !told.Empty() {
			told.Tools = from.Tools
			from = told
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

// ask is what a plan's scheduler is asked; the latest forecast is the plan's.
func (r *request) ask(plan *scheduled) dispatch.Request {
	asked := dispatch.Request{Tokens: int(r.tokens)}
	if plan != nil && r.forecast.scores != nil {
		asked.Tokens = int(r.forecast.tokens)
	}
	asked.Prompt = max(0, asked.Tokens-int(r.output))
	return asked
}

// on is what is told of the forecast for a request that a rank has served; there must be scores.
func (f *forecast) on(rank int) *lar.Forecast {
	return &lar.Forecast{
		Tables: f.layout.Tables, Best: f.best, Highest: share(float64(f.scores[f.best])), Predicted: share(float64(f.scores[rank])),
		Known: share(f.known), Pairs: share(f.pairs),
	}
}

// share is a share to six decimals, more than a table has: the text of a thousand of them is then half as long.
func share(value float64) float64 { return math.Round(1e6*value) / 1e6 }

// hash identifies the beginnings of the text, or of the token ids where the client gives these.
func (r *request) hash() {
	r.hashed = true
	if texts := r.prompt.AllTexts(); len(texts) > 0 {
		r.prefixes = dispatch.TextPrefixHashes(nil, texts)
	} else {
		r.prefixes = dispatch.PrefixHashes(nil, r.prompt.IDs)
	}
}
