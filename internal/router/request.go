package router

import (
	"bytes"
	"math"
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/jsonscan"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/solver/dispatch"
)

const (
	// bytesPerToken is a usual ratio for byte-pair tokenizers. It only balances load; a wrong ratio is wrong for all
	// requests alike.
	bytesPerToken = 4
	// defaultOutput is what a request without a limit is expected to generate.
	defaultOutput = 256
	// largestOutput bounds what a request can claim to generate, so that one request cannot make a rank look full for ever.
	largestOutput = 1 << 20
)

// body is a request's body. What is of another type than expected counts as absent: it is the engine's to refuse.
type body struct {
	data    []byte
	members []jsonscan.Member
}

// parseBody finds the members of a body; what is no JSON object has none.
func parseBody(data []byte) body {
	members, ok := jsonscan.Object(data, nil)
	if !ok {
		return body{}
	}
	return body{data, members}
}

// get returns the value of a member; nil where there is none.
func (b body) get(name string) []byte { return jsonscan.Get(b.data, b.members, name) }

// output is how many tokens the request may generate, all its answers together: several for a prompt, or several prompts.
func (b body) output(path string) int64 {
	native := parseBody(b.get("sampling_params"))
	answers := b.prompts(path)
	for _, value := range [][]byte{b.get("n"), native.get("n")} {
		if n, err := strconv.ParseInt(string(value), 10, 64); err == nil && n > 1 {
			answers = min(answers*min(n, largestOutput), largestOutput)
		}
	}
	return min(answers*b.limit(native), largestOutput)
}

// limit is how many tokens one answer may have.
func (b body) limit(native body) int64 {
	for _, value := range [][]byte{b.get("max_tokens"), b.get("max_completion_tokens"), native.get("max_new_tokens")} {
		if limit, err := strconv.ParseInt(string(value), 10, 64); err == nil && limit >= 0 {
			return min(limit, largestOutput)
		}
	}
	return defaultOutput
}

// prompts is how many prompts the request has: each element of a list is one, but of a list of token ids.
func (b body) prompts(path string) int64 {
	var list []byte
	switch path {
	case "/v1/completions":
		list = b.get("prompt")
	case "/generate":
		if list = b.get("text"); len(list) == 0 || list[0] != '[' {
			list = b.get("input_ids")
		}
	}
	if len(list) == 0 || list[0] != '[' {
		return 1
	}
	if first := bytes.TrimLeft(list[1:], " \t\r\n"); first[0] != '"' && first[0] != '[' {
		return 1
	}
	elements, _ := jsonscan.Array(list, nil)
	return int64(len(elements))
}

// request is what the choice of a rank needs to know. It belongs to one goroutine.
type request struct {
	id string
	// output is what the request is expected to generate, tokens its whole load as estimated from its length.
	output, tokens int64
	// sampled tells that it is one of those whose experts are asked for, if its pod is one that is asked.
	sampled bool
	// inference tells that the request's tokens activate experts.
	inference bool
	// asksExperts tells that the client wants to know the routed experts itself.
	asksExperts bool
	// eligible tells the endpoints that there are to choose from; nil where all are.
	eligible func(endpoint string) bool
	// prompt is empty where its tokens cannot be told.
	prompt prompt
	// tokenize asks an engine under a plan for the tokens of texts that cannot be told here; nil where none can be asked.
	tokenize func(plan string, texts []string) prompt
	// forecast is the latest one; a request that is sent again to pods of the same plan keeps it.
	forecast forecast
	// prefixes identify the beginnings of its text (dispatch.TextPrefixHashes) once it is hashed: for pods by whose plan it cannot be
	// tokenized.
	prefixes []uint64
	hashed   bool
	// scheduler is the one that has chosen its place, and rank what it chose: a request counts there once, however often it is sent.
	scheduler *dispatch.Scheduler
	rank      int
	// refused says why the latest attempt to take a place has failed, where it is not that there is none.
	refused error
}

// forecast is what a layout says of a request.
type forecast struct {
	layout *Layout
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
	r := &request{id: id, inference: inference[path], tokens: 1}
	if !r.inference {
		return r
	}
	b := parseBody(data)
	r.output = b.output(path)
	r.tokens = int64(len(data)/bytesPerToken) + r.output + 1
	r.prompt = promptOf(path, b)
	return r
}

// score makes the forecast of a layout. It takes as long as tokenizing does: no lock may be held.
func (r *request) score(l *Layout) {
	f := forecast{layout: l, tokens: r.tokens}
	from := r.prompt
	var ids []int32
	if f.scores, f.prefixes, ids, f.unscored = l.score(from); f.unscored == unscoredNoTokenizer && r.tokenize != nil {
		if told := r.tokenize(l.digest, r.prompt.texts); !told.empty() {
			from = told
			f.scores, f.prefixes, ids, f.unscored = l.score(from)
		}
	}
	if f.scores != nil {
		f.best = slices.Index(f.scores, slices.Max(f.scores))
		f.tokens = int64(len(ids)+from.more) + r.output + 1
		if r.sampled {
			f.known, f.pairs = l.known(ids)
		}
	}
	r.forecast = f
}

// on is what is told of the forecast for a request that a rank has served; there must be scores.
func (f *forecast) on(rank int) *lar.Forecast {
	return &lar.Forecast{
		Tables: f.layout.tables, Best: f.best, Highest: share(float64(f.scores[f.best])), Predicted: share(float64(f.scores[rank])),
		Known: share(f.known), Pairs: share(f.pairs),
	}
}

// share is a share to six decimals, more than a table has: the text of a thousand of them is then half as long.
func share(value float64) float64 { return math.Round(1e6*value) / 1e6 }

// hash identifies the beginnings of the text, or of the token ids where the client gives these.
func (r *request) hash() {
	r.hashed = true
	if len(r.prompt.texts) > 0 {
		r.prefixes = dispatch.TextPrefixHashes(nil, r.prompt.texts)
	} else {
		r.prefixes = dispatch.PrefixHashes(nil, r.prompt.ids)
	}
}
