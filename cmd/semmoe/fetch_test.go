// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// The pod of an engine starts without the plan if the store is unavailable, and reports the reason. Invalid flags are
// reported as such.
func TestFetchWithoutStore(t *testing.T) {
	t.Setenv("SEMMOE_STORE_URL", "")
	digest := strings.Repeat("ab", 32)
	for name, tc := range map[string]struct {
		args []string
		code int // 0: no failure
		says string
	}{
		"needed":          {[]string{"--namespace=ns", "--plan-digest=" + digest}, 1, "SEMMOE_STORE_URL"},
		"optional":        {[]string{"--namespace=ns", "--plan-digest=" + digest, "--optional"}, 0, "SEMMOE_STORE_URL"},
		"no namespace":    {[]string{"--plan-digest=" + digest, "--optional"}, cli.ExitInvalidFile, "--namespace is missing"},
		"a short digest":  {[]string{"--namespace=ns", "--plan-digest=abc", "--optional"}, cli.ExitInvalidFile, "--plan-digest"},
		"a negative wait": {[]string{"--namespace=ns", "--plan-digest=" + digest, "--wait=-1s"}, cli.ExitInvalidFile, "--wait is -1s"},
		"follow nothing":  {[]string{"--namespace=ns", "--plan-digest=" + digest, "--follow"}, cli.ExitInvalidFile, "--follow needs --tables"},
		"no such flag":    {[]string{"--nothing"}, cli.ExitInvalidFile, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			out, message := filepath.Join(dir, "plan"), filepath.Join(dir, "message")
			command := newFetchCommand()
			command.SilenceErrors, command.SilenceUsage = true, true
			command.SetErr(&bytes.Buffer{})
			command.SetArgs(append([]string{"--out=" + out, "--termination-message=" + message}, tc.args...))
			err := command.ExecuteContext(t.Context())
			if (err == nil) != (tc.code == 0) || err != nil && cli.ExitCode(err) != tc.code {
				t.Errorf("error %v, want exit code %d", err, tc.code)
			}
			text, _ := os.ReadFile(message)
			if !strings.Contains(string(text), tc.says) {
				t.Errorf("termination message %q, want %q", text, tc.says)
			}
			if _, err := os.Stat(out); !os.IsNotExist(err) {
				t.Errorf("left behind: %v", err)
			}
		})
	}
}

// A fetched plan replaces only a plan: a directory with other content is an error before the store is used.
func TestFetchLeavesOtherDirectories(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "thesis.txt")
	if err := os.WriteFile(precious, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	flags := fetchFlags{namespace: "ns", planDigest: strings.Repeat("ab", 32), out: dir}
	if err := flags.check(); cli.ExitCode(err) != cli.ExitInvalidFile || !strings.Contains(err.Error(), "--out: "+dir+" is not empty and contains no plan") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}

// interruptedStore returns an artifact store that interrupts the given number of its responses with artifacts.
func interruptedStore(t *testing.T, interruptions int) connectStore {
	var mu sync.Mutex
	bodies := map[string][]byte{} // by path
	return fakeStore(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		name := r.URL.Path
		if r.Method == http.MethodPut {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			bodies[name] = body
			w.Write(body) //nolint:errcheck // the client reports errors
			return
		}
		body, known := bodies[name]
		if !known {
			http.Error(w, `{"error": "no such artifact"}`, http.StatusNotFound)
			return
		}
		if interruptions == 0 || len(body) < 1<<10 {
			w.Write(body) //nolint:errcheck // the client reports errors
			return
		}
		interruptions--
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		w.Write(body[:len(body)/2])           //nolint:errcheck // the client reports errors
		http.NewResponseController(w).Flush() //nolint:errcheck // as above
		panic(http.ErrAbortHandler)
	})
}

// An interrupted transfer is retried within --wait, as an unavailable store is.
func TestFetchRetriesAfterAnInterruption(t *testing.T) {
	from, _ := samplePlan(t, "dp")
	_, a, err := plan.Read(from)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		interruptions int
		wait          time.Duration
		fetched       bool
	}{
		"once":        {1, time.Minute, true},
		"no patience": {1, 0, false},
		"for ever":    {-1, 2 * time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			connect := interruptedStore(t, tc.interruptions)
			client, err := connect(0)
			if err == nil {
				err = bundle.Publish(t.Context(), client, "ns", a, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			flags := fetchFlags{namespace: "ns", planDigest: a.Digest, out: filepath.Join(t.TempDir(), "plan"), wait: tc.wait}
			err = flags.fetch(t.Context(), connect)
			if (err == nil) != tc.fetched || err != nil && !errors.Is(err, artifact.ErrInterrupted) {
				t.Fatalf("error %v", err)
			}
			if _, got, err := plan.Read(flags.out); tc.fetched && (err != nil || got.Digest != a.Digest) {
				t.Errorf("fetched %v, %v", got, err)
			}
		})
	}
}

// A pod starts with the tables in use, and with those of its plan if the tables in use are unknown or unavailable.
func TestFetchTablesInUse(t *testing.T) {
	from, _ := samplePlan(t, "dp")
	p, base, err := plan.Read(from)
	if err != nil {
		t.Fatal(err)
	}
	p.Layout, p.Seed = base.Digest, p.Seed+1
	newer, err := plan.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	connect := interruptedStore(t, 0)
	client, err := connect(0)
	for _, a := range []*plan.Artifact{base, newer} {
		if err == nil {
			err = bundle.Publish(t.Context(), client, "ns", a, nil)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		tables string // empty for no file
		want   *plan.Artifact
	}{
		"no file":          {"", base},
		"newer tables":     {`{"` + base.Digest + `":"` + newer.Digest + `"}`, newer},
		"of another plan":  {`{"` + newer.Digest + `":"` + newer.Digest + `"}`, base},
		"not in the store": {`{"` + base.Digest + `":"` + strings.Repeat("ab", 32) + `"}`, base},
		"no digests":       {`{"` + base.Digest + `":"newer"}`, base},
		"no object":        {`[]`, base},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			flags := fetchFlags{namespace: "ns", planDigest: base.Digest, out: filepath.Join(dir, "plan"), tables: filepath.Join(dir, "tables.json")}
			if tc.tables != "" {
				if err := os.WriteFile(flags.tables, []byte(tc.tables), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(flags.check(), flags.fetch(t.Context(), connect)); err != nil {
				t.Fatal(err)
			}
			if digest, err := plan.DigestOf(flags.out); err != nil || digest != tc.want.Digest {
				t.Errorf("fetched plan %s, %v; want %s", digest, err, tc.want.Digest)
			}
		})
	}
}
