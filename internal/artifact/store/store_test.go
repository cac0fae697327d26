// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/internal/artifact"
)

var (
	scopeA = artifact.Scope{Namespace: "team-a", Kind: artifact.Profile, ID: profileID}
	scopeB = artifact.Scope{Namespace: "team-a", Kind: artifact.Plan, ID: planID}
)

func openTest(t *testing.T, dir string) *Store {
	t.Helper()
	store, err := open(t.Context(), "file://"+dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

func randomBytes(t testing.TB, n int) ([]byte, artifact.Digest) {
	t.Helper()
	data := make([]byte, n)
	rand.Read(data)
	digest, _, err := artifact.DigestOf(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return data, digest
}

func put(t testing.TB, s *Store, scope artifact.Scope, data []byte) artifact.Digest {
	t.Helper()
	digest, size, err := artifact.DigestOf(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Put(context.Background(), scope, digest, bytes.NewReader(data), size); err != nil {
		t.Fatal(err)
	}
	return digest
}

func read(s *Store, scope artifact.Scope, digest artifact.Digest) ([]byte, error) {
	r, _, err := s.Get(context.Background(), scope, digest)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// files returns the names in a directory, without the lock.
func files(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		if entry.Name() != lockName {
			names = append(names, entry.Name())
		}
	}
	return names
}

func code(err error) int {
	var status *artifact.StatusError
	if errors.As(err, &status) {
		return status.Code
	}
	return 0
}

func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	store := openTest(t, dir)
	for _, size := range []int{0, 1, 4096, 3<<20 + 1} {
		data, digest := randomBytes(t, size)
		put(t, store, scopeA, data)
		got, err := read(store, scopeA, digest)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes: read %d, %v", size, len(got), err)
		}
		found, err := store.Stat(t.Context(), scopeA, digest)
		if err != nil || found.Size != int64(size) || time.Since(found.Modified) > time.Minute {
			t.Errorf("%d bytes: %+v, %v", size, found, err)
		}
		if _, err := read(store, scopeB, digest); code(err) != http.StatusNotFound {
			t.Errorf("in another scope: error %v", err)
		}
	}
	// Artifacts outlive the process.
	list, err := store.List(t.Context(), nil)
	if err != nil || len(list) != 4 {
		t.Fatalf("%d artifacts, %v", len(list), err)
	}
	store.Close()
	again, err := openTest(t, dir).List(t.Context(), nil)
	if diff := cmp.Diff(list, again, cmpopts.EquateApproxTime(0)); err != nil || diff != "" {
		t.Errorf("after opening again: %v %s", err, diff)
	}
}

func TestList(t *testing.T) {
	dir := t.TempDir()
	store := openTest(t, dir)
	a, b := put(t, store, scopeA, []byte("a")), put(t, store, scopeB, []byte("b"))
	longer := scopeA
	longer.ID += "0" // has scopeA's id as a prefix
	c := put(t, store, longer, []byte("c"))
	if _, err := store.Publish(t.Context(), scopeA, a); err != nil {
		t.Fatal(err)
	}
	// Other files that a volume may contain.
	for _, name := range []string{"README", "team-a.plans.x.y", strings.ToUpper(artifactKey(scopeA, a))} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "lost+found"), 0); err != nil {
		t.Fatal(err)
	}
	digests := func(scope *artifact.Scope) []artifact.Digest {
		list, err := store.List(t.Context(), scope)
		if err != nil {
			t.Fatal(err)
		}
		var digests []artifact.Digest
		for _, found := range list {
			digests = append(digests, found.Digest)
		}
		slices.Sort(digests)
		return digests
	}
	everything := []artifact.Digest{a, b, c}
	slices.Sort(everything)
	for name, tc := range map[string]struct {
		scope *artifact.Scope
		want  []artifact.Digest
	}{"one scope": {&scopeA, []artifact.Digest{a}}, "another": {&longer, []artifact.Digest{c}}, "all": {nil, everything}} {
		if diff := cmp.Diff(tc.want, digests(tc.scope)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	none := artifact.Scope{Namespace: "none", Kind: artifact.Plan, ID: planID}
	if list, err := store.List(t.Context(), &none); err != nil || list == nil || len(list) != 0 {
		t.Errorf("empty scope: %v, %v", list, err)
	}
}

// A rejected upload leaves no artifact and no temporary file.
func TestPutRefusals(t *testing.T) {
	data, digest := randomBytes(t, 1<<20)
	broken := errors.New("connection reset")
	cases := map[string]struct {
		body io.Reader
		size int64
		ctx  func(context.Context) context.Context
		want func(error) bool
	}{
		"other bytes": {bytes.NewReader(append([]byte{data[0] ^ 1}, data[1:]...)), 1 << 20, nil,
			func(err error) bool { return code(err) == http.StatusUnprocessableEntity }},
		"too few bytes": {bytes.NewReader(data[:1000]), 1 << 20, nil,
			func(err error) bool { return code(err) == http.StatusUnprocessableEntity }},
		"more bytes than declared": {bytes.NewReader(append(bytes.Clone(data), 1)), 1 << 20, nil,
			func(err error) bool { return code(err) == http.StatusUnprocessableEntity }},
		"a reader that breaks": {io.MultiReader(bytes.NewReader(data[:1<<19]), brokenReader{broken}), 1 << 20, nil,
			func(err error) bool { return errors.Is(err, broken) }},
		"a context that has ended": {bytes.NewReader(data), 1 << 20, ended,
			func(err error) bool { return errors.Is(err, context.Canceled) }},
		"more than the disk holds": {bytes.NewReader(data), 1 << 60, nil,
			func(err error) bool { return code(err) == http.StatusInsufficientStorage }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			store := openTest(t, dir)
			ctx := t.Context()
			if tc.ctx != nil {
				ctx = tc.ctx(ctx)
			}
			if err := store.Put(ctx, scopeA, digest, tc.body, tc.size); !tc.want(err) {
				t.Errorf("error %v", err)
			}
			if left := files(t, dir); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
			put(t, store, scopeA, data) // later uploads succeed
		})
	}
}

type brokenReader struct{ err error }

func (b brokenReader) Read([]byte) (int, error) { return 0, b.err }

func ended(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}

// A rejected upload does not change a stored artifact with the same digest.
func TestRejectedPutKeepsStoredArtifact(t *testing.T) {
	store := openTest(t, t.TempDir())
	data, digest := randomBytes(t, 1000)
	put(t, store, scopeA, data)
	if err := store.Put(t.Context(), scopeA, digest, strings.NewReader("other"), 5); code(err) != http.StatusUnprocessableEntity {
		t.Fatalf("error %v", err)
	}
	if got, err := read(store, scopeA, digest); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
}

func TestDamageIsFoundAndRepaired(t *testing.T) {
	data, digest := randomBytes(t, 1<<20)
	flip := bytes.Clone(data)
	flip[1<<19] ^= 4
	for name, damage := range map[string][]byte{"flipped bit": flip, "truncated": data[:1<<19], "empty": {}, "longer": append(bytes.Clone(data), 0)} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			store := openTest(t, dir)
			put(t, store, scopeA, data)
			if err := os.WriteFile(filepath.Join(dir, artifactKey(scopeA, digest)), damage, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := read(store, scopeA, digest); !errors.Is(err, artifact.ErrCorrupt) {
				t.Errorf("error %v, want %v", err, artifact.ErrCorrupt)
			}
			put(t, store, scopeA, data)
			if _, err := read(store, scopeA, digest); err != nil {
				t.Errorf("stored again: %v", err)
			}
		})
	}
}

// A damaged artifact is deleted with the result of its scope. Intact artifacts, and artifacts that are being stored,
// are kept.
func TestDiscard(t *testing.T) {
	dir := t.TempDir()
	store := openTest(t, dir)
	part, result := put(t, store, scopeA, []byte("a part")), put(t, store, scopeA, []byte("names the part"))
	other := put(t, store, scopeB, []byte("a part"))
	for scope, digest := range map[artifact.Scope]artifact.Digest{scopeA: result, scopeB: other} {
		if _, err := store.Publish(t.Context(), scope, digest); err != nil {
			t.Fatal(err)
		}
	}
	discard := func(want bool, wantCode int) {
		t.Helper()
		if did, err := store.Discard(t.Context(), scopeA, part); did != want || code(err) != wantCode {
			t.Errorf("discarded %v, error %v; want %v, status %d", did, err, want, wantCode)
		}
	}
	discard(false, 0)
	if err := os.WriteFile(filepath.Join(dir, artifactKey(scopeA, part)), []byte("a pari"), 0o600); err != nil {
		t.Fatal(err)
	}
	end := store.begin(artifactKey(scopeA, part))
	discard(false, http.StatusConflict)
	end()
	if got, err := store.Published(t.Context(), scopeA); got != result {
		t.Errorf("the result is %q, %v before any deletion", got, err)
	}
	discard(true, 0)
	discard(false, http.StatusNotFound)
	if _, err := store.Published(t.Context(), scopeA); code(err) != http.StatusNotFound {
		t.Errorf("result of a scope with a deleted artifact: error %v", err)
	}
	if _, err := read(store, scopeA, result); err != nil {
		t.Errorf("intact artifact: %v", err)
	}
	if got, err := store.Published(t.Context(), scopeB); got != other {
		t.Errorf("result of another scope: %q, %v", got, err)
	}
}

func TestResult(t *testing.T) {
	dir := t.TempDir()
	store := openTest(t, dir)
	if _, err := store.Published(t.Context(), scopeA); code(err) != http.StatusNotFound {
		t.Errorf("without a result: error %v", err)
	}
	_, absent := randomBytes(t, 1)
	if _, err := store.Publish(t.Context(), scopeA, absent); code(err) != http.StatusNotFound {
		t.Errorf("a result that is not stored: error %v", err)
	}
	first, second := put(t, store, scopeA, []byte("first")), put(t, store, scopeA, []byte("second"))
	for _, asked := range []artifact.Digest{first, second, first} {
		if won, err := store.Publish(t.Context(), scopeA, asked); err != nil || won != first {
			t.Errorf("publish %s: %s, %v; want %s", asked, won, err, first)
		}
	}
	if won, err := store.Published(t.Context(), scopeA); err != nil || won != first {
		t.Errorf("published %s, %v; want %s", won, err, first)
	}
	// The result is deleted with its artifact, but not with other artifacts.
	if err := store.Delete(t.Context(), scopeA, second, time.Now()); err != nil {
		t.Fatal(err)
	}
	if won, err := store.Published(t.Context(), scopeA); err != nil || won != first {
		t.Errorf("after another artifact is deleted: %s, %v", won, err)
	}
	if err := store.Delete(t.Context(), scopeA, first, time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Published(t.Context(), scopeA); code(err) != http.StatusNotFound {
		t.Errorf("after its artifact is deleted: error %v", err)
	}
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	// The result is replaced if its artifact is missing, for example after a partial restore.
	lost := put(t, store, scopeA, []byte("lost"))
	if _, err := store.Publish(t.Context(), scopeA, lost); err != nil {
		t.Fatal(err)
	}
	if err := store.bucket.Delete(t.Context(), artifactKey(scopeA, lost)); err != nil {
		t.Fatal(err)
	}
	again := put(t, store, scopeA, []byte("again"))
	if won, err := store.Publish(t.Context(), scopeA, again); err != nil || won != again {
		t.Errorf("after the artifact of the result is lost: %s, %v; want %s", won, err, again)
	}
}

func TestDelete(t *testing.T) {
	dir := t.TempDir()
	store := openTest(t, dir)
	digest := put(t, store, scopeA, []byte("a"))
	listed := time.Now().Add(-time.Hour)
	if err := store.Delete(t.Context(), scopeA, digest, listed); code(err) != http.StatusConflict {
		t.Errorf("stored again after it was listed: error %v", err)
	}
	if err := store.Delete(t.Context(), scopeB, digest, time.Now()); code(err) != http.StatusNotFound {
		t.Errorf("in another scope: error %v", err)
	}
	// An artifact that is being stored again is not deleted, regardless of its age.
	body, send := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- store.Put(context.Background(), scopeA, digest, body, 1) }()
	if _, err := send.Write([]byte("a")); err != nil { // the byte was read, so the upload has started
		t.Fatal(err)
	}
	if err := store.Delete(t.Context(), scopeA, digest, time.Now().Add(time.Hour)); code(err) != http.StatusConflict {
		t.Errorf("while it is stored: error %v", err)
	}
	send.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(t.Context(), scopeA, digest, time.Now()); err != nil {
		t.Error(err)
	}
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// With concurrent writers, readers and deletions of one digest, a reader gets the complete artifact or none.
func TestConcurrency(t *testing.T) {
	dir := t.TempDir()
	store := openTest(t, dir)
	data, digest := randomBytes(t, 256<<10)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 10 {
				if err := store.Put(context.Background(), scopeA, digest, bytes.NewReader(data), int64(len(data))); err != nil {
					t.Errorf("put: %v", err)
				}
				if got, err := read(store, scopeA, digest); err != nil && code(err) != http.StatusNotFound || err == nil && !bytes.Equal(got, data) {
					t.Errorf("get: %d bytes, %v", len(got), err)
				}
				if won, err := store.Publish(context.Background(), scopeA, digest); err != nil && code(err) != http.StatusNotFound || err == nil && won != digest {
					t.Errorf("publish: %s, %v", won, err)
				}
				if err := store.Delete(context.Background(), scopeA, digest, time.Now()); err != nil && code(err) != http.StatusConflict && code(err) != http.StatusNotFound {
					t.Errorf("delete: %v", err)
				}
			}
		})
	}
	group.Wait()
	put(t, store, scopeA, data)
	for _, name := range files(t, dir) {
		if name != artifactKey(scopeA, digest) && name != resultKey(scopeA) {
			t.Errorf("left behind: %s", name)
		}
	}
	if len(store.putting) > 0 {
		t.Errorf("uploads still in progress: %v", store.putting)
	}
}

func TestOpenDirectory(t *testing.T) {
	dir := t.TempDir()
	key := artifactKey(scopeA, artifact.Digest(strings.Repeat("0", 64)))
	keep := []string{"notes.tmp", key, key + ".x"}
	for _, name := range append(keep, key+".18f3a.tmp", resultKey(scopeA)+".18f3b.tmp") {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	store := openTest(t, dir)
	slices.Sort(keep)
	if diff := cmp.Diff(keep, files(t, dir)); diff != "" {
		t.Errorf("files after opening: %s", diff)
	}
	if _, err := open(t.Context(), "file://"+dir); err == nil || !strings.Contains(err.Error(), "another store") {
		t.Errorf("a second store on the directory: error %v", err)
	}
	store.Close()
	openTest(t, dir)

	for url, want := range map[string]string{
		"file://" + dir + "/absent":           "no such file",
		"file://" + dir + "?create_dir=1":     "without parameters",
		"file://host/data":                    "absolute path",
		"/data":                               "file:///directory or s3://",
		"gs://bucket":                         "file:///directory or s3://",
		"s3://bucket?nonsense=1":              "nonsense",
		"file://" + filepath.Join(dir, "%zz"): "invalid URL",
	} {
		if _, err := open(t.Context(), url); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), url) {
			t.Errorf("%s: error %v, want one with %q", url, err, want)
		}
	}
}

// Every key is parsed to its scope and digest, and its temporary name is a valid file name.
func FuzzKeys(f *testing.F) {
	f.Add("team-a", true, profileID)
	f.Add(strings.Repeat("n", 63), false, strings.Repeat("z", 63))
	f.Add("a.b", false, "12345678")
	f.Fuzz(func(t *testing.T, namespace string, isProfile bool, id string) {
		scope := artifact.Scope{Namespace: namespace, Kind: artifact.Plan, ID: id}
		if isProfile {
			scope.Kind = artifact.Profile
		}
		if scope.Validate() != nil {
			t.Skip()
		}
		digest := artifact.Digest(strings.Repeat("0f", 32))
		key := artifactKey(scope, digest)
		if gotScope, gotDigest, ok := parseArtifactKey(key); !ok || gotScope != scope || gotDigest != digest {
			t.Errorf("%q is parsed as %v, %s, %t", key, gotScope, gotDigest, ok)
		}
		if _, _, ok := parseArtifactKey(resultKey(scope)); ok {
			t.Errorf("%q is parsed as an artifact", resultKey(scope))
		}
		temporary := key + ".7fffffffffffffff.tmp"
		if len(temporary) > 255 || !isTemporaryName(temporary) || isTemporaryName(key) || isTemporaryName(resultKey(scope)) {
			t.Errorf("temporary name %q", temporary)
		}
	})
}
