// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// newList returns a list that resolves names from a table, and IP addresses to themselves.
func newList(t *testing.T, text string, defaults ListDefaults) (*List, error) {
	t.Helper()
	if defaults.Engine == "" {
		defaults.Engine = "SGLang"
	}
	l, err := NewList(text, defaults)
	if err == nil {
		l.resolve = func(_ context.Context, host string) ([]string, error) {
			hosts := map[string]string{"a": "10.0.0.1", "b": "10.0.0.2", "alias": "10.0.0.1"}
			switch ip, known := hosts[host]; {
			case known:
				return []string{ip}, nil
			case strings.HasPrefix(strings.TrimPrefix(host, "::ffff:"), "10."):
				return []string{host}, nil
			}
			return nil, errors.New("no such host")
		}
	}
	return l, err
}

// writePlan writes the plan of the small model, for four ranks, to a directory.
func writePlan(t testing.TB, dir string, p planstest.Planned) string {
	t.Helper()
	if err := plan.Write(dir, p.Artifact, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	return dir
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestReadsListedBackends(t *testing.T) {
	first, _ := planstest.Solved(t)
	dir := t.TempDir()
	writePlan(t, filepath.Join(dir, "plan"), first)
	file := filepath.Join(dir, "backends.yaml")
	for name, tc := range map[string]struct {
		text, content string
		defaults      ListDefaults
		want          []Backend
	}{
		"JSON": {text: file, content: `[{"address": "a:1", "ranks": 4, "engine": "VLLM", "planDir": "plan"}]`, want: []Backend{
			{Pod: "a:1", Address: "a:1", Ranks: 4, Engine: "VLLM", PlanDigest: first.Artifact.Digest, ModelDigest: first.Plan.ModelDigest},
		}},
		"YAML": {text: file, content: "- address: https://b\n  name: second\n- {address: a:1, ranks: 2, realization: ReshuffledWeights}\n", want: []Backend{
			{Pod: "a:1", Address: "a:1", Ranks: 2, Engine: "SGLang", Permuted: true},
			{Pod: "second", Address: "b:443", TLS: true, Engine: "SGLang"},
		}},
		"URLs": {text: "http://b:2/,http://a:1", defaults: ListDefaults{Ranks: 3}, want: []Backend{
			{Pod: "a:1", Address: "a:1", Ranks: 3, Engine: "SGLang"}, {Pod: "b:2", Address: "b:2", Ranks: 3, Engine: "SGLang"},
		}},
		"URL with a plan": {text: "http://a:1", defaults: ListDefaults{PlanDir: filepath.Join(dir, "plan")}, want: []Backend{
			{Pod: "a:1", Address: "a:1", Ranks: 4, Engine: "SGLang", PlanDigest: first.Artifact.Digest, ModelDigest: first.Plan.ModelDigest},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			write(t, file, tc.content)
			l, err := newList(t, tc.text, tc.defaults)
			if err != nil {
				t.Fatal(err)
			}
			entries, _, err := l.entries()
			if err != nil {
				t.Fatal(err)
			}
			got, plans, err := l.read(t.Context(), entries)
			if err != nil {
				t.Fatal(err)
			}
			l.use(plans)
			if len(got) != len(tc.want) {
				t.Fatalf("got %+v, want %+v", got, tc.want)
			}
			for i, b := range got {
				if b.PlanDigest != "" && (b.Shape == nil || b.Shape.Experts != planstest.Shape.Experts || l.PlanDir(b.PlanDigest) != filepath.Join(dir, "plan")) {
					t.Errorf("shape %+v, plan directory %q", b.Shape, l.PlanDir(b.PlanDigest))
				}
				b.Shape = nil
				if !b.Equal(tc.want[i]) {
					t.Errorf("got %+v, want %+v", b, tc.want[i])
				}
			}
		})
	}
}

func TestNamesInvalidBackends(t *testing.T) {
	first, _ := planstest.Solved(t)
	dir := t.TempDir()
	writePlan(t, filepath.Join(dir, "plan"), first)
	file := filepath.Join(dir, "backends.json")
	for name, tc := range map[string]struct{ content, want string }{
		"unknown field":       {`[{"address":"a:1"},{"address":"b:1","rank":4}]`, `[1]: field "rank" is unknown: address, name,`},
		"repeated field":      {`[{"address":"a:1","address":"b:1"}]`, `"address" already set`},
		"wrong type":          {`[{"address":"a:1","ranks":"four"}]`, `[0].ranks: a string is invalid: int is allowed`},
		"not a list":          {`{"address":"a:1"}`, `a JSON or YAML list of at least one backend is allowed`},
		"empty list":          {`[]`, `a JSON or YAML list of at least one backend is allowed`},
		"not YAML":            {"[{", `backends.json is invalid: `},
		"no address":          {`[{}]`, `[0].address: "" is invalid: host:port,`},
		"no port":             {`[{"address":"a"}]`, `[0].address: "a" is invalid`},
		"large port":          {`[{"address":"a:65536"}]`, `[0].address: "a:65536" is invalid`},
		"port 0":              {`[{"address":"a:0"}]`, `[0].address: "a:0" is invalid`},
		"IPv6 zone":           {`[{"address":"[fe80::1%eth0]:1"}]`, `[0].address: "[fe80::1%eth0]:1" is invalid: an IPv6 zone is not allowed`},
		"zone of a URL":       {`[{"address":"http://[fe80::1%25eth0]:1"}]`, `is invalid: an IPv6 zone is not allowed`},
		"host":                {`[{"address":"a b:1"}]`, `[0].address: "a b:1" is invalid: host:port,`},
		"alike by port":       {`[{"address":"a:1"},{"address":"a:01","name":"x"}]`, `[0] has the same address, 10.0.0.1:1`},
		"alike, mapped":       {`[{"address":"a:1"},{"address":"[::ffff:10.0.0.1]:1"}]`, `[0] has the same address, 10.0.0.1:1`},
		"path":                {`[{"address":"http://a:1/v1"}]`, `[0].address: "http://a:1/v1" is invalid`},
		"user":                {`[{"address":"http://u:p@a:1"}]`, `is invalid`},
		"scheme":              {`[{"address":"grpc://a:1"}]`, `[0].address: "grpc://a:1" is invalid: host:port, http://`},
		"unresolved":          {`[{"address":"nowhere:1"}]`, `[0].address: "nowhere:1" is invalid: failed to resolve the host: no such host`},
		"alike":               {`[{"address":"a:1"},{"address":"a:1","name":"x"}]`, `backends.json: [0] has the same address, 10.0.0.1:1`},
		"alike by resolution": {`[{"address":"a:1"},{"address":"alias:1"}]`, `[1].address: "alias:1" is invalid:`},
		"equal names":         {`[{"address":"a:1","name":"x"},{"address":"b:1","name":"x"}]`, `[1].name: "x" is invalid:`},
		"name of a header":    {`[{"address":"a:1","name":"x\r\ny"}]`, `[0].name: "x\r\ny" is invalid: letters`},
		"engine":              {`[{"address":"a:1","engine":"Ollama"}]`, `[0].engine: "Ollama" is invalid: SGLang`},
		"ranks":               {`[{"address":"a:1","ranks":5000}]`, `[0].ranks: 5000 is invalid: 0 to 4096 is allowed`},
		"realization":         {`[{"address":"a:1","realization":"Magic"}]`, `[0].realization: "Magic" is invalid: EngineMap or ReshuffledWeights`},
		"plan for others":     {`[{"address":"a:1","ranks":8,"planDir":"plan"}]`, `[0].planDir: "plan" is invalid: the plan is for 4 ranks, and ranks is 8`},
		"no plan":             {`[{"address":"a:1","ranks":8,"planDir":"gone"}]`, `[0].planDir: "gone" is invalid: manifest.json is missing`},
		"plan without effect": {`[{"address":"a:1","ranks":4,"engine":"TensorRTLLM","planDir":"plan"}]`, `engine TensorRTLLM accepts no rank`},
		"too many":            {"[" + strings.Repeat(`{"address":"a:1"},`, maxListed) + `{"address":"a:1"}]`, `at most 1024 are allowed`},
	} {
		t.Run(name, func(t *testing.T) {
			write(t, file, tc.content)
			l, err := newList(t, file, ListDefaults{})
			if err != nil {
				t.Fatal(err)
			}
			entries, _, err := l.entries()
			if err == nil {
				_, _, err = l.read(t.Context(), entries)
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
	for text, want := range map[string]string{
		"":                 "a file, or URLs separated by commas",
		"http://a:1,":      "a file, or URLs separated by commas",
		"http://a:1/x":     `"http://a:1/x".address`,
		"ftp://a:1":        "is invalid",
		"http://:1":        "is invalid",
		"http://a:1?x=y":   "is invalid",
		"http://a:1#f":     "is invalid",
		"https://a:123456": "is invalid",
	} {
		if _, err := newList(t, text, ListDefaults{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
	if _, err := newList(t, file, ListDefaults{Ranks: 2}); err == nil || !strings.Contains(err.Error(), "a file has the fields ranks and planDir") {
		t.Errorf("error %v", err)
	}
}

// observed records what a Source reports.
type observed struct {
	mu   sync.Mutex
	sets [][]Backend
	logs []string
}

func (o *observed) set(backends []Backend) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sets = append(o.sets, backends)
}

func (o *observed) log() logr.Logger {
	return funcr.New(func(_, args string) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.logs = append(o.logs, args)
	}, funcr.Options{})
}

func (o *observed) holds(condition func() bool) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return condition()
}

// TestKeepsTheLastValidList changes the file and a plan, breaks the file, and repairs it.
func TestKeepsTheLastValidList(t *testing.T) {
	first, second := planstest.Solved(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "backends.json")
	l, err := newList(t, file, ListDefaults{})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.watch(t.Context(), time.Millisecond, nil, nil); err == nil {
		t.Fatal("a missing file is no error at the start")
	}
	write(t, file, `[{"address":"a:1"}]`)
	var seen observed
	ctx, stop := context.WithCancel(logr.NewContext(t.Context(), seen.log()))
	synced, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- l.watch(ctx, time.Millisecond, seen.set, func() { close(synced) }) }()
	<-synced
	wait := func(what string, condition func() bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !seen.holds(condition); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not within 10 s: %s; logs %q", what, seen.logs)
			}
		}
	}
	last := func() []Backend { return seen.sets[len(seen.sets)-1] }

	write(t, file, `[{"address":"nowhere:1"}]`)
	failures := func() (n int) {
		for _, line := range seen.logs {
			if strings.Contains(line, "keeping the backends in use") {
				n++
			}
		}
		return n
	}
	wait("the invalid list is logged", func() bool { return failures() == 1 })
	if len(seen.sets) != 1 {
		t.Error("an invalid list changes the backends")
	}

	planDir := filepath.Join(dir, "plan")
	writePlan(t, planDir, first)
	write(t, file, fmt.Sprintf(`[{"address":"b:1","ranks":4,"planDir":%q}]`, planDir))
	wait("the backend of the plan", func() bool { return last()[0].PlanDigest == first.Artifact.Digest })
	if l.PlanDir(first.Artifact.Digest) != planDir {
		t.Error("the directory of the plan is not known")
	}
	other := writePlan(t, filepath.Join(dir, "other"), second)
	if err := errors.Join(os.Rename(planDir, planDir+".old"), os.Rename(other, planDir)); err != nil {
		t.Fatal(err)
	}
	wait("the replaced plan", func() bool { return last()[0].PlanDigest == second.Artifact.Digest })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func FuzzParseEntries(f *testing.F) {
	f.Add(`[{"address":"a:1","ranks":4,"engine":"VLLM","planDir":"plan"}]`)
	f.Add("- address: https://b\n  name: second\n")
	f.Add("- &a {address: x}\n- *a\n")
	f.Fuzz(func(t *testing.T, text string) {
		entries, err := parseEntries("f", []byte(text))
		if err == nil && (len(entries) == 0 || len(entries) > maxListed) {
			t.Errorf("%d entries", len(entries))
		}
		for _, e := range entries {
			e.parseAddress() //nolint:errcheck // only a panic fails
		}
	})
}
