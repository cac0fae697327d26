// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/hex"
	"encoding/pem"
	"encoding/xml"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/artifact"
)

// objectStorage implements the part of the S3 protocol that the store needs, with path-style URLs: objects, conditional
// writes, multipart uploads, and a size limit.
type objectStorage struct {
	capacity int

	mu      sync.Mutex
	objects map[string]object
	uploads map[string]map[int][]byte // upload id -> part number -> bytes
	aborted int
}

type object struct {
	data     []byte
	modified time.Time
}

func (o *objectStorage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	query := r.URL.Query()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	upload := query.Get("uploadId")
	switch {
	case r.Method == http.MethodGet && key == "":
		o.list(w, query.Get("prefix"))
	case r.Method == http.MethodPost && query.Has("uploads"):
		id := strconv.Itoa(len(o.uploads) + o.aborted + 1)
		o.uploads[id] = map[int][]byte{}
		answer(w, http.StatusOK, "<InitiateMultipartUploadResult><UploadId>"+id+"</UploadId></InitiateMultipartUploadResult>")
	case r.Method == http.MethodPut && upload != "":
		number, _ := strconv.Atoi(query.Get("partNumber"))
		o.uploads[upload][number] = body
		w.Header().Set("ETag", etag(body))
	case r.Method == http.MethodPost && upload != "":
		var whole []byte
		for number := range len(o.uploads[upload]) {
			whole = append(whole, o.uploads[upload][number+1]...)
		}
		delete(o.uploads, upload)
		o.objects[key] = object{whole, time.Now()}
		answer(w, http.StatusOK, "<CompleteMultipartUploadResult/>")
	case r.Method == http.MethodDelete && upload != "":
		delete(o.uploads, upload)
		o.aborted++
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodPut:
		_, exists := o.objects[key]
		switch {
		case exists && r.Header.Get("If-None-Match") == "*":
			answer(w, http.StatusPreconditionFailed, "<Error><Code>PreconditionFailed</Code></Error>")
		case len(body) > o.capacity:
			answer(w, http.StatusInsufficientStorage, "<Error><Code>StorageFull</Code></Error>")
		default:
			o.objects[key] = object{body, time.Now()}
			w.Header().Set("ETag", etag(body))
		}
	case r.Method == http.MethodDelete:
		delete(o.objects, key)
		w.WriteHeader(http.StatusNoContent)
	default:
		found, ok := o.objects[key]
		if !ok {
			answer(w, http.StatusNotFound, "<Error><Code>NoSuchKey</Code></Error>")
			return
		}
		w.Header().Set("ETag", etag(found.data))
		http.ServeContent(w, r, "", found.modified, bytes.NewReader(found.data))
	}
}

func (o *objectStorage) list(w http.ResponseWriter, prefix string) {
	type content struct {
		Key          string
		LastModified string
		Size         int
	}
	var contents []content
	for key, found := range o.objects {
		if strings.HasPrefix(key, prefix) {
			contents = append(contents, content{key, found.modified.UTC().Format("2006-01-02T15:04:05.000Z"), len(found.data)})
		}
	}
	slices.SortFunc(contents, func(a, b content) int { return strings.Compare(a.Key, b.Key) })
	text, err := xml.Marshal(struct {
		XMLName     xml.Name `xml:"ListBucketResult"`
		IsTruncated bool
		Contents    []content
	}{Contents: contents})
	if err != nil {
		panic(err)
	}
	answer(w, http.StatusOK, string(text))
}

func answer(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	io.WriteString(w, text) //nolint:errcheck // the client has disconnected
}

func etag(data []byte) string {
	sum := md5.Sum(data)
	return `"` + hex.EncodeToString(sum[:]) + `"`
}

// s3URL is the URL of a bucket. The endpoint is appended to it.
const s3URL = "s3://bucket?region=local&use_path_style=true&request_checksum_calculation=when_required&response_checksum_validation=when_required&endpoint="

// bucketVariable is the environment variable that makes this program access a bucket and print the result.
const bucketVariable = "SEMMOE_TEST_BUCKET"

func askBucket(url string) error {
	store, err := open(context.Background(), url)
	if err != nil {
		return err
	}
	return store.Ready(context.Background())
}

func openS3(t *testing.T, storage *objectStorage) *Store {
	t.Helper()
	storage.objects, storage.uploads = map[string]object{}, map[string]map[int][]byte{}
	server := httptest.NewServer(storage)
	t.Cleanup(server.Close)
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	t.Setenv("AWS_MAX_ATTEMPTS", "1")
	store, err := open(t.Context(), s3URL+server.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

// A bucket with a certificate of a private CA is reachable if $SSL_CERT_DIR contains the CA certificate.
func TestS3OfAPrivateAuthority(t *testing.T) {
	server := httptest.NewTLSServer(&objectStorage{objects: map[string]object{}})
	t.Cleanup(server.Close)
	given := t.TempDir()
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(filepath.Join(given, "ca.crt"), certificate, 0o644); err != nil {
		t.Fatal(err)
	}
	for directory, want := range map[string]string{given: "ready: <nil>\n", t.TempDir(): "certificate signed by unknown authority"} {
		command := exec.Command(os.Args[0]) // a process reads its CA certificates only once
		command.Env = []string{"SSL_CERT_DIR=" + directory, "AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=secret", "AWS_MAX_ATTEMPTS=1", bucketVariable + "=" + s3URL + server.URL}
		if output, err := command.CombinedOutput(); err != nil || !strings.Contains(string(output), want) {
			t.Errorf("want %q, got %v\n%s", want, err, output)
		}
	}
}

func TestS3(t *testing.T) {
	storage := &objectStorage{capacity: 32 << 20}
	store := openS3(t, storage)
	if err := store.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	for _, size := range []int{0, 1000, 24 << 20} { // the last one is a multipart upload
		data, digest := randomBytes(t, size)
		put(t, store, scopeA, data)
		if got, err := read(store, scopeA, digest); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes: read %d, %v", size, len(got), err)
		}
	}
	first, second := put(t, store, scopeA, []byte("first")), put(t, store, scopeA, []byte("second"))
	for _, asked := range []artifact.Digest{first, second} {
		if won, err := store.Publish(t.Context(), scopeA, asked); err != nil || won != first {
			t.Errorf("publish %s: %s, %v", asked, won, err)
		}
	}
	list, err := store.List(t.Context(), &scopeA)
	if err != nil || len(list) != 5 {
		t.Fatalf("list: %v, %v", list, err)
	}
	for _, found := range list {
		if err := store.Delete(t.Context(), scopeA, found.Digest, found.Modified); err != nil {
			t.Errorf("delete: %v", err)
		}
	}
	if len(storage.objects) > 0 {
		t.Errorf("left behind: %d objects", len(storage.objects))
	}
}

// If another process publishes between the read and the write, the condition of the write fails.
func TestS3PublishOfTwoStores(t *testing.T) {
	storage := &objectStorage{capacity: 1 << 20}
	store := openS3(t, storage)
	first, second := put(t, store, scopeA, []byte("first")), put(t, store, scopeA, []byte("second"))
	var group sync.WaitGroup
	won := make([]artifact.Digest, 8)
	for i := range won {
		asked := []artifact.Digest{first, second}[i%2]
		other := &Store{bucket: store.bucket, putting: map[string]int{}}
		group.Go(func() {
			var err error
			if won[i], err = other.Publish(t.Context(), scopeA, asked); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if slices.Max(won) != slices.Min(won) {
		t.Errorf("several results were published: %q", won)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// A failed upload creates no object, and leaves no parts.
func TestS3PutRefusals(t *testing.T) {
	small, smallDigest := randomBytes(t, 1000)
	large, largeDigest := randomBytes(t, 24<<20)
	broken := errors.New("connection reset")
	cases := map[string]struct {
		digest artifact.Digest
		body   io.Reader
		size   int
		want   func(error) bool
		ends   int // the number of bytes after which the context ends; 0 means never
	}{
		"other bytes":           {largeDigest, bytes.NewReader(small), 1000, func(err error) bool { return code(err) == http.StatusUnprocessableEntity }, 0},
		"other bytes, in parts": {smallDigest, bytes.NewReader(large), 24 << 20, func(err error) bool { return code(err) == http.StatusUnprocessableEntity }, 0},
		"cut off":               {largeDigest, io.MultiReader(bytes.NewReader(large[:18<<20]), brokenReader{broken}), 24 << 20, func(err error) bool { return errors.Is(err, broken) }, 0},
		"full":                  {smallDigest, bytes.NewReader(small), 1000, func(err error) bool { return code(err) == http.StatusInsufficientStorage }, 0},
		"the context ends":      {largeDigest, bytes.NewReader(large), 24 << 20, func(err error) bool { return errors.Is(err, context.Canceled) }, 18 << 20},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			storage := &objectStorage{capacity: 100}
			store := openS3(t, storage)
			ctx, end := context.WithCancel(t.Context())
			defer end()
			body := tc.body
			if tc.ends > 0 {
				body = io.MultiReader(io.LimitReader(body, int64(tc.ends)), readerFunc(func([]byte) (int, error) { end(); return 0, nil }), body)
			}
			if err := store.Put(ctx, scopeA, tc.digest, body, int64(tc.size)); !tc.want(err) {
				t.Errorf("error %v", err)
			}
			storage.mu.Lock()
			defer storage.mu.Unlock()
			if len(storage.objects) > 0 || len(storage.uploads) > 0 {
				t.Errorf("left behind: %d objects, %d uploads", len(storage.objects), len(storage.uploads))
			}
			if begun := tc.size > 16<<20; begun != (storage.aborted > 0) {
				t.Errorf("%d uploads were aborted", storage.aborted)
			}
		})
	}
}
