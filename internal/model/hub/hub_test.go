// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/hub/report"
	hubtest "github.com/semmoe/operator/test/hub"
)

const (
	repo   = "org/tiny-moe"
	commit = "0123456789abcdef0123456789abcdef01234567"
	token  = "hf_secret"
)

// content returns reproducible content.
func content(name string, size int) []byte {
	source := rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%-32s", name))[:32]))
	text := make([]byte, size)
	_, _ = source.Read(text)
	return text
}

// checkpoint are the files of the repository that a download needs.
var checkpoint = map[string][]byte{
	"config.json":                      []byte(`{"model_type": "qwen3_moe"}`),
	"model.safetensors.index.json":     []byte(`{"weight_map": {}}`),
	"model-00001-of-00002.safetensors": content("one", 3<<20),
	"model-00002-of-00002.safetensors": content("two", 2<<20+7),
	"tokenizer.json":                   content("tokenizer", 9000),
	"code/modeling.py":                 []byte("import torch\n"),
	"empty.txt":                        {},
}

func bytesOf(files map[string][]byte) int64 {
	var sum int64
	for _, text := range files {
		sum += int64(len(text))
	}
	return sum
}

// world is a hub with one repository, and a host for its contents with another origin.
type world struct {
	t      *testing.T
	server *hubtest.Server
	repo   *hubtest.Repo
	hub    *httptest.Server
	// wrap wraps the handler of the contents; may be nil.
	wrap   func(http.Handler) http.Handler
	volume string

	mu     sync.Mutex
	pauses []time.Duration
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, repo: hubtest.NewRepo(commit), volume: t.TempDir()}
	for name, text := range checkpoint {
		w.add(name, text)
	}
	for _, name := range []string{".gitattributes", "pytorch_model.bin", "original/consolidated.00.pth", "consolidated-00001.safetensors", "chart.png"} {
		w.add(name, []byte("not needed"))
	}
	w.server = &hubtest.Server{
		Repos: map[string]*hubtest.Repo{repo: w.repo}, PageSize: 4,
		Accounts: map[string]hubtest.Account{token: {Member: true, Accepted: true}, "hf_stranger": {}},
	}
	contents := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		handler := w.server.Contents()
		if w.wrap != nil {
			handler = w.wrap(handler)
		}
		handler.ServeHTTP(rw, r)
	}))
	t.Cleanup(contents.Close)
	w.server.ContentURL = contents.URL
	w.hub = httptest.NewServer(w.server)
	t.Cleanup(w.hub.Close)
	return w
}

func (w *world) add(name string, text []byte) {
	w.t.Helper()
	if err := w.repo.Add(name, hubtest.Bytes(text)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) client(token string) *Client {
	w.t.Helper()
	client, err := NewClient(w.hub.URL, token)
	if err != nil {
		w.t.Fatal(err)
	}
	client.pause = func(ctx context.Context, delay time.Duration) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.pauses = append(w.pauses, delay)
		return ctx.Err()
	}
	return client
}

func (w *world) out() string { return filepath.Join(w.volume, "models", "tiny") }

func (w *world) run(ctx context.Context, token, revision string) (*report.Result, error) {
	return Run(ctx, w.client(token), Options{Repo: repo, Revision: revision, Out: w.out(), Connections: 2}, &Progress{})
}

func (w *world) mustRun(revision string) *report.Result {
	w.t.Helper()
	result, err := w.run(w.t.Context(), token, revision)
	if err != nil {
		w.t.Fatal(err)
	}
	return result
}

// checkOutput checks that the volume contains the checkpoint, and nothing else.
func (w *world) checkOutput() {
	w.t.Helper()
	got := map[string][]byte{}
	err := filepath.WalkDir(w.volume, func(name string, item fs.DirEntry, err error) error {
		if err != nil || item.IsDir() {
			return err
		}
		relative, err := filepath.Rel(w.out(), name)
		if err != nil {
			return err
		}
		got[relative], err = os.ReadFile(name)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	delete(got, ManifestFile)
	names := func(files map[string][]byte) []string {
		var names []string
		for name := range files {
			names = append(names, name)
		}
		slices.Sort(names)
		return names
	}
	if diff := cmp.Diff(names(checkpoint), names(got)); diff != "" {
		w.t.Fatalf("files (-want +got):\n%s", diff)
	}
	for name, text := range checkpoint {
		if !bytes.Equal(got[name], text) {
			w.t.Errorf("file %s has other content", name)
		}
	}
}

// received returns the number of requests with a prefix of the path.
func (w *world) received(prefix string) int {
	n := 0
	for _, request := range w.server.Requests() {
		if strings.HasPrefix(request.Path, prefix) {
			n++
		}
	}
	return n
}

func TestDownload(t *testing.T) {
	w := newWorld(t)
	w.repo.Gated = true
	result := w.mustRun("main")
	w.checkOutput()
	want := &report.Result{Repo: repo, Commit: commit, Files: len(checkpoint), Bytes: bytesOf(checkpoint), Downloaded: bytesOf(checkpoint), Seconds: result.Seconds}
	if diff := cmp.Diff(want, result); diff != "" {
		t.Errorf("result (-want +got):\n%s", diff)
	}
	if pages := w.received("/api/models/" + repo + "/tree/"); pages != 4 {
		t.Errorf("%d pages of the tree were requested, want 4", pages)
	}
	for _, request := range w.server.Requests() {
		want := ""
		if "http://"+request.Host == w.hub.URL {
			want = "Bearer " + token
		}
		if request.Authorization != want {
			t.Errorf("%s%s received the authorization %q, want %q", request.Host, request.Path, request.Authorization, want)
		}
	}
	for name := range checkpoint {
		info, err := os.Stat(filepath.Join(w.out(), name))
		if err != nil || info.Mode().Perm()&0o044 != 0o044 {
			t.Errorf("file %s is not readable for engines of other users: %v, %v", name, info.Mode(), err)
		}
	}
}

// TestSecondRunFindsOutput checks that a complete download is found without a request, also without a token and by the
// commit, and that a moved branch is not followed.
func TestSecondRunFindsOutput(t *testing.T) {
	w := newWorld(t)
	w.mustRun("main")
	before := len(w.server.Requests())
	w.repo.Commit = strings.Repeat("f", 40)
	for _, revision := range []string{"main", commit} {
		result, err := w.run(t.Context(), "", revision)
		if err != nil {
			t.Fatal(err)
		}
		want := &report.Result{Repo: repo, Commit: commit, Files: len(checkpoint), Bytes: bytesOf(checkpoint), Found: true, Seconds: result.Seconds}
		if diff := cmp.Diff(want, result); diff != "" {
			t.Errorf("revision %s (-want +got):\n%s", revision, diff)
		}
	}
	if after := len(w.server.Requests()); after != before {
		t.Errorf("the second run sent %d requests, want none", after-before)
	}
	w.checkOutput()
}

// TestOneDownloadForManyRuns checks that concurrent runs download the files once.
func TestOneDownloadForManyRuns(t *testing.T) {
	w := newWorld(t)
	var group errgroup.Group
	var downloaded atomic.Int64
	for range 4 {
		group.Go(func() error {
			result, err := w.run(t.Context(), token, "main")
			if err == nil {
				downloaded.Add(result.Downloaded)
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := downloaded.Load(); got != bytesOf(checkpoint) {
		t.Errorf("four runs downloaded %d bytes, want %d", got, bytesOf(checkpoint))
	}
	w.checkOutput()
}

// cutter is a response that is cut after some bytes.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(data []byte) (int, error) {
	if len(data) < c.left {
		c.left -= len(data)
		return c.ResponseWriter.Write(data)
	}
	_, _ = c.ResponseWriter.Write(data[:c.left])
	c.ResponseWriter.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

// TestCutConnections checks that a file continues where a connection was cut, and that bytes are received once.
func TestCutConnections(t *testing.T) {
	w := newWorld(t)
	w.wrap = func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { next.ServeHTTP(&cutter{rw, 300_000}, r) })
	}
	result := w.mustRun("main")
	w.checkOutput()
	if result.Downloaded != bytesOf(checkpoint) {
		t.Errorf("downloaded %d bytes, want %d", result.Downloaded, bytesOf(checkpoint))
	}
	if len(w.pauses) < 10 {
		t.Errorf("%d pauses, want at least 10: more failures than allowed without progress", len(w.pauses))
	}
}

// TestResumeAfterKill checks that another run continues with the files and the part of a file that a killed run left.
func TestResumeAfterKill(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	client := w.client(token)
	client.http.Transport = &counter{client.http.Transport, 2_000_000, cancel}
	if _, err := Run(ctx, client, Options{Repo: repo, Revision: "main", Out: w.out(), Connections: 1}, &Progress{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("the first run returned %v, want a cancelled context", err)
	}
	if _, err := os.Stat(w.out()); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("the output exists although the download is incomplete: %v", err)
	}
	result := w.mustRun("main")
	w.checkOutput()
	if result.Downloaded == 0 || result.Downloaded > bytesOf(checkpoint)-500_000 {
		t.Errorf("the second run downloaded %d of %d bytes; the first one received about 2000000", result.Downloaded, bytesOf(checkpoint))
	}
}

// counter cancels a context after the client has read a number of bytes.
type counter struct {
	http.RoundTripper
	left   int
	cancel func()
}

func (c *counter) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := c.RoundTripper.RoundTrip(request)
	if err == nil {
		response.Body = &countedBody{response.Body, c}
	}
	return response, err
}

type countedBody struct {
	io.ReadCloser
	of *counter
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.of.left -= n; b.of.left <= 0 {
		b.of.cancel()
	}
	return n, err
}

// staging returns the directory of the incomplete download.
func (w *world) staging() string {
	w.t.Helper()
	return filepath.Join(w.volume, "models", hiddenPrefix+shortHash("tiny")+"-"+shortHash(repo+"@"+commit))
}

// TestLeftovers checks what other runs leave in the staging directory.
func TestLeftovers(t *testing.T) {
	const shard = "model-00001-of-00002.safetensors"
	cases := map[string]struct {
		name       string
		content    []byte
		downloaded int64
	}{
		"the beginning":         {shard + partialSuffix, checkpoint[shard][:1<<20], bytesOf(checkpoint) - 1<<20},
		"all of it":             {shard + partialSuffix, checkpoint[shard], bytesOf(checkpoint) - 3<<20},
		"a damaged beginning":   {shard + partialSuffix, make([]byte, 1<<20), bytesOf(checkpoint) - 1<<20 + 3<<20},
		"more than the file":    {shard + partialSuffix, make([]byte, 4<<20), bytesOf(checkpoint)},
		"a complete file":       {shard, checkpoint[shard], bytesOf(checkpoint) - 3<<20},
		"a file cut by a crash": {shard, checkpoint[shard][:100], bytesOf(checkpoint)},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if err := os.MkdirAll(w.staging(), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(w.staging(), tc.name), tc.content, 0o644); err != nil {
				t.Fatal(err)
			}
			if result := w.mustRun("main"); result.Downloaded != tc.downloaded {
				t.Errorf("downloaded %d bytes, want %d", result.Downloaded, tc.downloaded)
			}
			w.checkOutput()
		})
	}
}

// TestServersThatIgnoreRanges checks a server that answers a range with the whole file.
func TestServersThatIgnoreRanges(t *testing.T) {
	w := newWorld(t)
	var cuts atomic.Int64
	w.wrap = func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			r.Header.Del("Range")
			if cuts.Add(1) <= 3 {
				rw = &cutter{rw, 300_000}
			}
			next.ServeHTTP(rw, r)
		})
	}
	w.mustRun("main")
	w.checkOutput()
}

// TestStalledServer checks that a server that stops to send is asked again.
func TestStalledServer(t *testing.T) {
	w := newWorld(t)
	w.server.StallOnce = true
	client := w.client(token)
	client.stall = time.Second
	if _, err := Run(t.Context(), client, Options{Repo: repo, Revision: "main", Out: w.out(), Connections: 1}, &Progress{}); err != nil {
		t.Fatal(err)
	}
	if len(w.pauses) < 2 {
		t.Errorf("%d pauses, want one for each of two stalled files", len(w.pauses))
	}
	w.checkOutput()
}

// TestRefused checks the errors that another attempt would repeat. Nothing is published.
func TestRefused(t *testing.T) {
	answer := func(path, body string) func(*world) {
		return func(w *world) {
			w.server.Fail = func(rw http.ResponseWriter, r *http.Request) bool {
				if !strings.Contains(r.URL.Path, path) {
					return false
				}
				_, _ = rw.Write([]byte(body))
				return true
			}
		}
	}
	listing := func(paths ...string) func(*world) {
		var files []map[string]any
		for _, path := range paths {
			files = append(files, map[string]any{"type": "file", "path": path, "size": 1, "oid": commit})
		}
		page, _ := json.Marshal(files)
		return answer("/tree/", string(page))
	}
	other := func(name, repo, revision string) func(*world) {
		return func(w *world) {
			m := Manifest{Version: 1, Repo: repo, Revision: revision, Commit: strings.Repeat("e", 40)}
			text, _ := json.Marshal(m)
			w.write(filepath.Join(w.out(), name), text)
		}
	}
	cases := map[string]struct {
		prepare  func(*world)
		token    string
		revision string
		want     []string
	}{
		"no repository, no token":  {prepare: func(w *world) { delete(w.server.Repos, repo) }, want: []string{"401", "does not exist, or needs a token", "tokenSecretRef"}},
		"no repository":            {prepare: func(w *world) { delete(w.server.Repos, repo) }, token: token, want: []string{"404", "does not exist, or the token has no access"}},
		"private":                  {prepare: func(w *world) { w.repo.Private = true }, token: "hf_stranger", want: []string{"404", "the token has no access"}},
		"token of nobody":          {token: "hf_wrong", want: []string{"401", "the token is not valid"}},
		"gated, no token":          {prepare: func(w *world) { w.repo.Gated = true }, want: []string{"401", "gated", "Accept its terms", "set a token"}},
		"gated, terms open":        {prepare: func(w *world) { w.repo.Gated = true }, token: "hf_stranger", want: []string{"403", "gated", "Accept its terms on its page with the account of the token"}},
		"no revision":              {token: token, revision: "v9", want: []string{"404", `revision "v9"`, "no such revision"}},
		"no hub":                   {prepare: answer("/api/", "<html>"), token: token, want: []string{"does not answer in the format of a hub"}},
		"no commit":                {prepare: answer("/revision/", `{"sha": "../../etc"}`), token: token, want: []string{"returns no commit"}},
		"parent directory":         {prepare: listing("../evil.safetensors"), token: token, want: []string{`"../evil.safetensors" is not allowed`}},
		"parent directory inside":  {prepare: listing("a/../../evil"), token: token, want: []string{"is not allowed"}},
		"absolute path":            {prepare: listing("/etc/passwd"), token: token, want: []string{`"/etc/passwd" is not allowed`}},
		"backslash":                {prepare: listing(`a\b`), token: token, want: []string{"is not allowed"}},
		"control character":        {prepare: listing("a\nb"), token: token, want: []string{`"a\nb" is not allowed`}},
		"long name":                {prepare: listing(strings.Repeat("n", 256)), token: token, want: []string{"is not allowed"}},
		"a link":                   {prepare: answer("/tree/", `[{"type": "symlink", "path": "a", "size": 1, "oid": "`+commit+`"}]`), token: token, want: []string{`type "symlink"`}},
		"no digest":                {prepare: answer("/tree/", `[{"type": "file", "path": "a", "size": 1}]`), token: token, want: []string{"has no digest"}},
		"negative size":            {prepare: answer("/tree/", `[{"type": "file", "path": "a", "size": -1, "oid": "`+commit+`"}]`), token: token, want: []string{"has size -1"}},
		"only other configs":       {prepare: listing("generation_config.json", "tokenizer_config.json", "model.safetensors"), token: token, want: []string{"contains no file config.json"}},
		"only Mistral's weights":   {prepare: listing("config.json", "consolidated.safetensors"), token: token, want: []string{"contains no file *.safetensors in the layout of transformers"}},
		"only an adapter":          {prepare: listing("config.json", "adapter_model.safetensors"), token: token, want: []string{"contains no file *.safetensors in the layout of transformers"}},
		"no weights":               {prepare: listing("config.json"), token: token, want: []string{"contains no file *.safetensors"}},
		"a long page":              {prepare: answer("/tree/", "["+strings.Repeat(" ", maxPage)+"]"), token: token, want: []string{"exceeds 8388608 bytes"}},
		"the same file twice":      {prepare: answer("/tree/", `[{"type":"file","path":"a","size":1,"oid":"`+commit+`"},{"type":"file","path":"a","size":1,"oid":"`+commit+`"}]`), token: token, want: []string{"listed twice"}},
		"a file and a directory":   {prepare: answer("/tree/", `[{"type":"file","path":"a","size":1,"oid":"`+commit+`"},{"type":"file","path":"a/b","size":1,"oid":"`+commit+`"}]`), token: token, want: []string{"a file and a directory"}},
		"a file of the user":       {prepare: func(w *world) { w.write(filepath.Join(w.out(), "notes"), nil) }, token: token, want: []string{"contains files that are not from a download"}},
		"a broken manifest":        {prepare: func(w *world) { w.write(filepath.Join(w.out(), ManifestFile), []byte("{")) }, token: token, want: []string{"is no manifest of a download"}},
		"another revision":         {prepare: other(ManifestFile, repo, "v1"), token: token, want: []string{"contains " + repo + " at commit eeee", "not replaced", "spec.model.path"}},
		"another repository":       {prepare: other(ManifestFile, "org/other", "main"), token: token, want: []string{"contains org/other at commit eeee"}},
		"content that is no model": {prepare: func(w *world) { w.wrap = replace("model-00002", []byte("x")) }, token: token, want: []string{"ends after 1 of"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if tc.prepare != nil {
				tc.prepare(w)
			}
			if tc.revision == "" {
				tc.revision = "main"
			}
			before := w.list()
			_, err := w.run(t.Context(), tc.token, tc.revision)
			var invalid *InvalidError
			if name == "content that is no model" {
				if err == nil || errors.As(err, &invalid) {
					t.Fatalf("error %v, want a temporary one", err)
				}
			} else if !errors.As(err, &invalid) {
				t.Fatalf("error %v, want an InvalidError", err)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not contain %q", err, want)
				}
			}
			if tc.token != "" && strings.Contains(err.Error(), tc.token) {
				t.Errorf("error %q contains the token", err)
			}
			if diff := cmp.Diff(before, w.list()); diff != "" {
				t.Errorf("published files (-before +after):\n%s", diff)
			}
		})
	}
}

// replace replaces the content of the files of one size by another one.
func replace(name string, text []byte) func(http.Handler) http.Handler {
	size := 0
	for known, content := range checkpoint {
		if strings.HasPrefix(known, name) {
			size = len(content)
		}
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			recorded := httptest.NewRecorder()
			next.ServeHTTP(recorded, r)
			if recorded.Body.Len() == size {
				_, _ = rw.Write(text)
				return
			}
			_, _ = rw.Write(recorded.Body.Bytes())
		})
	}
}

func (w *world) write(name string, text []byte) {
	w.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, text, 0o644)); err != nil {
		w.t.Fatal(err)
	}
}

// list returns the files of the volume, except hidden ones next to the output.
func (w *world) list() []string {
	w.t.Helper()
	var names []string
	err := filepath.WalkDir(filepath.Dir(w.volume), func(name string, item fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if strings.HasPrefix(item.Name(), hiddenPrefix) {
			if item.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if !item.IsDir() {
			names = append(names, name)
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return names
}

// TestDamagedContent checks that a file with another digest is requested twice, and is never published.
func TestDamagedContent(t *testing.T) {
	w := newWorld(t)
	damaged := bytes.Clone(checkpoint["model-00002-of-00002.safetensors"])
	damaged[5]++
	w.wrap = replace("model-00002", damaged)
	_, err := w.run(t.Context(), token, "main")
	var invalid *InvalidError
	if !errors.As(err, &invalid) || !strings.Contains(err.Error(), "model-00002-of-00002.safetensors is damaged: its digest is ") {
		t.Fatalf("error %v, want one about the digest", err)
	}
	if _, err := os.Stat(w.out()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the output exists: %v", err)
	}
	w.wrap = nil
	if result := w.mustRun("main"); result.Downloaded > bytesOf(checkpoint) {
		t.Errorf("downloaded %d bytes", result.Downloaded)
	}
	w.checkOutput()
}

// TestPauses checks how long a client waits for a server that is overloaded, and that it gives up.
func TestPauses(t *testing.T) {
	cases := map[string]struct {
		status   int
		header   map[string]string
		failures int
		atLeast  time.Duration
		atMost   time.Duration
		fails    bool
	}{
		"Retry-After":            {status: 429, header: map[string]string{"Retry-After": "37"}, failures: 2, atLeast: 37 * time.Second, atMost: 37 * time.Second},
		"RateLimit":              {status: 429, header: map[string]string{"RateLimit": `"api";r=0;t=55`}, failures: 1, atLeast: 55 * time.Second, atMost: 55 * time.Second},
		"a long Retry-After":     {status: 503, header: map[string]string{"Retry-After": "999999"}, failures: 1, atLeast: maxRequestedPause, atMost: maxRequestedPause},
		"an old Retry-After":     {status: 503, header: map[string]string{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, failures: 1, atLeast: minPause, atMost: 2 * minPause},
		"no header":              {status: 502, failures: 3, atLeast: minPause, atMost: 8 * minPause},
		"a hub that is down":     {status: 500, failures: 1 << 20, atLeast: minPause, atMost: 2 * maxPause, fails: true},
		"a request that is late": {status: 408, failures: 1, atLeast: minPause, atMost: 2 * minPause},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			left := tc.failures
			w.server.Fail = func(rw http.ResponseWriter, r *http.Request) bool {
				if !strings.Contains(r.URL.Path, "/revision/") || left == 0 {
					return false
				}
				left--
				for name, value := range tc.header {
					rw.Header().Set(name, value)
				}
				rw.WriteHeader(tc.status)
				return true
			}
			_, err := w.run(t.Context(), token, "main")
			var invalid *InvalidError
			if (err != nil) != tc.fails || errors.As(err, &invalid) {
				t.Fatalf("error %v, fails %v", err, tc.fails)
			}
			want := tc.failures
			if tc.fails {
				want = maxFailures - 1
			}
			if len(w.pauses) != want {
				t.Errorf("%d pauses, want %d", len(w.pauses), want)
			}
			for _, pause := range w.pauses {
				if pause < tc.atLeast || pause > tc.atMost {
					t.Errorf("pause %v, want %v to %v", pause, tc.atLeast, tc.atMost)
				}
			}
		})
	}
}

// TestFullVolume checks the errors of a volume that is too small, read-only, or of another user.
func TestFullVolume(t *testing.T) {
	w := newWorld(t)
	w.server.Fail = func(rw http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/tree/") {
			return false
		}
		fmt.Fprintf(rw, `[{"type":"file","path":"config.json","size":1,"oid":%q},{"type":"file","path":"m.safetensors","size":%d,"oid":%q}]`, commit, int64(1)<<45, commit)
		return true
	}
	if _, err := w.run(t.Context(), token, "main"); err == nil || !strings.Contains(err.Error(), "35184372088833 of 35184372088833 bytes are missing") {
		t.Errorf("error %v, want one about free space", err)
	}
	for _, tc := range []struct {
		err  error
		want string
	}{
		{&fs.PathError{Op: "write", Path: "a", Err: unix.ENOSPC}, "is full"},
		{&fs.PathError{Op: "write", Path: "a", Err: unix.EDQUOT}, "is full"},
		{&fs.PathError{Op: "open", Path: "a", Err: unix.EACCES}, "spec.template.spec.securityContext"},
		{&fs.PathError{Op: "open", Path: "a", Err: unix.EROFS}, "not writable"},
	} {
		if err := volumeError(tc.err); !strings.Contains(err.Error(), tc.want) {
			t.Errorf("error %q does not contain %q", err, tc.want)
		}
	}
}

// TestSelect checks which files of well-known layouts are downloaded.
func TestSelect(t *testing.T) {
	cases := map[string]struct{ files, want []string }{
		"transformers":         {[]string{"model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "pytorch_model.bin", ".gitattributes", "README.md"}, []string{"README.md", "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}},
		"both of Mistral":      {[]string{"consolidated.safetensors", "model.safetensors", "params.json"}, []string{"model.safetensors", "params.json"}},
		"only consolidated":    {[]string{"consolidated.safetensors", "params.json"}, []string{"consolidated.safetensors", "params.json"}},
		"original weights":     {[]string{"original/a.safetensors", "metal/model.bin", "model.safetensors", "tokenizer/original/x.json"}, []string{"model.safetensors", "tokenizer/original/x.json"}},
		"a file like original": {[]string{"original", "tokenizer.model", "tiktoken.model"}, []string{"original", "tiktoken.model", "tokenizer.model"}},
		"hidden directories":   {[]string{"a/.cache/b.json", ".a/b.json", "a/b.json"}, []string{"a/b.json"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var files []File
			for _, path := range tc.files {
				files = append(files, File{Path: path})
			}
			var got []string
			for _, file := range Select(files) {
				got = append(got, file.Path)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEndpoints(t *testing.T) {
	for endpoint, valid := range map[string]bool{
		"https://huggingface.co": true, "http://mirror.internal:8080/hf": true,
		"": false, "huggingface.co": false, "ftp://a": false, "https://user:password@a": false, "https://a?b": false,
	} {
		if _, err := NewClient(endpoint, ""); (err == nil) != valid {
			t.Errorf("endpoint %q: error %v, valid %v", endpoint, err, valid)
		}
	}
	client, err := NewClient("http://mirror.internal:8080/hf/", "")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := client.address(escaped("org/m/a b#c%")...).String(), "http://mirror.internal:8080/hf/org/m/a%20b%23c%25"; got != want {
		t.Errorf("address %s, want %s", got, want)
	}
}

// TestOptions checks options that would change the address of a request.
func TestOptions(t *testing.T) {
	w := newWorld(t)
	for _, options := range []Options{
		{Repo: "", Revision: "main"}, {Repo: "a/b/c", Revision: "main"}, {Repo: "../b", Revision: "main"}, {Repo: "a/..", Revision: "main"}, {Repo: "a?b", Revision: "main"},
		{Repo: repo}, {Repo: repo, Revision: ".."}, {Repo: repo, Revision: strings.Repeat("r", 256)},
	} {
		options.Out, options.Connections = w.out(), 1
		_, err := Run(t.Context(), w.client(token), options, &Progress{})
		var invalid *InvalidError
		if !errors.As(err, &invalid) || !strings.Contains(err.Error(), "is invalid") {
			t.Errorf("%+v: error %v, want an InvalidError", options, err)
		}
	}
	if requests := w.server.Requests(); len(requests) != 0 {
		t.Errorf("invalid options sent %d requests", len(requests))
	}
}

// FuzzTree checks that no page of a tree leads out of the output directory.
func FuzzTree(f *testing.F) {
	for _, page := range []string{
		`[{"type":"file","path":"a","size":1,"oid":"` + commit + `"}]`, `[{"type":"file","path":"../a","size":1,"oid":"` + commit + `"}]`,
		`[{"type":"file","path":"a/b","size":1,"oid":"` + commit + `","lfs":{"oid":"x","size":-1}}]`, `{}`, `[{"type":"directory","path":"/"}]`,
	} {
		f.Add([]byte(page), `<http://h/next>; rel="next"`)
	}
	f.Fuzz(func(t *testing.T, page []byte, link string) {
		nextPattern.FindStringSubmatch(link)
		var entries []treeEntry
		if json.Unmarshal(page, &entries) != nil {
			return
		}
		for _, entry := range entries {
			file, err := entry.file()
			if err != nil {
				continue
			}
			if !filepath.IsLocal(file.Path) || file.Size < 0 || file.SHA256 == "" && file.GitSHA1 == "" {
				t.Errorf("accepted %+v", file)
			}
		}
	})
}
