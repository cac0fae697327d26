package profile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/counts"
	"github.com/semmoe/operator/solver/trace"
)

// The samples that a live profile is made from.
const (
	LiveCounts    = "Counts"
	LiveSequences = "Sequences"
)

// Live is what the manifest of a live profile tells besides: of which object it is, and of which model. Live traffic has no
// digest: two profiles are never the same.
type Live struct {
	// UID is that of the object that the profile was made for.
	UID string `json:"uid"`
	// Samples is LiveCounts or LiveSequences.
	Samples string `json:"samples"`
	Model   Model  `json:"model"`
}

// Model is a trace.Model without what belongs to one trace.
type Model struct {
	Type         string `json:"type,omitempty"`
	Experts      int    `json:"experts"`
	TopK         int    `json:"topK"`
	Vocabulary   int    `json:"vocabulary"`
	Layers       []int  `json:"moeLayers"`
	HiddenLayers int    `json:"layers"`
	HiddenSize   int    `json:"hiddenSize,omitempty"`
	Config       string `json:"config,omitempty"`
}

// LiveID names the profile of an object: the ID of the profile's scope in the artifact store.
func LiveID(uid string) string {
	sum := sha256.Sum256([]byte(Format + "/live/" + uid))
	return hex.EncodeToString(sum[:])[:16]
}

// FetchModel reads of which model a profile is.
func FetchModel(ctx context.Context, store *artifact.Client, scope artifact.Scope, m Manifest) (Model, error) {
	if m.Live != nil {
		return m.Live.Model, nil
	}
	stream, err := store.Get(ctx, scope, m.Files[TraceFile])
	if err != nil {
		return Model{}, err
	}
	defer stream.Close()
	found, err := trace.ReadModel(stream)
	if err != nil {
		return Model{}, fmt.Errorf("%s of %s: %w", TraceFile, scope, err)
	}
	return Model{found.Type, found.Experts, found.TopK, found.Vocabulary, found.Layers, found.HiddenLayers, found.HiddenSize, found.Config}, nil
}

// Groups is the number of groups of experts that the model's gate chooses among first, as trace.Model tells it.
func (m Model) Groups() (int, error) {
	traced := m.traced("")
	return traced.Groups()
}

// traced is the model as a trace has it.
func (m Model) traced(digest string) trace.Model {
	return trace.Model{
		Type: m.Type, Experts: m.Experts, TopK: m.TopK, Vocabulary: m.Vocabulary, Layers: m.Layers,
		HiddenLayers: m.HiddenLayers, HiddenSize: m.HiddenSize, Config: m.Config, Digest: digest,
	}
}

// counted is the model as counts have it.
func (m Model) counted(digest string) counts.Model {
	return counts.Model{Digest: digest, MoELayers: m.Layers, Experts: m.Experts, ExpertsPerToken: m.TopK, Vocabulary: m.Vocabulary}
}

// FromSequences makes a profile of a uniform sample, which the seed decides, of the requests that routers have kept: at most as
// many, and as long, as the sampling says. Which belong together nobody knows, and each is a document of its own; but those of the
// same tokens, as of a client that repeats itself, are one. Traces of another model than m, of that digest, are refused.
func FromSequences(parts []*trace.Trace, m Model, digest string, s Sampling, seed uint64) (*Profile, error) {
	type request struct{ part, at int }
	var all []request
	for i, part := range parts {
		if got, want := countedBy(part.Model), m.counted(digest); !reflect.DeepEqual(got, want) {
			return nil, fmt.Errorf("a router's sequences are of the model %+v, not of %+v", got, want)
		}
		for at := range part.Requests() {
			all = append(all, request{i, at})
		}
	}
	length := func(r request) int { return min(parts[r.part].Length(r.at), s.RequestTokens) }
	var taken []int
	tokens := 0
	for _, i := range rand.New(rand.NewPCG(seed, 0x6c697665)).Perm(len(all)) {
		if len(taken) == s.Requests || tokens+length(all[i]) > s.Tokens {
			break // short requests that would still fit would be taken more often than long ones
		}
		taken, tokens = append(taken, i), tokens+length(all[i])
	}
	slices.Sort(taken)
	t := &trace.Trace{Model: m.traced(digest), Offsets: []int64{0}}
	width := len(m.Layers) * m.TopK
	for _, i := range taken {
		part, from, n := parts[all[i].part], int(parts[all[i].part].Offsets[all[i].at]), length(all[i])
		t.Tokens = append(t.Tokens, part.Tokens[from:from+n]...)
		t.Experts = append(t.Experts, part.Experts[from*width:(from+n)*width]...)
		t.Offsets = append(t.Offsets, int64(len(t.Tokens)))
	}
	t.Documents = documentsOf(t)
	if err := t.Validate(); err != nil {
		return nil, err
	}
	c := counts.New(m.counted(digest))
	c.Add(t.Tokens, t.Experts)
	p := fromCounts(c)
	p.Trace, p.Summary.Requests, p.Summary.TracedTokens = t, t.Requests(), len(t.Tokens)
	return p, nil
}

// documentsOf numbers the requests of a trace, equal ones alike: a plan must not be judged, nor its test for drift made, by requests
// that it was made from. Where all are the same, they are told apart all the same, since one document cannot be split.
func documentsOf(t *trace.Trace) []int32 {
	numbers := map[string]int32{}
	documents := make([]int32, t.Requests())
	var key []byte
	for r := range documents {
		key = key[:0]
		for _, token := range t.Request(r) {
			key = binary.LittleEndian.AppendUint32(key, uint32(token))
		}
		number, known := numbers[string(key)]
		if !known {
			number = int32(len(numbers))
			numbers[string(key)] = number
		}
		documents[r] = number
	}
	if len(numbers) == 1 {
		for r := range documents {
			documents[r] = int32(r)
		}
	}
	return documents
}

func countedBy(m trace.Model) counts.Model {
	return counts.Model{Digest: m.Digest, MoELayers: m.Layers, Experts: m.Experts, ExpertsPerToken: m.TopK, Vocabulary: m.Vocabulary}
}

// FromCounts makes a profile without a trace of the counts that routers have kept.
func FromCounts(parts []*counts.Counts, m Model, digest string) (*Profile, error) {
	sum := counts.New(m.counted(digest))
	for _, part := range parts {
		if err := sum.Merge(part); err != nil {
			return nil, err
		}
	}
	if sum.Tokens() == 0 {
		return nil, errors.New("the routers' counts hold no token")
	}
	return fromCounts(sum), nil
}

func fromCounts(c *counts.Counts) *Profile {
	return &Profile{counts: c, Summary: Summary{
		Tokens: int(c.Tokens()), DistinctTokens: c.Distinct(), CoverageMilli: 1000 * c.Distinct() / c.Model.Vocabulary, SkewMilli: int(1000 * c.Skew()),
	}}
}

// PublishLive stores a live profile, with the tokenizer of the profile that it follows, as the result of its scope. It returns the
// digest of the result that the scope has then: the first one that was published.
func PublishLive(ctx context.Context, store *artifact.Client, scope artifact.Scope, p *Profile, m Manifest, tokenizer []byte) (artifact.Digest, error) {
	files := map[string][]byte{}
	var content bytes.Buffer
	if err := p.counts.WriteCompressed(&content); err != nil {
		return "", err
	}
	files[CountsFile] = content.Bytes()
	if p.Trace != nil {
		var err error
		if files[TraceFile], err = compressed(p.Trace); err != nil {
			return "", err
		}
	}
	if tokenizer != nil {
		files[TokenizerFile] = tokenizer
	}
	m.Summary, m.Files = p.Summary, map[string]artifact.Digest{}
	for name, text := range files {
		digest, err := store.Put(ctx, scope, bytes.NewReader(text))
		if err != nil {
			return "", fmt.Errorf("store %s: %w", name, err)
		}
		m.Files[name] = digest
	}
	return publish(ctx, store, scope, m)
}

func compressed(t *trace.Trace) ([]byte, error) {
	var content bytes.Buffer
	encoder, err := zstd.NewWriter(&content, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	err = errors.Join(trace.Write(encoder, t), encoder.Close())
	return content.Bytes(), err
}
