package router

import (
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"sort"
	"strconv"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/counts"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/solver/trace"
)

// LiveSamples is what the router keeps of the tokens of sampled requests.
type LiveSamples string

// The kinds of live samples.
const (
	// LiveNone keeps nothing.
	LiveNone LiveSamples = "none"
	// LiveCounts keeps how often token ids activated experts and followed one another: no sequence can be read from it.
	LiveCounts LiveSamples = "counts"
	// LiveSequences also keeps whole sequences of token ids: prompts and, where the engine tells them, answers.
	LiveSequences LiveSamples = "sequences"
)

// ParseLiveSamples returns the kind of that name.
func ParseLiveSamples(name string) (LiveSamples, error) {
	switch kind := LiveSamples(name); kind {
	case LiveNone, LiveCounts, LiveSequences:
		return kind, nil
	}
	return "", fmt.Errorf("live samples are %q; want %s, %s or %s", name, LiveNone, LiveCounts, LiveSequences)
}

const (
	// liveGeneration is how long counts are added to before new ones begin, and liveGenerationTokens how many tokens they hold by
	// then, but for a router with little to do, whose counts end after liveLongest. What is told is the present generation and the
	// one before. Short generations are what lets an observer part the traffic since a drift from the traffic before it; fewer
	// tokens would tell little of any.
	liveGeneration       = 10 * time.Minute
	liveGenerationTokens = 50000
	liveLongest          = 12 * time.Hour
	// livePairs bounds the different pairs of token and expert of a generation, 18 bytes each at most.
	livePairs = 2 << 20
	// liveIDs bounds the expert ids of all kept sequences, two bytes each.
	liveIDs = 16 << 20
	// liveSilence is how long no request of the present model is sampled before another's are counted: two models serve at
	// once while one is rolled out.
	liveSilence = 10 * time.Minute
	// liveShare bounds the time that is spent on counting: for each moment of it, as many pass until the next sampled request is
	// counted. Which that is does not depend on the request.
	liveShare = 20
)

// live keeps the tokens of sampled requests, of one model at a time. It is safe for concurrent use.
type live struct {
	kind  LiveSamples
	now   func() time.Time
	share time.Duration

	mu sync.Mutex
	// model is whose tokens are counted, last when one was, idle from when on the next one may be.
	model      counts.Model
	layers     int
	last, idle time.Time
	// current is the generation that began then, previous the one before; both are nil before the first request.
	current, previous *counts.Counts
	began, since      time.Time
	// sequences are the last ones, the oldest first; ids is the number of their expert ids.
	sequences []sequence
	ids       int

	counted, uncounted prometheus.Counter
}

// sequence is one request's tokens with the experts that each activated [tokens, MoE layers, experts per token], and when it was
// sampled.
type sequence struct {
	tokens  []int32
	experts []uint16
	at      time.Time
}

func newLive(registry prometheus.Registerer, kind LiveSamples) *live {
	l := &live{
		kind: kind, now: time.Now, share: liveShare,
		counted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_live_counted_tokens_total", Help: "Tokens of sampled requests that live samples have counted.",
		}),
		uncounted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_live_uncounted_tokens_total", Help: "Tokens of sampled requests that live samples have not counted: their ids are not known, another model serves, or counting would take too much time.",
		}),
	}
	registry.MustRegister(l.counted, l.uncounted)
	return l
}

// add counts the tokens of a request; ids are those of the first of them, experts [tokens, layers, experts per token] of all,
// by logical ids.
func (l *live) add(digest string, shape lar.Shape, ids, experts []int32) {
	if l.kind != LiveCounts && l.kind != LiveSequences {
		return
	}
	all := len(experts) / (shape.Layers * shape.ExpertsPerToken)
	model := counts.Model{
		Digest: digest, MoELayers: shape.MoELayers, Experts: shape.Experts, ExpertsPerToken: shape.ExpertsPerToken, Vocabulary: shape.Vocabulary,
	}
	rows, whole := routedRows(shape, ids, experts)
	counted := 0
	if l.keep(model, shape.Layers, rows, whole) {
		counted = len(rows.tokens)
	}
	l.counted.Add(float64(counted))
	l.uncounted.Add(float64(all - counted))
}

// routedRows are the tokens whose experts are all routed ones of the model's, and whether these are all of ids.
func routedRows(shape lar.Shape, ids, experts []int32) (rows sequence, whole bool) {
	whole = true
	width := shape.Layers * shape.ExpertsPerToken
	row := make([]uint16, 0, len(shape.MoELayers)*shape.ExpertsPerToken)
	for at, token := range ids {
		row = row[:0]
		for _, layer := range shape.MoELayers {
			start := at*width + layer*shape.ExpertsPerToken
			for _, expert := range experts[start : start+shape.ExpertsPerToken] {
				if expert >= 0 && int(expert) < shape.Experts {
					row = append(row, uint16(expert))
				}
			}
		}
		if len(row) != cap(row) || token < 0 || int(token) >= shape.Vocabulary {
			whole = false
			continue
		}
		rows.tokens, rows.experts = append(rows.tokens, token), append(rows.experts, row...)
	}
	return rows, whole
}

// keep adds rows to what is kept; it reports false where they are not.
func (l *live) keep(model counts.Model, layers int, rows sequence, whole bool) bool {
	if len(rows.tokens) == 0 || model.Validate() != nil || !l.mu.TryLock() {
		return false
	}
	defer l.mu.Unlock()
	begin := l.now()
	if begin.Before(l.idle) || !l.turnTo(model, layers, begin) {
		return false
	}
	l.current.Add(rows.tokens, rows.experts)
	if whole {
		// Tokens that follow one another in rows do so in the request.
		l.current.AddBigrams(rows.tokens)
		rows.at = begin
		l.keepSequence(rows)
	}
	end := l.now()
	l.idle = end.Add(l.share * end.Sub(begin))
	return true
}

// turnTo makes the counts ready for a request of a model.
func (l *live) turnTo(model counts.Model, layers int, now time.Time) bool {
	switch same := reflect.DeepEqual(l.model, model); {
	case l.current == nil || !same && now.Sub(l.last) >= liveSilence:
		l.model, l.layers, l.previous, l.sequences, l.ids = model, layers, nil, nil, 0
		l.current, l.began, l.since = counts.NewBounded(model, livePairs), now, now
	case !same:
		return false
	case l.complete(now.Sub(l.began)):
		l.previous, l.since = l.current, l.began
		l.current, l.began = counts.NewBounded(model, livePairs), now
	}
	l.last = now
	return true
}

// complete tells that the present generation, of that age, is followed by another.
func (l *live) complete(age time.Duration) bool {
	return age >= liveGeneration && l.current.Tokens() >= liveGenerationTokens || age >= liveLongest
}

// keepSequence keeps a sequence, in the place of the oldest ones.
func (l *live) keepSequence(s sequence) {
	if l.kind != LiveSequences || len(s.experts) > liveIDs {
		return
	}
	l.sequences = append(l.sequences, s)
	l.ids += len(s.experts)
	for l.ids > liveIDs {
		l.ids -= len(l.sequences[0].experts)
		l.sequences = l.sequences[1:]
	}
}

// generations are the counts of which all were made from a time on, and when the first of them began.
func (l *live) generations(since time.Time) (told []*counts.Counts, from time.Time) {
	if l.current == nil || l.began.Before(since) {
		return nil, time.Time{}
	}
	if l.previous == nil || l.since.Before(since) {
		return []*counts.Counts{l.current}, l.began
	}
	return []*counts.Counts{l.previous, l.current}, l.since
}

// told is a copy of the counts of which all were made from a time on, and since when they were; nil where there are none.
func (l *live) told(since time.Time) (*counts.Counts, time.Time, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	generations, from := l.generations(since)
	if len(generations) == 0 {
		return nil, time.Time{}, nil
	}
	sum := counts.New(l.model)
	for _, generation := range generations {
		if err := sum.Merge(generation); err != nil {
			return nil, time.Time{}, err
		}
	}
	return sum, from, nil
}

// countedSince is how many tokens told would hold.
func (l *live) countedSince(since time.Time) (tokens int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	generations, _ := l.generations(since)
	for _, generation := range generations {
		tokens += generation.Tokens()
	}
	return tokens
}

// keptSince are the kept sequences that were sampled from a time on. It needs the lock.
func (l *live) keptSince(since time.Time) []sequence {
	return l.sequences[sort.Search(len(l.sequences), func(i int) bool { return !l.sequences[i].at.Before(since) }):]
}

// keptSizes are the numbers of requests and tokens that trace would hold.
func (l *live) keptSizes(since time.Time) (requests int, tokens int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := l.keptSince(since)
	for _, s := range kept {
		tokens += int64(len(s.tokens))
	}
	return len(kept), tokens
}

// trace is a routing trace of the sequences that were sampled from a time on, each of a document of its own; nil where there are
// none.
func (l *live) trace(since time.Time) *trace.Trace {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := l.keptSince(since)
	if len(kept) == 0 {
		return nil
	}
	t := &trace.Trace{Offsets: []int64{0}, Model: trace.Model{
		Digest: l.model.Digest, Experts: l.model.Experts, TopK: l.model.ExpertsPerToken, Vocabulary: l.model.Vocabulary,
		Layers: slices.Clone(l.model.MoELayers), HiddenLayers: l.layers,
	}}
	for i, s := range kept {
		t.Tokens, t.Experts = append(t.Tokens, s.tokens...), append(t.Experts, s.experts...)
		t.Offsets, t.Documents = append(t.Offsets, int64(len(t.Tokens))), append(t.Documents, int32(i))
	}
	return t
}

// Where the live samples of a router are: counts, and sequences.
const (
	LiveCountsPath    = "/v1/live-counts"
	LiveSequencesPath = "/v1/live-samples"
)

// QuerySince asks for what was sampled from a time on (RFC 3339).
const QuerySince = "since"

// What an answer, also one to HEAD, tells of live samples: how many requests (of sequences alone) and tokens there are. headerSince
// says from when on counts were made.
const (
	HeaderRequests = "X-Semmoe-Requests"
	HeaderTokens   = "X-Semmoe-Tokens"
	headerSince    = "X-Semmoe-Since"
)

// since is the time that a request for live samples asks from; zero where it asks for all.
func since(r *http.Request) (time.Time, error) {
	text := r.URL.Query().Get(QuerySince)
	if text == "" {
		return time.Time{}, nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}, fmt.Errorf("query parameter %s is %q; want a time as 2006-01-02T15:04:05Z", QuerySince, text)
	}
	return at, nil
}

// serveCounts answers with the counts, as zstd-compressed safetensors; 204 before the first request.
func (l *live) serveCounts(w http.ResponseWriter, r *http.Request) {
	if l.kind == LiveNone || l.kind == "" {
		writeError(w, http.StatusNotFound, "not_found", "live samples are not kept: see --live-samples")
		return
	}
	from, err := since(r)
	if err != nil {
		writeError(w, http.StatusBadRequest, "invalid_request", err.Error())
		return
	}
	if r.Method == http.MethodHead {
		w.Header().Set(HeaderTokens, strconv.FormatInt(l.countedSince(from), 10))
		return
	}
	switch sum, began, err := l.told(from); {
	case err != nil:
		writeError(w, http.StatusInternalServerError, "internal_error", err.Error())
	case sum == nil:
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set("Content-Type", "application/zstd")
		w.Header().Set(headerSince, began.UTC().Format(time.RFC3339))
		w.Header().Set(HeaderTokens, strconv.FormatInt(sum.Tokens(), 10))
		_ = sum.WriteCompressed(w) // whoever asked has gone
	}
}

// serveSequences answers with a routing trace, as zstd-compressed safetensors; 204 before the first request.
func (l *live) serveSequences(w http.ResponseWriter, r *http.Request) {
	if l.kind != LiveSequences {
		writeError(w, http.StatusNotFound, "not_found", "sequences are not kept: see --live-samples")
		return
	}
	from, err := since(r)
	if err != nil {
		writeError(w, http.StatusBadRequest, "invalid_request", err.Error())
		return
	}
	if r.Method == http.MethodHead {
		requests, tokens := l.keptSizes(from)
		w.Header().Set(HeaderRequests, strconv.Itoa(requests))
		w.Header().Set(HeaderTokens, strconv.FormatInt(tokens, 10))
		return
	}
	switch t := l.trace(from); {
	case t == nil:
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set(HeaderRequests, strconv.Itoa(t.Requests()))
		w.Header().Set(HeaderTokens, strconv.Itoa(len(t.Tokens)))
		encoder, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		if err != nil {
			writeError(w, http.StatusInternalServerError, "internal_error", err.Error())
			return
		}
		w.Header().Set("Content-Type", "application/zstd")
		if trace.Write(encoder, t) == nil {
			_ = encoder.Close() // whoever asked has gone
		}
	}
}
