// SPDX-License-Identifier: Apache-2.0

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

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/trace"
)

// Kind selects what the router keeps of the tokens of sampled requests.
type Kind string

// The kinds of live samples.
const (
	// None keeps nothing.
	None Kind = "none"
	// Counts keeps how often token ids activated experts and followed each other. Sequences cannot be reconstructed
	// from it.
	Counts Kind = "counts"
	// Sequences also keeps complete sequences of token ids: prompts and, if the engine reports them, answers.
	Sequences Kind = "sequences"
)

// Parse returns the kind with this name.
func Parse(name string) (Kind, error) {
	switch kind := Kind(name); kind {
	case None, Counts, Sequences:
		return kind, nil
	}
	return "", fmt.Errorf("live samples: %q is invalid: it must be %s, %s or %s", name, None, Counts, Sequences)
}

const (
	// A generation of counts ends after generation with at least generationTokens tokens, or after longest with fewer.
	// Responses contain the current and the previous generation. Short generations let a client separate the traffic
	// after a drift from the traffic before it. Fewer tokens would not be significant.
	generation       = 10 * time.Minute
	generationTokens = 50000
	maxAge           = 12 * time.Hour
	// maxPairs is the maximum number of distinct (token, expert) pairs of a generation, at most 18 bytes each.
	maxPairs = 2 << 20
	// maxIDs is the maximum number of expert ids of all kept sequences, 2 bytes each.
	maxIDs = 16 << 20
	// silence is the time without samples of the current model after which another model is counted. During a rollout
	// of a model, two models serve.
	silence = 10 * time.Minute
	// share bounds the time spent on counting: after a count, the keeper skips requests for share times the duration of
	// the count. Which requests are skipped does not depend on the requests.
	share = 20
)

// Keeper keeps the tokens of sampled requests of one model at a time. It is safe for concurrent use.
type Keeper struct {
	kind  Kind
	now   func() time.Time
	share time.Duration

	mu sync.Mutex
	// model is the counted model. last is the time of its last sample. Until idle, samples are skipped.
	model      counts.Model
	layers     int
	last, idle time.Time
	// current is the generation that began at began, previous the generation that began at since. Both are nil before
	// the first request.
	current, previous *counts.Counts
	began, since      time.Time
	// sequences contains the last sequences, oldest first. ids is the number of their expert ids.
	sequences []sequence
	ids       int

	counted, uncounted prometheus.Counter
}

// sequence contains the tokens of a request, the experts that they activated [tokens, MoE layers, experts per token],
// and the time of the sample.
type sequence struct {
	tokens  []int32
	experts []uint16
	at      time.Time
}

// New returns a keeper for samples of this kind and registers its metrics.
func New(registry prometheus.Registerer, kind Kind) *Keeper {
	k := &Keeper{
		kind: kind, now: time.Now, share: share,
		counted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_live_counted_tokens_total", Help: "Tokens of sampled requests that live samples counted.",
		}),
		uncounted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "semmoe_live_uncounted_tokens_total", Help: "Tokens of sampled requests that live samples did not count: their IDs are unknown, another model serves, or counting would take too long.",
		}),
	}
	registry.MustRegister(k.counted, k.uncounted)
	return k
}

// Keeps reports whether the keeper keeps what is added.
func (k *Keeper) Keeps() bool { return k.kind == Counts || k.kind == Sequences }

// Add counts the tokens of a request. ids are the ids of its first tokens. experts [tokens, layers, experts per token]
// are the logical ids of the experts of all tokens.
func (k *Keeper) Add(digest string, shape lar.Shape, ids, experts []int32) {
	if !k.Keeps() {
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

// routedRows returns the tokens with experts that are all valid and distinct within each layer. whole is true if this
// holds for all ids. A row that names an expert twice was never recorded: it is memory that the engine has not filled.
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

// keep adds rows to the samples. It reports false if the rows are skipped.
func (k *Keeper) keep(model counts.Model, layers int, rows sequence, whole bool) bool {
	if len(rows.tokens) == 0 || model.Validate() != nil || !k.mu.TryLock() {
		return false
	}
	defer k.mu.Unlock()
	begin := k.now()
	if begin.Before(k.idle) || !k.switchModel(model, layers, begin) {
		return false
	}
	k.current.Add(rows.tokens, rows.experts)
	if whole {
		// Successive tokens in rows are successive in the request.
		k.current.AddBigrams(rows.tokens)
		rows.at = begin
		k.keepSequence(rows)
	}
	end := k.now()
	k.idle = end.Add(k.share * end.Sub(begin))
	return true
}

// switchModel prepares the counts for a request to a model. It reports false if another model is being counted.
func (k *Keeper) switchModel(model counts.Model, layers int, now time.Time) bool {
	switch same := reflect.DeepEqual(k.model, model); {
	case k.current == nil || !same && now.Sub(k.last) >= silence:
		k.model, k.layers, k.previous, k.sequences, k.ids = model, layers, nil, nil, 0
		k.current, k.began, k.since = counts.NewBounded(model, maxPairs), now, now
	case !same:
		return false
	case k.complete(now.Sub(k.began)):
		k.previous, k.since = k.current, k.began
		k.current, k.began = counts.NewBounded(model, maxPairs), now
	}
	k.last = now
	return true
}

// complete reports whether a generation of this age has ended.
func (k *Keeper) complete(age time.Duration) bool {
	return age >= generation && k.current.Tokens() >= generationTokens || age >= maxAge
}

// keepSequence appends a sequence and drops the oldest sequences beyond maxIDs.
func (k *Keeper) keepSequence(s sequence) {
	if k.kind != Sequences || len(s.experts) > maxIDs {
		return
	}
	k.sequences = append(k.sequences, s)
	k.ids += len(s.experts)
	for k.ids > maxIDs {
		k.ids -= len(k.sequences[0].experts)
		k.sequences = k.sequences[1:]
	}
}

// generations returns the generations that began at or after since, and the start of the first one.
func (k *Keeper) generations(since time.Time) (list []*counts.Counts, from time.Time) {
	if k.current == nil || k.began.Before(since) {
		return nil, time.Time{}
	}
	if k.previous == nil || k.since.Before(since) {
		return []*counts.Counts{k.current}, k.began
	}
	return []*counts.Counts{k.previous, k.current}, k.since
}

// countsSince returns a copy of the counts of the generations that began at or after since, and their start; nil if
// there are none.
func (k *Keeper) countsSince(since time.Time) (*counts.Counts, time.Time, error) {
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

// countedSince returns the number of tokens that countsSince would return.
func (k *Keeper) countedSince(since time.Time) (tokens int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	generations, _ := k.generations(since)
	for _, generation := range generations {
		tokens += generation.Tokens()
	}
	return tokens
}

// sequencesSince returns the kept sequences that were sampled at or after since. The lock must be held.
func (k *Keeper) sequencesSince(since time.Time) []sequence {
	return k.sequences[sort.Search(len(k.sequences), func(i int) bool { return !k.sequences[i].at.Before(since) }):]
}

// sequenceSizes returns the numbers of requests and tokens that trace would return.
func (k *Keeper) sequenceSizes(since time.Time) (requests int, tokens int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	kept := k.sequencesSince(since)
	for _, s := range kept {
		tokens += int64(len(s.tokens))
	}
	return len(kept), tokens
}

// trace returns a routing trace of the sequences that were sampled at or after since, each as its own document; nil if
// there are none.
func (k *Keeper) trace(since time.Time) *trace.Trace {
	k.mu.Lock()
	defer k.mu.Unlock()
	kept := k.sequencesSince(since)
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

// Routes of the live samples of a router.
const (
	CountsPath    = "/v1/live-counts"
	SequencesPath = "/v1/live-samples"
)

// QuerySince is the query parameter for the earliest time of the samples (RFC 3339).
const QuerySince = "since"

// Response headers, also of HEAD requests: the number of requests (sequences only) and of tokens, and the time since
// which counts were made.
const (
	HeaderRequests = "X-Semmoe-Requests"
	HeaderTokens   = "X-Semmoe-Tokens"
	headerSince    = "X-Semmoe-Since"
)

// since returns the earliest time that a request for live samples asks for; the zero time if it asks for all.
func since(r *http.Request) (time.Time, error) {
	text := r.URL.Query().Get(QuerySince)
	if text == "" {
		return time.Time{}, nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}, fmt.Errorf("query parameter %s: %q is invalid: it must be a time such as 2006-01-02T15:04:05Z", QuerySince, text)
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
	switch sum, began, err := k.countsSince(from); {
	case err != nil:
		wire.WriteError(w, r.URL.Path, http.StatusInternalServerError, wire.Internal, err.Error())
	case sum == nil:
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set("Content-Type", "application/zstd")
		w.Header().Set(headerSince, began.UTC().Format(time.RFC3339))
		w.Header().Set(HeaderTokens, strconv.FormatInt(sum.Tokens(), 10))
		_ = sum.WriteCompressed(w) // the client has disconnected
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
		requests, tokens := k.sequenceSizes(from)
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
			_ = encoder.Close() // the client has disconnected
		}
	}
}
