// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/ports"
)

// runProfileCommand returns the exit code, standard output and the termination message.
func runProfileCommand(t *testing.T, args ...string) (code int, out, message string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "termination-log")
	command := newProfileCommand()
	command.SilenceErrors, command.SilenceUsage = true, true
	var stdout bytes.Buffer
	command.SetOut(&stdout)
	command.SetArgs(append(args, "--termination-message", file))
	if err := command.ExecuteContext(t.Context()); err != nil {
		code = cli.ExitCode(err)
	}
	text, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return code, stdout.String(), string(text)
}

func TestProfileFailureConditions(t *testing.T) {
	dataset := clitest.WriteFile(t, "d.jsonl", "{\"prompt\": \"a\"}\n")
	report, err := checkpoint.Inspect(clitest.TinyModel)
	if err != nil {
		t.Fatal(err)
	}
	deaf := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			http.Error(w, "routed experts are not available", http.StatusBadRequest)
		}
	}))
	defer deaf.Close()
	hanging := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			io.Copy(io.Discard, r.Body) //nolint:errcheck // the server then detects that the client disconnects
			<-r.Context().Done()
		}
	}))
	defer hanging.Close()
	nobody := ports.Address(t)
	common := []string{"--model-path", clitest.TinyModel, "--dataset", dataset}
	whole := []string{"--model-path", "none", "--dataset", "none", "--endpoint", deaf.URL, "--out", "t.safetensors"}
	id := profile.ID(report.ModelDigest, "other", profile.Sampling{Requests: 2000, Tokens: 200000, RequestTokens: 512})
	for name, tc := range map[string]struct {
		args []string
		code int
		want []string
	}{
		"no endpoint":       {append(common, "--out", "t.safetensors"), 3, []string{"--endpoint is missing"}},
		"other backend":     {append(common, "--out", "t.safetensors", "--backend", "Jax"), 3, []string{`--backend is "Jax"; it must be Engine or Transformers`}},
		"unused flag":       {append(common, "--out", "t.safetensors", "--backend", "Transformers", "--engine", "VLLM"), 3, []string{"--engine has no effect with --backend Transformers"}},
		"unused recorder":   {append(common, "--out", "t.safetensors", "--endpoint", deaf.URL, "--python", "python3"), 3, []string{"--python has no effect with --backend Engine"}},
		"no interpreter":    {append(common, "--out", "t.safetensors", "--backend", "Transformers", "--python", "/nonexistent"), 3, []string{"--python: failed to start /nonexistent"}},
		"no recorder":       {append(common, "--out", "t.safetensors", "--backend", "Transformers", "--python", "false"), 3, []string{"the recorder did not start: exit status 1"}},
		"dead recorder":     {append(common, "--out", "t.safetensors", "--backend", "Transformers", "--endpoint", "http://"+nobody, "--wait", "200ms"), 4, []string{"does not serve within 200ms"}},
		"nowhere to":        {append(common, "--endpoint", deaf.URL), 3, []string{"exactly one of --out and --store-scope"}},
		"unknown flag":      {[]string{"--nope"}, 3, nil},
		"name of the trace": {append(common, "--endpoint", deaf.URL, "--out", "t.bin"), 3, []string{"t.bin", ".safetensors.zst"}},
		"no folder":         {append(common, "--endpoint", deaf.URL, "--out", "/nonexistent/t.safetensors"), 3, []string{"--out: failed to create /nonexistent/t.safetensors"}},
		"any model":         {append(whole, "--model-digest", ""), 3, []string{"--model-digest is empty"}},
		"any data set":      {append(whole, "--dataset-digest", ""), 3, []string{"--dataset-digest is empty"}},
		"no requests":       {append(whole, "--requests", "0"), 3, []string{"--requests is 0; it must be at least 1"}},
		"no tokens":         {append(whole, "--tokens", "0"), 3, []string{"--tokens is 0"}},
		"no prompts":        {append(whole, "--request-tokens", "-1"), 3, []string{"--request-tokens is -1"}},
		"nothing generated": {append(whole, "--new-tokens", "0"), 3, []string{"--new-tokens is 0"}},
		"nothing in flight": {append(whole, "--concurrency", "0"), 3, []string{"--concurrency is 0"}},
		"no source":         {[]string{"--model-path", "none", "--endpoint", deaf.URL, "--out", "t.safetensors"}, 3, []string{"exactly one of --dataset and --own-text"}},
		"two sources":       {append(whole, "--own-text"), 3, []string{"exactly one of --dataset and --own-text"}},
		"own text of torch": {[]string{"--model-path", "none", "--own-text", "--backend", "Transformers", "--out", "t.safetensors"}, 3, []string{"--own-text needs --backend Engine"}},
		"own text, longer":  {[]string{"--model-path", "none", "--own-text", "--endpoint", deaf.URL, "--new-tokens", "2", "--out", "t.safetensors"}, 3, []string{"--new-tokens has no effect", "--own-text=true"}},
		"own text, refused": {[]string{"--model-path", clitest.TinyModel, "--own-text", "--endpoint", deaf.URL, "--out", "t.safetensors"}, 4, []string{"routed experts are not available", "own text "}},
		"too short a trace": {append(whole, "--trace-tokens", "512"), 3, []string{"--trace-tokens is 512; it must be at least --request-tokens plus --new-tokens, 513"}},
		"another model":     {append(common, "--endpoint", deaf.URL, "--out", "t.safetensors", "--model-digest", "abc"), 3, []string{report.ModelDigest, "not abc"}},
		"another data set":  {append(common, "--endpoint", deaf.URL, "--out", "t.safetensors", "--dataset-digest", "abc"), 3, []string{"d.jsonl", "not abc"}},
		"another scope":     {append(common, "--endpoint", deaf.URL, "--store-scope", "team/"+id), 3, []string{"--store-scope has the profile id " + id}},
		"no scope":          {append(common, "--endpoint", deaf.URL, "--store-scope", id), 3, []string{"want namespace/id"}},
		"no data set":       {[]string{"--model-path", clitest.TinyModel, "--dataset", "/nonexistent", "--endpoint", deaf.URL, "--out", "t.safetensors"}, 3, []string{"/nonexistent", "does not exist"}},
		"no routed experts": {append(common, "--endpoint", deaf.URL, "--out", "t.safetensors"), 4, []string{"routed experts are not available", "line 1"}},
		"dead engine":       {append(common, "--endpoint", "http://"+nobody, "--out", "t.safetensors", "--dedicated", "--wait", "200ms"), 4, []string{"does not serve within 200ms"}},
		"unreachable":       {append(common, "--endpoint", "http://"+nobody, "--out", "t.safetensors", "--wait", "200ms"), 1, []string{"does not serve within 200ms"}},
		"too slow":          {append(common, "--endpoint", hanging.URL, "--out", "t.safetensors", "--timeout", "300ms"), 4, []string{"the run exceeded --timeout"}},
		"progress address":  {append(common, "--endpoint", deaf.URL, "--out", "t.safetensors", "--progress-address", "192.0.2.1:1"), 1, []string{"--progress-address"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, message := runProfileCommand(t, tc.args...)
			if code != tc.code || out != "" || strings.ContainsRune(message, '\n') {
				t.Errorf("exit code %d, want %d; output %q, message %q", code, tc.code, out, message)
			}
			for _, part := range tc.want {
				if !strings.Contains(message, part) {
					t.Errorf("%q lacks %q", message, part)
				}
			}
		})
	}
}

func TestJoinIP(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.1:9090": "192.0.2.1:9090", "2001:db8::1:9090": "[2001:db8::1]:9090", "[2001:db8::1]:9090": "[2001:db8::1]:9090", ":9090": ":9090",
	} {
		if got := joinIP(address); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
	for address, want := range map[string]string{
		"http://192.0.2.1:30000": "http://192.0.2.1:30000", "http://2001:db8::1:30000/": "http://[2001:db8::1]:30000",
		"http://m.team.svc:8000/x": "http://m.team.svc:8000/x", "nonsense": "nonsense",
	} {
		if got := joinURL(address); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
}

func TestServeProgress(t *testing.T) {
	board := &profile.ProgressHandler{}
	address := ports.Address(t)
	stop, err := serveProgress(address, board)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	board.Set(profile.Progress{Phase: profile.Recording, Done: 5, Total: 20, Tokens: 100, TokensTotal: 200, Elapsed: 10_000_000_000})
	response, err := http.Get("http://" + address + profile.ProgressPath)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var got profile.ProgressReport
	if err := json.NewDecoder(response.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	want := profile.ProgressReport{Phase: profile.Recording, RequestsDone: 5, RequestsTotal: 20, Tokens: 100, TokensPerSecond: 10, RemainingSeconds: 10}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// fakeStore returns an artifact store with the given handler.
func fakeStore(t *testing.T, handler http.HandlerFunc) connectStore {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	token := clitest.WriteFile(t, "token", "token")
	return func(retryFor time.Duration) (*access.Client, error) {
		return access.NewClient(access.Config{URL: server.URL, CA: ca, TokenFile: token, RetryFor: retryFor})
	}
}

// A full store is reported before the first request, so that devices are not used for a profile that cannot be stored.
func TestProfileToFullStore(t *testing.T) {
	store := fakeStore(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			http.Error(w, `{"error": "no result"}`, http.StatusNotFound)
			return
		}
		http.Error(w, `{"error": "the store is full: enlarge its volume"}`, http.StatusInsufficientStorage)
	})
	manifest := profile.Manifest{ModelDigest: "model", DatasetDigest: "dataset"}
	o := profileOptions{scope: "team/" + manifest.ID(), model: clitest.TinyModel}
	_, err := profileToStore(t.Context(), store, o, manifest, func() (*profile.Profile, error) {
		t.Error("a profile was recorded")
		return nil, errors.New("recorded")
	}, func() {})
	if code := cli.ExitCode(profileError{err}); code != exitStoreFull || !strings.Contains(err.Error(), "before the first request") || !strings.Contains(err.Error(), "enlarge its volume") {
		t.Errorf("exit code %d, %v", code, err)
	}
}

// TestProfileStoresEmbeddings checks that a profile contains the token embeddings of the checkpoint or, if they cannot
// be extracted, the reason.
func TestProfileStoresEmbeddings(t *testing.T) {
	recorded, err := trace.Open(t.Context(), clitest.SampleTrace)
	if err != nil {
		t.Fatal(err)
	}
	recorded.Model.Digest = "model"
	m := recorded.Model
	model := profile.Model{Type: m.Type, Experts: m.Experts, TopK: m.TopK, Vocabulary: m.Vocabulary, Layers: m.Layers, HiddenLayers: m.HiddenLayers, HiddenSize: m.HiddenSize, Config: m.Config}
	damaged := t.TempDir()
	if err := os.WriteFile(filepath.Join(damaged, "config.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		model string
		want  string
	}{
		"tiny model":       {clitest.TinyModel, ""},
		"no valid weights": {damaged, "has neither model.safetensors.index.json"},
	} {
		t.Run(name, func(t *testing.T) {
			stored := map[string][]byte{}
			result := ""
			store := fakeStore(t, func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					t.Error(err)
				}
				_, digest, ofArtifact := strings.Cut(r.URL.Path, "/artifacts/")
				switch {
				case r.Method == http.MethodPut && ofArtifact:
					stored[digest] = body
				case r.Method == http.MethodPut:
					result = string(body)
					w.Write(body) //nolint:errcheck // the client reports an incomplete response
				default:
					http.Error(w, `{"error": "no result"}`, http.StatusNotFound)
				}
			})
			sampling := profile.Sampling{Requests: 100, Tokens: 10000, RequestTokens: 512}
			manifest := profile.Manifest{ModelDigest: "model", DatasetDigest: "dataset", Sampling: sampling}
			o := profileOptions{scope: "team/" + manifest.ID(), model: tc.model}
			_, err := profileToStore(t.Context(), store, o, manifest, func() (*profile.Profile, error) {
				return profile.FromSequences([]*trace.Trace{recorded}, model, "model", sampling, 1)
			}, func() {})
			if err != nil {
				t.Fatal(err)
			}
			var published artifact.Result
			var got profile.Manifest
			if err := errors.Join(json.Unmarshal([]byte(result), &published), json.Unmarshal(stored[string(published.Digest)], &got)); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(got.NoEmbeddings, tc.want) || (got.NoEmbeddings == "") != (tc.want == "") {
				t.Errorf("reason %q, want %q", got.NoEmbeddings, tc.want)
			}
			digest, has := got.Files[profile.EmbeddingsFile]
			if has != (tc.want == "") {
				t.Fatalf("files %v", got.Files)
			}
			const header, bytesOfNumber = 128, 2
			if vectors := stored[string(digest)]; has && len(vectors) != header+4096*128*bytesOfNumber {
				t.Errorf("%d bytes of embeddings", len(vectors))
			}
		})
	}
}

// A recorded profile waits for free space in the store as long as for an unavailable store.
func TestUntilRoom(t *testing.T) {
	full := fmt.Errorf("store trace: %w", &artifact.StatusError{Code: http.StatusInsufficientStorage, Message: "full"})
	other := errors.New("forbidden")
	for name, tc := range map[string]struct {
		room time.Duration // when space is freed
		then error
		want error
		end  time.Duration // latest end
	}{
		"room at once":          {0, nil, nil, 0},
		"another fault":         {0, other, other, 0},
		"room in a while":       {5 * time.Minute, nil, nil, 5*time.Minute + profileFullPeriod},
		"no room":               {time.Hour, nil, full, profileStoreRetry},
		"another fault by then": {time.Minute, other, other, time.Minute + profileFullPeriod},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				err := untilRoom(t.Context(), func() error {
					if time.Since(begin) < tc.room {
						return full
					}
					return tc.then
				})
				if took := time.Since(begin); !errors.Is(err, tc.want) || took > tc.end || took < min(tc.room, profileStoreRetry-profileFullPeriod) {
					t.Errorf("%v after %v, want %v", err, took, tc.want)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errTimeout)
		defer cancel()
		if err := untilRoom(ctx, func() error { return full }); cli.ExitCode(profileError{err}) != exitStoreFull {
			t.Errorf("after the deadline: %v, want the store's error", err)
		}
	})
}

// TestUnreadTokenizers checks that a checkpoint with only the tokenizer files of Mistral or sentencepiece is profiled
// without a tokenizer, so that the request router asks the engine for token IDs.
func TestUnreadTokenizers(t *testing.T) {
	for _, name := range []string{"tekken.json", "tokenizer.model"} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(`{"config": {}}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if words, err := readTokenizer(dir); words != nil || err != nil {
			t.Errorf("%s: a tokenizer of %d bytes, error %v", name, len(words), err)
		}
	}
}
