package livesamples

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
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/trace"
)

// Kind is what the router keeps of the tokens of sampled requests.
type Kind string

// The kinds of live samples.
const (
	// None keeps nothing.
	None Kind = "none"
	// Counts keeps how often token ids activated experts and followed one another: no sequence can be read from it.
	Counts Kind = "counts"
	// Sequences also keeps whole sequences of token ids: prompts and, where the engine tells them, answers.
	Sequences Kind = "sequences"
)

// Parse returns the kind of that name.
func Parse(name string) (Kind, error) {
	switch kind := Kind(name); kind {
	case None, Counts, Sequences:
		return kind, nil
	}
	return "", fmt.Errorf("live samples are %q; want %s, %s or %s", name, None, Counts, Sequences)
}

const (
	// generation is how long counts are added to before new ones begin, and generationTokens how many tokens they hold by
	// then, but for a router with little to do, whose counts end after longest. What is told is the present generation and the
	// one before. Short generations are what lets an observer part the traffic since a drift from the traffic before it; fewer
	// tokens would tell little of any.
	generation       = 10 * time.Minute
	generationTokens = 50000
	longest          = 12 * time.Hour
	// mostPairs bounds the different pairs of token and expert of a generation, 18 bytes each at most.
	mostPairs = 2 << 20
	// mostIDs bounds the expert ids of all kept sequences, two bytes each.
	mostIDs = 16 << 20
	// silence is how long no request of the present model is sampled before another's are counted: two models serve at
	// once while one is rolled out.
	silence = 10 * time.Minute
	// share bounds the time that is spent on counting: for each moment of it, as many pass until the next sampled request is
	// counted. Which that is does not depend on the request.
	share = 20
)

// Keeper keeps the tokens of sampled requests, of one model at a time. It is safe for concurrent use.
type Keeper struct {
	kind  Kind
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

// New returns what keeps samples of a kind, and registers its metrics.
func New(registry prometheus.Registerer, kind Kind) *Keeper {
	k := &Keeper{
		kind: kind, now: time.Now, share: share,
		counted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_live_counted_tokens_total", Help: "Tokens of sampled requests that live samples have counted.",
		}),
		uncounted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_live_uncounted_tokens_total", Help: "Tokens of sampled requests that live samples have not counted: their ids are not known, another model serves, or counting would take too much time.",
		}),
	}
	registry.MustRegister(k.counted, k.uncounted)
	return k
}

// Add counts the tokens of a request; ids are those of the first of them, experts [tokens, layers, experts per token] of all,
// by logical ids.
func (k *Keeper) Add(digest string, shape lar.Shape, ids, experts []int32) {
	if k.kind != Counts && k.kind != Sequences {
		return
	}
	all := len(experts) / (shape.Layers * shape.ExpertsPerToken)
	model := counts.Model{
		Digest: digest, MoELayers: shape.MoELayers, Experts: shape.Experts, ExpertsPerToken: shape.ExpertsPerToken, Vocabulary: shape.Vocabulary,
	}
	rows, whole := routedRows(shape, ids, experts)
	counted := 0
	if k.keep(model, shape.Layers, rows, whole) {
		counted = len(rows.tokens)
	}
	k.counted.Add(float64(counted))
	k.uncounted.Add(float64(all - counted))
}

// routedRows are the tokens whose experts are all routed ones of the model's, no two of a layer the same, and whether these are all of ids.
// What names an expert twice was never recorded: memory that an engine has not filled.
func routedRows(shape lar.Shape, ids, experts []int32) (rows sequence, whole bool) {
	whole = true
	width := shape.Layers * shape.ExpertsPerToken
	row := make([]uint16, 0, len(shape.MoELayers)*shape.ExpertsPerToken)
	for at, token := range ids {
		row = row[:0]
		for _, layer := range shape.MoELayers {
			start, begin := at*width+layer*shape.ExpertsPerToken, len(row)
			for _, expert := range experts[start : start+shape.ExpertsPerToken] {
				if expert >= 0 && int(expert) < shape.Experts && !slices.Contains(row[begin:], uint16(expert)) {
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
func (k *Keeper) keep(model counts.Model, layers int, rows sequence, whole bool) bool {
	if len(rows.tokens) == 0 || model.Validate() != nil || !k.mu.TryLock() {
		return false
	}
	defer k.mu.Unlock()
	begin := k.now()
	if begin.Before(k.idle) || !k.turnTo(model, layers, begin) {
		return false
	}
	k.current.Add(rows.tokens, rows.experts)
	if whole {
		// Tokens that follow one another in rows do so in the request.
		k.current.AddBigrams(rows.tokens)
		rows.at = begin
		k.keepSequence(rows)
	}
	end := k.now()
	k.idle = end.Add(k.share * end.Sub(begin))
	return true
}

// turnTo makes the counts ready for a request of a model.
func (k *Keeper) turnTo(model counts.Model, layers int, now time.Time) bool {
	switch same := reflect.DeepEqual(k.model, model); {
	case k.current == nil || !same && now.Sub(k.last) >= silence:
		k.model, k.layers, k.previous, k.sequences, k.ids = model, layers, nil, nil, 0
		k.current, k.began, k.since = counts.NewBounded(model, mostPairs), now, now
	case !same:
		return false
	case k.complete(now.Sub(k.began)):
		k.previous, k.since = k.current, k.began
		k.current, k.began = counts.NewBounded(model, mostPairs), now
	}
	k.last = now
	return true
}

// complete tells that the present generation, of that age, is followed by another.
func (k *Keeper) complete(age time.Duration) bool {
	return age >= generation && k.current.Tokens() >= generationTokens || age >= longest
}

// keepSequence keeps a sequence, in the place of the oldest ones.
func (k *Keeper) keepSequence(s sequence) {
	if k.kind != Sequences || len(s.experts) > mostIDs {
		return
	}
	k.sequences = append(k.sequences, s)
	k.ids += len(s.experts)
	for k.ids > mostIDs {
		k.ids -= len(k.sequences[0].experts)
		k.sequences = k.sequences[1:]
	}
}

// generations are the counts of which all were made from a time on, and when the first of them began.
func (k *Keeper) generations(since time.Time) (told []*counts.Counts, from time.Time) {
	if k.current == nil || k.began.Before(since) {
		return nil, time.Time{}
	}
	if k.previous == nil || k.since.Before(since) {
		return []*counts.Counts{k.current}, k.began
	}
	return []*counts.Counts{k.previous, k.current}, k.since
}

// told is a copy of the counts of which all were made from a time on, and since when they were; nil where there are none.
func (k *Keeper) told(since time.Time) (*counts.Counts, time.Time, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	generations, from := k.generations(since)
	if len(generations) == 0 {
		return nil, time.Time{}, nil
	}
	sum := counts.New(k.model)
	for _, generation := range generations {
		if err := sum.Merge(generation); err != nil {
			return nil, time.Time{}, err
		}
	}
	return sum, from, nil
}

// countedSince is how many tokens told would hold.
func (k *Keeper) countedSince(since time.Time) (tokens int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	generations, _ := k.generations(since)
	for _, generation := range generations {
		tokens += generation.Tokens()
	}
	return tokens
}

// keptSince are the kept sequences that were sampled from a time on. It needs the lock.
func (k *Keeper) keptSince(since time.Time) []sequence {
	return k.sequences[sort.Search(len(k.sequences), func(i int) bool { return !k.sequences[i].at.Before(since) }):]
}

// keptSizes are the numbers of requests and tokens that trace would hold.
func (k *Keeper) keptSizes(since time.Time) (requests int, tokens int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	kept := k.keptSince(since)
	for _, s := range kept {
		tokens += int64(len(s.tokens))
	}
	return len(kept), tokens
}

// trace is a routing trace of the sequences that were sampled from a time on, each of a document of its own; nil where there are
// none.
func (k *Keeper) trace(since time.Time) *trace.Trace {
	k.mu.Lock()
	defer k.mu.Unlock()
	kept := k.keptSince(since)
	if len(kept) == 0 {
		return nil
	}
	t := &trace.Trace{Offsets: []int64{0}, Model: trace.Model{
		Digest: k.model.Digest, Experts: k.model.Experts, TopK: k.model.ExpertsPerToken, Vocabulary: k.model.Vocabulary,
		Layers: slices.Clone(k.model.MoELayers), HiddenLayers: k.layers,
	}}
	for i, s := range kept {
		t.Tokens, t.Experts = append(t.Tokens, s.tokens...), append(t.Experts, s.experts...)
		t.Offsets, t.Documents = append(t.Offsets, int64(len(t.Tokens))), append(t.Documents, int32(i))
	}
	return t
}

// Where the live samples of a router are: counts, and sequences.
const (
	CountsPath    = "/v1/live-counts"
	SequencesPath = "/v1/live-samples"
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

// ServeCounts answers with the counts, as zstd-compressed safetensors; 204 before the first request.
func (k *Keeper) ServeCounts(w http.ResponseWriter, r *http.Request) {
	if k.kind == None || k.kind == "" {
		wire.WriteError(w, r.URL.Path, http.StatusNotFound, wire.NotFound, "live samples are not kept: see --live-samples")
		return
	}
	from, err := since(r)
	if err != nil {
		wire.WriteError(w, r.URL.Path, http.StatusBadRequest, wire.InvalidRequest, err.Error())
		return
	}
	if r.Method == http.MethodHead {
		w.Header().Set(HeaderTokens, strconv.FormatInt(k.countedSince(from), 10))
		return
	}
	switch sum, began, err := k.told(from); {
	case err != nil:
		wire.WriteError(w, r.URL.Path, http.StatusInternalServerError, wire.Internal, err.Error())
	case sum == nil:
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set("Content-Type", "application/zstd")
		w.Header().Set(headerSince, began.UTC().Format(time.RFC3339))
		w.Header().Set(HeaderTokens, strconv.FormatInt(sum.Tokens(), 10))
		_ = sum.WriteCompressed(w) // whoever asked has gone
	}
}

// ServeSequences answers with a routing trace, as zstd-compressed safetensors; 204 before the first request.
func (k *Keeper) ServeSequences(w http.ResponseWriter, r *http.Request) {
	if k.kind != Sequences {
		wire.WriteError(w, r.URL.Path, http.StatusNotFound, wire.NotFound, "sequences are not kept: see --live-samples")
		return
	}
	from, err := since(r)
	if err != nil {
		wire.WriteError(w, r.URL.Path, http.StatusBadRequest, wire.InvalidRequest, err.Error())
		return
	}
	if r.Method == http.MethodHead {
		requests, tokens := k.keptSizes(from)
		w.Header().Set(HeaderRequests, strconv.Itoa(requests))
		w.Header().Set(HeaderTokens, strconv.FormatInt(tokens, 10))
		return
	}
	switch t := k.trace(from); {
	case t == nil:
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set(HeaderRequests, strconv.Itoa(t.Requests()))
		w.Header().Set(HeaderTokens, strconv.Itoa(len(t.Tokens)))
		encoder, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		if err != nil {
			wire.WriteError(w, r.URL.Path, http.StatusInternalServerError, wire.Internal, err.Error())
			return
		}
		w.Header().Set("Content-Type", "application/zstd")
		switch err := trace.Write(encoder, t); {
		case trace.IsInvalid(err): // nothing has been sent
			w.Header().Del(HeaderRequests)
			w.Header().Del(HeaderTokens)
			wire.WriteError(w, r.URL.Path, http.StatusInternalServerError, wire.Internal, err.Error())
		case err == nil:
			_ = encoder.Close() // whoever asked has gone
		}
	}
}
