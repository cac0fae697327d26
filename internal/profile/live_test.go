// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// recordedModel returns the model of a trace.
func recordedModel(t *testing.T, recorded *trace.Trace) Model {
	t.Helper()
	var file bytes.Buffer
	if err := trace.Write(&file, recorded); err != nil {
		t.Fatal(err)
	}
	m, err := trace.ReadModel(&file)
	if err != nil {
		t.Fatal(err)
	}
	return Model{m.Type, m.Experts, m.TopK, m.Vocabulary, m.Layers, m.HiddenLayers, m.HiddenSize, m.Config}
}

func TestFromSequences(t *testing.T) {
	one, two := tracetest.Generate(tracetest.Small, 1), tracetest.Generate(tracetest.Small, 2)
	m := recordedModel(t, one)
	one.Model.Digest, two.Model.Digest = "model", "model"
	requests, tokens := one.Requests()+two.Requests(), len(one.Tokens)+len(two.Tokens)
	for name, tc := range map[string]struct {
		sampling         Sampling
		requests, tokens int // at most
		all              bool
	}{
		"all":             {Sampling{1 << 30, 1 << 30, 1 << 30}, requests, tokens, true},
		"requests":        {Sampling{10, 1 << 30, 1 << 30}, 10, tokens, false},
		"tokens":          {Sampling{1 << 30, tokens / 3, 1 << 30}, requests, tokens / 3, false},
		"length of those": {Sampling{1 << 30, 1 << 30, 3}, requests, 3 * requests, false},
	} {
		p, err := FromSequences([]*trace.Trace{one, two}, m, "model", tc.sampling, 7)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := p.Trace.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		s := p.Summary
		if s.Requests != p.Trace.Requests() || s.Tokens != len(p.Trace.Tokens) || s.TracedTokens != s.Tokens || s.Requests > tc.requests || s.Tokens > tc.tokens || s.Requests < tc.requests/4 {
			t.Errorf("%s: %d requests, %d tokens; the summary is %+v", name, p.Trace.Requests(), len(p.Trace.Tokens), s)
		}
		if tc.all && (s.Requests != requests || s.Tokens != tokens || !slices.Equal(p.Trace.Tokens[:len(one.Tokens)], one.Tokens) || !slices.Equal(p.Trace.Experts[len(one.Experts):], two.Experts)) {
			t.Errorf("%s: not all requests are taken: %+v", name, s)
		}
		again, err := FromSequences([]*trace.Trace{one, two}, m, "model", tc.sampling, 7)
		if err != nil || !reflect.DeepEqual(again.Trace, p.Trace) {
			t.Errorf("%s: a second call gives a different profile: %v", name, err)
		}
		want := counts.New(m.counted("model"))
		want.Add(p.Trace.Tokens, p.Trace.Experts)
		if p.counts.Tokens() != want.Tokens() || p.counts.Skew() != want.Skew() {
			t.Errorf("%s: the counts differ from those of the trace", name)
		}
	}
	two.Model.Digest = "another"
	if _, err := FromSequences([]*trace.Trace{one, two}, m, "model", Sampling{1 << 30, 1 << 30, 1 << 30}, 7); err == nil || !strings.Contains(err.Error(), "another") {
		t.Errorf("sequences of another model: error = %v", err)
	}
}

// TestDocumentsOf checks that equal requests of all routers are one document, so that a plan that is made from one of
// them is not evaluated with another.
func TestDocumentsOf(t *testing.T) {
	for name, test := range map[string]struct {
		requests [][]int32
		want     []int32
	}{
		"all differ":           {[][]int32{{1, 2}, {2, 1}, {1}}, []int32{0, 1, 2}},
		"some come again":      {[][]int32{{1, 2}, {3}, {1, 2}, {3}, {1, 2, 3}}, []int32{0, 1, 0, 1, 2}},
		"wide token ids":       {[][]int32{{1, 256}, {257}, {1, 256}}, []int32{0, 1, 0}},
		"all of them the same": {[][]int32{{1, 2}, {1, 2}, {1, 2}}, []int32{0, 1, 2}},
	} {
		made := &trace.Trace{Offsets: []int64{0}}
		for _, request := range test.requests {
			made.Tokens = append(made.Tokens, request...)
			made.Offsets = append(made.Offsets, int64(len(made.Tokens)))
		}
		if got := documentsOf(made); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
	one := tracetest.Generate(tracetest.Small, 1)
	m := recordedModel(t, one)
	one.Model.Digest = "model"
	p, err := FromSequences([]*trace.Trace{one, one}, m, "model", Sampling{1 << 30, 1 << 30, 1 << 30}, 7)
	if err != nil {
		t.Fatal(err)
	}
	train, _, err := trace.Split(p.Trace, 50, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range train {
		if other := (r + one.Requests()) % p.Trace.Requests(); !slices.Contains(train, other) {
			t.Errorf("equal requests %d and %d are on different sides of the split", r, other)
		}
	}
}

func TestFromCounts(t *testing.T) {
	one := tracetest.Generate(tracetest.Small, 1)
	m := recordedModel(t, one)
	c, other := counts.NewBounded(m.counted("model"), 1<<20), counts.New(m.counted("another"))
	c.Add(one.Tokens, one.Experts)
	p, err := FromCounts([]*counts.Counts{c, c}, m, "model")
	if err != nil || p.Trace != nil || p.Summary.Tokens != 2*len(one.Tokens) || p.Summary.Requests != 0 || p.Summary.DistinctTokens != c.Distinct() {
		t.Errorf("%+v, %v", p, err)
	}
	for name, parts := range map[string][]*counts.Counts{"none": nil, "another model": {c, other}, "empty": {counts.New(m.counted("model"))}} {
		if _, err := FromCounts(parts, m, "model"); err == nil {
			t.Errorf("%s: no error, want one", name)
		}
	}
}

func TestLiveManifest(t *testing.T) {
	digest := artifact.Digest(strings.Repeat("0a", 32))
	scope := artifact.Scope{Namespace: "a", Kind: artifact.Profile, ID: LiveID("uid")}
	if err := scope.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		live  Live
		files []string
		want  string
	}{
		"only counts":               {Live{UID: "uid", Samples: LiveCounts}, []string{CountsFile}, ""},
		"sequences":                 {Live{UID: "uid", Samples: LiveSequences}, []string{CountsFile, TraceFile}, ""},
		"sequences without a trace": {Live{UID: "uid", Samples: LiveSequences}, []string{CountsFile}, "lists no file trace"},
		"of another object":         {Live{UID: "other", Samples: LiveCounts}, []string{CountsFile}, "the inputs have the ID"},
	} {
		m := Manifest{Format: Format, Live: &tc.live, Files: map[string]artifact.Digest{}}
		for _, file := range tc.files {
			m.Files[file] = digest
		}
		err := m.validate(scope)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}
