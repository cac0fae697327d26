// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/model/embeddings"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/solver/trace"
)

// The kinds of samples that a live profile is made from.
const (
	LiveCounts    = "Counts"
	LiveSequences = "Sequences"
)

// Live is the additional part of the manifest of a live profile: the object that the profile was made for, and the
// model. Live traffic has no digest, so no two live profiles have the same inputs.
type Live struct {
	// UID is the UID of the object that the profile was made for.
	UID string `json:"uid"`
	// Samples is LiveCounts or LiveSequences.
	Samples string `json:"samples"`
	Model   Model  `json:"model"`
}

// Model is a trace.Model without the fields of a specific trace.
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

// LiveID returns the ID of the live profile of an object: the ID of the scope of the profile in the artifact store.
func LiveID(uid string) string {
	sum := sha256.Sum256([]byte(Format + "/live/" + uid))
	return hex.EncodeToString(sum[:])[:16]
}

// FetchModel reads the model of a profile.
func FetchModel(ctx context.Context, store *access.Client, scope artifact.Scope, m Manifest) (Model, error) {
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
		return Model{}, fmt.Errorf("failed to read %s of %s: %w", TraceFile, scope, err)
	}
	return Model{found.Type, found.Experts, found.TopK, found.Vocabulary, found.Layers, found.HiddenLayers, found.HiddenSize, found.Config}, nil
}

// Groups returns the number of groups of experts that the gate of the model first chooses among, like
// trace.Model.Groups.
func (m Model) Groups() (int, error) {
	traced := m.traced("")
	return traced.Groups()
}

// traced returns the model of a trace.
func (m Model) traced(digest string) trace.Model {
	return trace.Model{
		Type: m.Type, Experts: m.Experts, TopK: m.TopK, Vocabulary: m.Vocabulary, Layers: m.Layers,
		HiddenLayers: m.HiddenLayers, HiddenSize: m.HiddenSize, Config: m.Config, Digest: digest,
	}
}

// counted returns the model of counts.
func (m Model) counted(digest string) counts.Model {
	return counts.Model{Digest: digest, MoELayers: m.Layers, Experts: m.Experts, ExpertsPerToken: m.TopK, Vocabulary: m.Vocabulary}
}

// FromSequences makes a profile from a uniform sample of the requests that routers kept. The sampling bounds the number
// and the length of requests, and the seed determines the sample. Each request is a separate document, because the
// routers do not know which requests belong together. Requests with the same tokens, for example of a client that
// repeats a request, are one document. FromSequences returns an error for traces of another model than m with the given
// digest.
func FromSequences(parts []*trace.Trace, m Model, digest string, s Sampling, seed uint64) (*Profile, error) {
	type request struct{ part, at int }
	var all []request
	for i, part := range parts {
		if got, want := countedBy(part.Model), m.counted(digest); !reflect.DeepEqual(got, want) {
			return nil, fmt.Errorf("the sequences of a router are of model %+v, want %+v", got, want)
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
			break // including shorter requests that still fit would bias the sample towards short requests
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

// documentsOf assigns document numbers to the requests of a trace, and the same number to equal requests: a plan must
// not be evaluated, nor its drift test calibrated, with requests that it was made from. If all requests are equal, each
// gets its own number, because one document cannot be split.
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

// FromCounts makes a profile without a trace from the counts that routers kept.
func FromCounts(parts []*counts.Counts, m Model, digest string) (*Profile, error) {
	sum := counts.New(m.counted(digest))
	for _, part := range parts {
		if err := sum.Merge(part); err != nil {
			return nil, err
		}
	}
	if sum.Tokens() == 0 {
		return nil, errors.New("the counts of the routers contain no tokens")
	}
	return fromCounts(sum), nil
}

func fromCounts(c *counts.Counts) *Profile {
	return &Profile{counts: c, Summary: Summary{
		Tokens: int(c.Tokens()), DistinctTokens: c.Distinct(), CoverageMilli: 1000 * c.Distinct() / c.Model.Vocabulary, SkewMilli: int(1000 * c.Skew()),
	}}
}

// CheckpointFiles maps the files of a profile that only depend on the checkpoint to their maximum sizes in bytes. The
// largest known tokenizers have about 35 MB.
var CheckpointFiles = map[string]int64{TokenizerFile: 256 << 20, EmbeddingsFile: embeddings.MaxBytes}

// PublishLive stores a live profile, with the CheckpointFiles of its prior profile by name, as the result of its scope.
// It returns the digest of the result of the scope: the result that was published first.
func PublishLive(ctx context.Context, store *access.Client, scope artifact.Scope, p *Profile, m Manifest, prior map[string][]byte) (artifact.Digest, error) {
	files := maps.Clone(prior)
	if files == nil {
		files = map[string][]byte{}
	}
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
	m.Summary, m.Files = p.Summary, map[string]artifact.Digest{}
	for name, text := range files {
		digest, err := store.Put(ctx, scope, bytes.NewReader(text))
		if err != nil {
			return "", fmt.Errorf("failed to store %s: %w", name, err)
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
