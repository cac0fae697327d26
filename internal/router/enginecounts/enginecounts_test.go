// SPDX-License-Identifier: Apache-2.0

package enginecounts

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

func TestParse(t *testing.T) {
	line := func(labels string, value any) string { return fmt.Sprintf("%s{%s} %v\n", Metric, labels, value) }
	local, remote := `layer="3",locality="local",rank="0"`, `rank="0",locality="remote"`
	for name, tc := range map[string]struct {
		text string
		want lar.Activations
		err  string
	}{
		"layers and ranks": {"# TYPE x counter\nvllm:a 1\n" + line(local, 3) + line(local+`,dp="1"`, "2e+03") + line(remote, 5), lar.Activations{Local: 2003, Total: 2008}, ""},
		"with a time":      {line(local, "3 1700000000000"), lar.Activations{Local: 3, Total: 3}, ""},
		"without end":      {line(local, 1) + strings.TrimSuffix(line(remote, 1), "\n"), lar.Activations{Local: 1, Total: 2}, ""},
		"absent":           {"vllm:a 1\n" + Metric + "_other{} 1\n", lar.Activations{}, "does not contain " + Metric},
		"empty":            {"", lar.Activations{}, "does not contain " + Metric},
		"no locality":      {line(`rank="0"`, 1), lar.Activations{}, "no label locality"},
		"no value":         {Metric + "{" + local + "}\n", lar.Activations{}, "has no value"},
		"not a number":     {line(local, "NaN"), lar.Activations{}, `value "NaN"`},
		"negative":         {line(local, -1), lar.Activations{}, `value "-1"`},
		"infinite":         {line(local, "+Inf"), lar.Activations{}, `value "+Inf"`},
		"twice":            {line(local, 3) + line(remote, 1) + line(` layer="3", locality="local",rank="0",`, 3), lar.Activations{}, "occurs twice"},
		"locality in text": {line(`rank="locality=\"local\""`, 1), lar.Activations{}, "no label locality"},
		"without a brace":  {Metric + "{5\n", lar.Activations{}, "no label locality"},
		"too large":        {line(local, "1e300"), lar.Activations{}, `value "1e300"`},
		"too large a sum":  {line(local, "9e15") + line(remote, "9e15"), lar.Activations{}, "counts more than"},
		"a long line":      {strings.Repeat("x", maxLine+1), lar.Activations{}, "token too long"},
		"a long answer":    {strings.Repeat("# x\n", maxAnswer/4) + line(local, 1), lar.Activations{}, "more than 8 MiB"},
	} {
		answered := parse(strings.NewReader(tc.text), nil)
		got, err := answered.activations, answered.activationsErr
		if err != nil {
			got = lar.Activations{}
		}
		if got != tc.want || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %v, error %v; want %v, %q", name, got, err, tc.want, tc.err)
		}
	}
}

// shuffling returns the metrics of an engine that uses the tables of a plan.
func shuffling(plan string, local, remote int64) string {
	return fmt.Sprintf("%s{plan_digest=\"%s\"} 1\n", TablesMetric, plan) + counted(local, remote)
}

// TestShuffledTokens checks that counts are attributed to the tables in use, over time, and that nonsense is named.
func TestShuffledTokens(t *testing.T) {
	start := time.Unix(1_700_000_010, 0).UTC()
	now, pods := start, answers{}
	poller := &Poller{
		Backends:  func() []discovery.Backend { return []discovery.Backend{{Pod: "p", Address: "p:1", Revision: "r"}} },
		Transport: pods, Now: func() time.Time { return now },
	}
	read := func(text string) lar.EngineCounts {
		t.Helper()
		now = now.Add(Period)
		pods["p:1"] = text
		poller.Poll(context.Background())
		counts := poller.Counts()
		if len(counts) != 1 {
			t.Fatalf("counts %+v", counts)
		}
		return counts[0]
	}
	first, second := strings.Repeat("a", 64), strings.Repeat("b", 64)
	read(shuffling(first, 10, 10))
	if got := read(shuffling(first, 40, 20)); got.Tables != first || got.Local != 30 || got.Total != 40 {
		t.Errorf("%+v", got)
	}
	if got := read(shuffling(second, 90, 20)); got.Tables != second || got.Total != 0 {
		t.Errorf("while tables are swapped: %+v", got)
	}
	read(shuffling(second, 100, 30))
	refused := RefusedMetric + "{reason=\"Damaged\"} 1\n" + TablesMetric + "{plan_digest=\"" + first + "\"} 0\n"
	if got := read(refused + shuffling(second, 101, 30)); got.Tables != second || got.Refused != "Damaged" || got.Problem != "" {
		t.Errorf("with files that are refused: %+v", got)
	}
	if got := read(shuffling(second, 3, 3)); !strings.Contains(got.Problem, "has decreased") || got.Total != 0 {
		t.Errorf("after a decrease: %+v", got)
	}
	if got := read(shuffling(second, 5, 5)); got.Problem != "" || got.Total != 4 {
		t.Errorf("after the next reading: %+v", got)
	}
	for name, tc := range map[string]struct{ text, want string }{
		"not a number":   {strings.Replace(shuffling(second, 7, 8), " 7\n", " NaN\n", 1), `value "NaN" is invalid`},
		"negative":       {shuffling(second, -7, 8), `value "-7" is invalid`},
		"several plans":  {shuffling(first, 7, 8) + shuffling(second, 7, 8), "has several values"},
		"no digest":      {shuffling("x", 7, 8), "is invalid"},
		"other value":    {strings.Replace(shuffling(second, 7, 8), "\"} 1\n", "\"} 2\n", 1), "must have the value 1"},
		"without labels": {Metric + "{rank=\"0\"} 5\n", "no label locality"},
	} {
		if got := read(tc.text); !strings.Contains(got.Problem, tc.want) || got.Activations != (lar.Activations{}) {
			t.Errorf("%s: %+v, want %q", name, got, tc.want)
		}
	}
	want := []lar.EngineBucket{
		{Start: start.Add(2 * Period).Truncate(Period), Revision: "r", Tables: first, Activations: lar.Activations{Local: 30, Total: 40}},
		{Start: start.Add(4 * Period).Truncate(Period), Revision: "r", Tables: second, Activations: lar.Activations{Local: 10, Total: 20}},
		{Start: start.Add(5 * Period).Truncate(Period), Revision: "r", Tables: second, Activations: lar.Activations{Local: 1, Total: 1}},
		{Start: start.Add(7 * Period).Truncate(Period), Revision: "r", Tables: second, Activations: lar.Activations{Local: 2, Total: 4}},
	}
	if diff := cmp.Diff(want, poller.Buckets()); diff != "" {
		t.Errorf("buckets (-want +got):\n%s", diff)
	}
	now = now.Add(lar.EngineBuckets * Period)
	read(shuffling(second, 1, 1))
	read(shuffling(second, 2, 2))
	if got := poller.Buckets(); len(got) != 1 {
		t.Errorf("old buckets are kept: %+v", got)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(TablesMetric + `{plan_digest="x"} 1`)
	f.Add(Metric + `{locality="local"} 1`)
	f.Add(Metric + `{locality="remote"}`)
	f.Fuzz(func(t *testing.T, text string) {
		answered := parse(strings.NewReader(text), nil)
		if got := answered.activations; answered.activationsErr == nil && (got.Local < 0 || got.Total < got.Local || got.Total > lar.MaxActivations) {
			t.Fatalf("%q: %v", text, got)
		}
	})
}

// answers contains the metrics of pods by address; a pod without an entry is unreachable.
type answers map[string]string

func (a answers) RoundTrip(request *http.Request) (*http.Response, error) {
	text, ok := a[request.URL.Host]
	if !ok || request.URL.Path != "/metrics" {
		return nil, fmt.Errorf("%s cannot be reached", request.URL)
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(text))}, nil
}

func counted(local, remote int64) string {
	return fmt.Sprintf("%[1]s{locality=\"local\"} %[2]d\n%[1]s{locality=\"remote\"} %[3]d\n", Metric, local, remote)
}

func TestCountsOverTheWindow(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	pods := answers{}
	backends := []discovery.Backend{
		{Pod: "p", Address: "p:1", Revision: "r"}, {Pod: "q", Address: "q:1", Revision: "s"}, {Pod: "silent", Address: "silent:1"}, {Pod: "other", Address: "other:1"},
	}
	poller := &Poller{Backends: func() []discovery.Backend { return backends }, Transport: pods, Now: func() time.Time { return now }}
	read := func(p, q string) {
		t.Helper()
		for address, text := range map[string]string{"p:1": p, "q:1": q, "other:1": "vllm:a 1\n"} {
			if pods[address] = text; text == "" {
				delete(pods, address)
			}
		}
		poller.Poll(context.Background())
	}
	want := func(what string, counts ...lar.EngineCounts) {
		t.Helper()
		order := cmpopts.SortSlices(func(a, b lar.EngineCounts) bool { return a.Pod < b.Pod })
		if diff := cmp.Diff(counts, poller.Counts(), order, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		now = now.Add(Period)
	}
	of := func(pod, revision string, local, total int64) lar.EngineCounts {
		return lar.EngineCounts{Pod: pod, Revision: revision, Activations: lar.Activations{Local: local, Total: total}}
	}
	read(counted(100, 100), counted(0, 0))
	want("one reading")
	read(counted(130, 110), counted(5, 5))
	want("two readings", of("p", "r", 30, 40), of("q", "s", 5, 10))
	read(counted(130, 110), "")
	want("an engine that does not answer once", of("p", "r", 30, 40), of("q", "s", 5, 10))
	read(counted(140, 120), "")
	read(counted(140, 120), "")
	want("the window", of("p", "r", 40, 60), of("q", "s", 5, 10))
	read(counted(150, 120), "")
	want("an engine that does not answer any more", of("p", "r", 50, 70))
	read(counted(160, 120), "")
	want("readings leave the window", of("p", "r", 30, 40))
	read(counted(7, 120), "")
	want("a restarted engine", lar.EngineCounts{Pod: "p", Revision: "r", Problem: Metric + " has decreased: the engine was restarted, or does not count correctly"})
	read(counted(9, 120), "")
	want("after the restart", of("p", "r", 2, 2))
	backends[0].Address = "p:2"
	pods["p:2"] = counted(1000, 1000)
	read("", "")
	want("another pod by the same name")
	backends = nil
	read("", "")
	if want("no pods"); len(poller.pods) != 0 {
		t.Error("pods that are gone are remembered")
	}
	now = now.Add(-time.Hour)
	want("the clock was set back")
}
