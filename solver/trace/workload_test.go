// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// long returns a trace with documents that yield conversations of several turns, some longer than the maximum of a
// conversation.
func long() *trace.Trace {
	return tracetest.Generate(tracetest.Shape{
		Experts: 8, TopK: 2, Layers: 2, Vocabulary: 500, Domains: 3, DocumentsPerDomain: 12, RequestsPerDocument: 4, TokensPerRequest: 700,
	}, 1)
}

func TestWorkloadsBuildValidTraces(t *testing.T) {
	from := long()
	requests := from.AllRequests()[5:]
	for _, w := range trace.Workloads {
		built, served := w.Build(from, requests, 7)
		again, _ := w.Build(from, requests, 7)
		other, _ := w.Build(from, requests, 8)
		if !slices.Equal(built.Tokens, again.Tokens) || !slices.Equal(built.Offsets, again.Offsets) {
			t.Errorf("%s: the same seed yields two traces", w)
		}
		if w != trace.Recorded && slices.Equal(built.Offsets, other.Offsets) {
			t.Errorf("%s: two seeds yield the same trace", w)
		}
		if err := built.Validate(); err != nil {
			t.Errorf("%s: %v", w, err)
		}
		if w == trace.Recorded {
			if built != from || !slices.Equal(served, requests) {
				t.Errorf("%s: not the trace itself", w)
			}
		} else if len(served) != built.Requests() {
			t.Errorf("%s: %d of %d requests are served", w, len(served), built.Requests())
		}
		for seed := range uint64(3) {
			order := w.Arrivals(built, served, seed)
			if sorted := slices.Sorted(slices.Values(order)); !slices.Equal(sorted, slices.Sorted(slices.Values(served))) {
				t.Errorf("%s: arrivals differ from the served requests", w)
			}
			if !slices.Equal(order, w.Arrivals(built, served, seed)) {
				t.Errorf("%s: two orders for one seed", w)
			}
		}
	}
}

// A turn begins with the whole previous turn, adds 128 to 256 tokens, and arrives after it.
func TestMultiTurn(t *testing.T) {
	single := tracetest.Generate(tracetest.Shape{
		Experts: 8, TopK: 2, Layers: 2, Vocabulary: 500, Domains: 2, DocumentsPerDomain: 3, RequestsPerDocument: 2, TokensPerRequest: 9000,
	}, 1)
	for name, from := range map[string]*trace.Trace{"documents longer than a conversation": long(), "requests longer than one": single} {
		t.Run(name, func(t *testing.T) { checkMultiTurn(t, from) })
	}
}

func checkMultiTurn(t *testing.T, from *trace.Trace) {
	t.Helper()
	requests := from.AllRequests()
	built, served := trace.MultiTurn.Build(from, requests, 3)
	at := make([]int, built.Requests())
	for i, r := range trace.MultiTurn.Arrivals(built, served, 1) {
		at[r] = i
	}
	said, turns := 0, 0
	for r := range built.Requests() {
		added, last := built.Length(r), r+1 == built.Requests() || built.Documents[r+1] != built.Documents[r]
		if r > 0 && built.Documents[r] == built.Documents[r-1] {
			turns++
			before := built.Request(r - 1)
			if !slices.Equal(before, built.Request(r)[:len(before)]) {
				t.Fatalf("turn %d does not begin with the previous turn", r)
			}
			added -= len(before)
			if at[r] < at[r-1] {
				t.Fatalf("turn %d arrives before the previous turn", r)
			}
		}
		if added > 256 || added < 128 && !last {
			t.Fatalf("turn %d adds %d tokens", r, added)
		}
		if last {
			if built.Length(r) > 2048 {
				t.Fatalf("a conversation has %d tokens", built.Length(r))
			}
			said += built.Length(r)
		}
	}
	if want := from.TokenCount(requests); said != want || turns == 0 {
		t.Errorf("conversations have %d tokens, want %d as in the requests", said, want)
	}
}

// Requests of a group begin with the same 256 to 1,024 tokens and end with a recorded request of their domain.
func TestSharedPrefix(t *testing.T) {
	from := long()
	built, _ := trace.SharedPrefix.Build(from, from.AllRequests(), 3)
	var recorded []string
	for r := range from.Requests() {
		recorded = append(recorded, key(from.Request(r)))
	}
	groups, shared := 0, 0
	for r := range built.Requests() {
		ends := slices.IndexFunc(recorded, func(whole string) bool { return strings.HasSuffix(key(built.Request(r)), whole) })
		if ends < 0 {
			t.Fatalf("request %d does not end with a recorded one", r)
		}
		if r == 0 || built.Documents[r] != built.Documents[r-1] {
			groups++
			continue
		}
		n := built.Length(r) - from.Length(ends)
		if built.Domains[r] != built.Domains[r-1] || from.Domains[ends] != built.Domains[r] {
			t.Fatal("a group has two domains")
		}
		if n < 256 || n > 1024 || !slices.Equal(built.Request(r)[:n], built.Request(r - 1)[:n]) {
			t.Fatalf("request %d shares %d tokens with its group", r, n)
		}
		shared++
	}
	if groups < 4 || shared < 3*groups {
		t.Errorf("%d groups, %d requests that share", groups, shared)
	}
}

func key(tokens []int32) string {
	var b strings.Builder
	for _, token := range tokens {
		b.WriteRune(rune(token + 1))
	}
	return b.String()
}

func TestParseWorkload(t *testing.T) {
	for _, w := range trace.Workloads {
		if got, err := trace.ParseWorkload(string(w)); err != nil || got != w {
			t.Errorf("%s: %s, %v", w, got, err)
		}
	}
	if _, err := trace.ParseWorkload("chat"); err == nil || !strings.Contains(err.Error(), "allowed is recorded, shared-prefix") && !strings.Contains(err.Error(), "allowed is recorded shared-prefix") {
		t.Errorf("error %v", err)
	}
}
