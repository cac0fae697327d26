// SPDX-License-Identifier: Apache-2.0

package livesamples

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/solver/trace"
)

// serve sends a request for live samples.
func serve(k *Keeper, method, path string) *httptest.ResponseRecorder {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+CountsPath, k.ServeCounts)
	mux.HandleFunc("GET "+SequencesPath, k.ServeSequences)
	recorder := httptest.NewRecorder()
	mux.ServeHTTP(recorder, httptest.NewRequest(method, path, nil))
	return recorder
}

// TestRoutedRows checks that rows with invalid experts are omitted: shared experts, ids beyond the vocabulary, and
// memory that was never filled.
func TestRoutedRows(t *testing.T) {
	shape := lar.Shape{Layers: 2, MoELayers: []int{1}, Experts: 4, ExpertsPerToken: 2, Vocabulary: 10}
	experts := []int32{9, 9, 0, 1, 9, 9, 2, 4, 9, 9, 3, 0, 9, 9, 1, -1, 0, 0, 1, 2, 0, 0, 0, 0, 9, 9, 3, 3}
	rows, whole := routedRows(shape, []int32{1, 2, 3, 4, 10, 5, 6}, experts)
	if diff := cmp.Diff(sequence{tokens: []int32{1, 3}, experts: []uint16{0, 1, 3, 0}}, rows, cmp.AllowUnexported(sequence{})); diff != "" || whole {
		t.Errorf("whole is %v, (-want +got):\n%s", whole, diff)
	}
	if rows, whole := routedRows(shape, []int32{1, 2}, []int32{0, 0, 2, 1, 0, 0, 0, 0}); whole || len(rows.tokens) != 1 {
		t.Errorf("with a token of no experts: %+v, whole is %v", rows, whole)
	}
	if rows, whole := routedRows(shape, []int32{1}, experts); !whole || len(rows.tokens) != 1 {
		t.Errorf("%+v, whole is %v", rows, whole)
	}
}

// TestInvalidSequences checks that sequences that do not form a valid trace result in an error instead of an empty
// response.
func TestInvalidSequences(t *testing.T) {
	k := New(prometheus.NewRegistry(), Sequences)
	k.model, k.layers = counts.Model{MoELayers: []int{0}, Experts: 4, ExpertsPerToken: 2, Vocabulary: 10}, 1
	k.keepSequence(sequence{tokens: []int32{1}, experts: []uint16{3, 3}})
	got := serve(k, http.MethodGet, SequencesPath)
	if got.Code != http.StatusInternalServerError || got.Header().Get(HeaderRequests) != "" || !strings.Contains(got.Body.String(), "expert 3 appears twice") {
		t.Errorf("%d, %v, %q", got.Code, got.Header(), got.Body)
	}
}

// TestBounds checks that counts contain one model and the last generations, and that sequences and the time for
// counting are bounded.
func TestBounds(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	k := New(prometheus.NewRegistry(), Sequences)
	k.now = func() time.Time { return now }
	shape := lar.Shape{Layers: 1, MoELayers: []int{0}, Experts: 4, ExpertsPerToken: 2, Vocabulary: 10}
	add := func(digest string, tokens ...int32) {
		t.Helper()
		k.Add(digest, shape, tokens, slices.Repeat([]int32{0, 1}, len(tokens)))
	}
	tokens := func() int64 {
		sum, _, err := k.countsSince(time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		return sum.Tokens()
	}
	add("a", 1, 2)
	add("b", 3) // another model serves at the same time
	if got := tokens(); got != 2 || testutil.ToFloat64(k.uncounted) != 1 {
		t.Errorf("%d tokens of the first model are counted", got)
	}
	now = now.Add(maxAge)
	add("a", 1)
	now = now.Add(maxAge - time.Minute)
	add("a", 1)
	if got := tokens(); got != 4 {
		t.Errorf("%d tokens of two generations are counted", got)
	}
	now = now.Add(time.Minute)
	add("a", 1)
	if got := tokens(); got != 3 {
		t.Errorf("%d tokens are counted once the first generation is over", got)
	}
	if _, since, _ := k.countsSince(time.Time{}); !since.Equal(time.Unix(1_700_000_000, 0).Add(maxAge)) {
		t.Errorf("counts since %v", since)
	}
	now = now.Add(silence)
	add("b", 3)
	if got := tokens(); got != 1 || k.trace(time.Time{}).Requests() != 1 || k.trace(time.Time{}).Model.Digest != "b" {
		t.Errorf("%d tokens of the second model are counted", got)
	}
	// Requests are skipped while counting has used its share of the time.
	clock := now
	k.now = func() time.Time { clock = clock.Add(time.Second); return clock }
	add("b", 3, 4)
	k.now = func() time.Time { return clock.Add(share*time.Second - 1) }
	add("b", 5)
	if got := tokens(); got != 3 {
		t.Errorf("%d tokens are counted", got)
	}
	k.now = func() time.Time { return clock.Add(share * time.Second) }
	add("b", 5)
	if got := tokens(); got != 4 {
		t.Errorf("%d tokens are counted after a pause", got)
	}
	// The last sequences are kept.
	k.sequences, k.ids = nil, 0
	for range 5 {
		k.keepSequence(sequence{tokens: make([]int32, maxIDs/8), experts: make([]uint16, maxIDs/4)})
	}
	if len(k.sequences) != 4 || k.ids != maxIDs {
		t.Errorf("%d sequences of %d ids are kept", len(k.sequences), k.ids)
	}
	for _, name := range []string{"none", "counts", "sequences"} {
		if kind, err := Parse(name); err != nil || string(kind) != name {
			t.Errorf("%s: %v, %v", name, kind, err)
		}
	}
	if _, err := Parse("Counts"); err == nil {
		t.Error("Counts is accepted")
	}
}

// TestSinceATime checks that a query with a start time returns nothing from before it, and only generations that began
// later. A query for sizes only returns the same sizes.
func TestSinceATime(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	now := start
	k := New(prometheus.NewRegistry(), Sequences)
	k.share, k.now = 0, func() time.Time { return now }
	shape := lar.Shape{Layers: 1, MoELayers: []int{0}, Experts: 4, ExpertsPerToken: 2, Vocabulary: 10}
	add := func(tokens int) { k.Add("a", shape, make([]int32, tokens), slices.Repeat([]int32{0, 1}, tokens)) }

	add(generationTokens - 1)
	now = start.Add(generation)
	add(2) // too few tokens for the end of a generation
	now = now.Add(time.Minute)
	add(5) // the next generation begins
	second := now
	get := func(path string) (int, []byte) {
		recorder := serve(k, http.MethodGet, path)
		return recorder.Code, recorder.Body.Bytes()
	}
	for _, tc := range []struct {
		since                  time.Time
		counted, requests, ids int
	}{
		{time.Time{}, generationTokens + 6, 3, generationTokens + 6},
		{start, generationTokens + 6, 3, generationTokens + 6},
		{start.Add(time.Second), 5, 2, 7},
		{second, 5, 1, 5},
		{second.Add(time.Second), 0, 0, 0},
	} {
		query := ""
		if !tc.since.IsZero() {
			query = "?" + QuerySince + "=" + tc.since.Format(time.RFC3339)
		}
		head := func(path string) http.Header {
			recorder := serve(k, http.MethodHead, path)
			if recorder.Code != http.StatusOK || recorder.Body.Len() > 0 {
				t.Fatalf("HEAD %s: %d, %d bytes", path, recorder.Code, recorder.Body.Len())
			}
			return recorder.Header()
		}
		if got := head(CountsPath + query).Get(HeaderTokens); got != fmt.Sprint(tc.counted) {
			t.Errorf("since %v: %s tokens are counted, want %d", tc.since, got, tc.counted)
		}
		sizes := head(SequencesPath + query)
		if got, want := sizes.Get(HeaderRequests)+"/"+sizes.Get(HeaderTokens), fmt.Sprintf("%d/%d", tc.requests, tc.ids); got != want {
			t.Errorf("since %v: %s requests/tokens, want %s", tc.since, got, want)
		}
		code, data := get(CountsPath + query)
		if tc.counted == 0 {
			if code != http.StatusNoContent {
				t.Errorf("since %v: the answer is %d", tc.since, code)
			}
		} else if sum, err := counts.ReadCompressed(bytes.NewReader(data), 1<<24); err != nil || sum.Tokens() != int64(tc.counted) {
			t.Errorf("since %v: %v", tc.since, err)
		}
		code, data = get(SequencesPath + query)
		if tc.requests == 0 {
			if code != http.StatusNoContent {
				t.Errorf("since %v: the answer is %d", tc.since, code)
			}
		} else if recorded, err := trace.Read(bytes.NewReader(data), 1<<24); err != nil || len(recorded.Tokens) != tc.ids {
			t.Errorf("since %v: %v", tc.since, err)
		}
	}
	for _, path := range []string{CountsPath, SequencesPath} {
		if code, data := get(path + "?since=yesterday"); code != http.StatusBadRequest || !bytes.Contains(data, []byte("yesterday")) || !bytes.Contains(data, []byte(`"type":"invalid_request_error"`)) {
			t.Errorf("%s with a malformed time: %d %s", path, code, data)
		}
	}
}
