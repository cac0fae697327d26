// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// random returns a valid trace of some documents, with domains for even seeds and a look-ahead for every second even
// seed.
func random(seed uint64) *Trace {
	r := rand.New(rand.NewPCG(seed, 7))
	t := &Trace{
		Model:   Model{Type: "qwen3_moe", Experts: 4 + r.IntN(300), TopK: 1 + r.IntN(4), Vocabulary: 10 + r.IntN(100_000), HiddenLayers: 5},
		Offsets: []int64{0},
	}
	for layer := range t.Model.HiddenLayers {
		if layer == 4 || r.IntN(2) == 0 {
			t.Model.Layers = append(t.Model.Layers, layer)
		}
	}
	if seed%2 == 0 {
		t.Model.Domains = []string{"code", "prose", "logs"}
	}
	for document := range int32(2 + r.IntN(20)) {
		for range 1 + r.IntN(3) {
			for range 1 + r.IntN(6) {
				t.Tokens = append(t.Tokens, r.Int32N(int32(t.Model.Vocabulary)))
				for range t.Model.Layers {
					for _, expert := range r.Perm(t.Model.Experts)[:t.Model.TopK] {
						t.Experts = append(t.Experts, uint16(expert))
					}
				}
			}
			t.Offsets = append(t.Offsets, int64(len(t.Tokens)))
			t.Documents = append(t.Documents, 100+document)
			if t.Model.Domains != nil {
				t.Domains = append(t.Domains, uint8(document%3))
			}
		}
	}
	if seed%4 == 2 {
		addLookAhead(t, r)
	}
	return t
}

func addLookAhead(t *Trace, r *rand.Rand) {
	t.LookAhead = &LookAhead{Width: 1 + r.IntN(min(t.Model.Experts, 6))}
	for range len(t.Tokens) * len(t.Model.Layers) {
		score := uint16(LookAheadScale)
		for _, expert := range r.Perm(t.Model.Experts)[:t.LookAhead.Width] {
			t.LookAhead.Experts = append(t.LookAhead.Experts, uint16(expert))
			t.LookAhead.Scores = append(t.LookAhead.Scores, score)
			score -= uint16(r.IntN(int(score) / 2))
		}
	}
}

func encode(t *testing.T, trace *Trace) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := Write(&out, trace); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestRoundTrip(t *testing.T) {
	for seed := range uint64(50) {
		want := random(seed)
		for _, name := range []string{"t.safetensors", "t.safetensors.zst"} {
			path := filepath.Join(t.TempDir(), name)
			if err := Create(path, want); err != nil {
				t.Fatal(err)
			}
			got, err := Open(context.Background(), path)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			ignored := cmpopts.IgnoreFields(Trace{}, "Digest")
			if diff := cmp.Diff(want, got, ignored, cmpopts.IgnoreFields(Model{}, "HiddenLayers", "Config"), cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("seed %d, %s (-want +got):\n%s", seed, name, diff)
			}
			if files, _ := os.ReadDir(filepath.Dir(path)); len(files) != 1 {
				t.Fatalf("%d files remain", len(files))
			}
		}
		if !bytes.Equal(encode(t, want), encode(t, want)) {
			t.Fatalf("seed %d: two writes differ", seed)
		}
	}
}

// A file truncated at any length is reported as truncated and never read in part. The short form tries one length in
// seven.
func TestTruncated(t *testing.T) {
	whole, stride := encode(t, random(2)), 1
	if testing.Short() {
		stride = 7 // prime: cuts occur at every offset of an element
	}
	for length := 0; length < len(whole); length += stride {
		_, err := Read(bytes.NewReader(whole[:length]), MaxBytes)
		if !IsInvalid(err) {
			t.Fatalf("%d of %d bytes: %v", length, len(whole), err)
		}
	}
	if _, err := Read(bytes.NewReader(append(bytes.Clone(whole), 0)), MaxBytes); err == nil || !strings.Contains(err.Error(), "extra bytes") {
		t.Errorf("a byte too many: %v", err)
	}
	if _, err := Read(bytes.NewReader(whole), 10); err == nil || !strings.Contains(err.Error(), "the maximum is 10") {
		t.Errorf("above the bound: %v", err)
	}
}

func TestInvalidTraces(t *testing.T) {
	cases := map[string]struct {
		change  func(*Trace)
		message string
	}{
		"expert out of range": {func(t *Trace) { t.Experts[0] = uint16(t.Model.Experts) }, "routed_experts: token 0, layer"},
		"expert twice":        {func(t *Trace) { t.Model.TopK = 2; t.Experts = make([]uint16, 2*len(t.Tokens)*len(t.Model.Layers)) }, "appears twice"},
		"token out of range":  {func(t *Trace) { t.Tokens[3] = int32(t.Model.Vocabulary) }, "input_ids: token 3 has id"},
		"negative token":      {func(t *Trace) { t.Tokens[3] = -1 }, "input_ids: token 3 has id -1"},
		"unsorted offsets":    {func(t *Trace) { t.Offsets[1] = t.Offsets[2] + 1 }, "offsets must ascend"},
		"an empty request":    {func(t *Trace) { t.Offsets[1] = 0 }, "requests must have at least one token"},
		"no request":          {func(t *Trace) { t.Offsets = []int64{0} }, "the trace has no request"},
		"offsets too short":   {func(t *Trace) { t.Offsets[len(t.Offsets)-1]-- }, "the last offset is"},
		"documents too few":   {func(t *Trace) { t.Documents = t.Documents[1:] }, "request_document has"},
		"unknown domain":      {func(t *Trace) { t.Domains[0] = 9 }, "request_domain: request 0 has domain 9"},
		"top-k too large":     {func(t *Trace) { t.Model.TopK = t.Model.Experts + 1 }, "num_experts_per_tok is"},
		"layers descend":      {func(t *Trace) { t.Model.Layers = []int{4, 3} }, "not an ascending list"},
		"experts too few":     {func(t *Trace) { t.Experts = t.Experts[1:] }, "routed_experts has"},
		"look-ahead expert":   {func(t *Trace) { t.LookAhead.Experts[1] = uint16(t.Model.Experts) }, "lookahead_experts: token 0, layer"},
		"look-ahead twice":    {func(t *Trace) { t.LookAhead.Experts[1] = t.LookAhead.Experts[0] }, "appears twice"},
		"look-ahead order":    {func(t *Trace) { t.LookAhead.Scores[0] = 0 }, "scores must not ascend"},
		"look-ahead short":    {func(t *Trace) { t.LookAhead.Scores = t.LookAhead.Scores[1:] }, "lookahead_experts has"},
		"look-ahead width":    {func(t *Trace) { t.LookAhead.Width = 0 }, "lookahead_experts keeps 0"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			trace := random(2)
			tc.change(trace)
			if err := Write(&bytes.Buffer{}, trace); !IsInvalid(err) || !strings.Contains(err.Error(), tc.message) {
				t.Errorf("error %v, want one with %q", err, tc.message)
			}
		})
	}
}

// For any bytes, Read returns a valid trace or an error.
func FuzzRead(f *testing.F) {
	var plain bytes.Buffer
	if err := Write(&plain, random(2)); err != nil {
		f.Fatal(err)
	}
	f.Add(plain.Bytes())
	var compressed bytes.Buffer
	if err := writeCompressed(&compressed, random(3)); err != nil {
		f.Fatal(err)
	}
	f.Add(compressed.Bytes())
	f.Add(binary.LittleEndian.AppendUint64(nil, 1<<60))
	f.Fuzz(func(t *testing.T, data []byte) {
		trace, err := Read(bytes.NewReader(data), 1<<20)
		if err == nil && trace.Validate() != nil {
			t.Fatalf("read a trace that is not valid: %v", trace.Validate())
		}
	})
}

// No document is in both sets, every request is in one, at least the requested share of each domain's requests is train
// unless that would take its last document, and the seed determines the split.
func TestSplit(t *testing.T) {
	for seed := range uint64(200) {
		trace := random(seed)
		train, test, err := Split(trace, 20, seed)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if len(train)+len(test) != trace.Requests() || len(train) == 0 || len(test) == 0 {
			t.Fatalf("seed %d: %d + %d of %d requests", seed, len(train), len(test), trace.Requests())
		}
		side := map[int32]string{}
		for name, requests := range map[string][]int{"train": train, "test": test} {
			for i, r := range requests {
				if i > 0 && r <= requests[i-1] {
					t.Fatalf("seed %d: %s is not ascending", seed, name)
				}
				if other, known := side[trace.Documents[r]]; known && other != name {
					t.Fatalf("seed %d: document %d is in both sets", seed, trace.Documents[r])
				}
				side[trace.Documents[r]] = name
			}
		}
		againTrain, againTest, _ := Split(trace, 20, seed)
		if !cmp.Equal(train, againTrain) || !cmp.Equal(test, againTest) {
			t.Fatalf("seed %d yields two splits", seed)
		}
		if 100*len(train) < 20*trace.Requests() && trace.Domains == nil {
			t.Fatalf("seed %d: %d of %d requests are train, want at least 20%%", seed, len(train), trace.Requests())
		}
	}
	one := random(2)
	for i := range one.Documents {
		one.Documents[i] = 1
	}
	if _, _, err := Split(one, 20, 1); !IsInvalid(err) || !strings.Contains(err.Error(), "at least two") {
		t.Errorf("one document: %v", err)
	}
	if _, _, err := Split(random(1), 0, 1); !IsInvalid(err) || !strings.Contains(err.Error(), "allowed is 1 to 99") {
		t.Errorf("0%%: %v", err)
	}
}

func TestSubset(t *testing.T) {
	trace := random(2)
	subset := trace.Subset([]int{2, 0})
	if err := subset.Validate(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(trace.Request(2), subset.Request(0)); diff != "" {
		t.Errorf("tokens (-want +got):\n%s", diff)
	}
	position, wanted := int(subset.Offsets[1]), int(trace.Offsets[0])
	if diff := cmp.Diff(trace.Row(wanted, 0), subset.Row(position, 0)); diff != "" {
		t.Errorf("experts (-want +got):\n%s", diff)
	}
	wantExperts, wantScores := trace.LookAheadRow(wanted, 0)
	gotExperts, gotScores := subset.LookAheadRow(position, 0)
	if !cmp.Equal(wantExperts, gotExperts) || !cmp.Equal(wantScores, gotScores) {
		t.Errorf("look-ahead %v %v, want %v %v", gotExperts, gotScores, wantExperts, wantScores)
	}
	if picked := Sample(trace, trace.AllRequests(), 5, 1); trace.TokenCount(picked) < 5 {
		t.Errorf("a sample of %d tokens, want at least 5", trace.TokenCount(picked))
	}
}
