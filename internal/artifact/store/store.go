package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"

	"github.com/semmoe/operator/internal/artifact"
)

// maxResult bounds what is read of a result: it is a digest in JSON.
const maxResult = 1 << 10

// uploadTimeout bounds an upload to an S3 that does not answer; the largest artifact takes less.
const uploadTimeout = time.Hour

// Store keeps artifacts in a bucket. It may be used concurrently. Its errors are *artifact.StatusError where the caller
// of the protocol is told, all others are the bucket's.
type Store struct {
	bucket *blob.Bucket
	// dir is the bucket's directory; nil where it has none.
	dir *directory

	// mu makes deletions and publications one after the other; puts only pass it. putting counts the uploads in
	// progress of a key, which must not be deleted under them.
	mu      sync.Mutex
	putting map[string]int
}

// Open opens the bucket of a URL: file:///directory, which must exist and be writable, or s3://bucket with the parameters
// of gocloud.dev.
func Open(ctx context.Context, url string) (*Store, error) {
	store := &Store{putting: map[string]int{}}
	scheme, _, _ := strings.Cut(url, "://")
	var err error
	switch scheme {
	case "file":
		store.bucket, store.dir, err = openDirectory(url)
	case "s3":
		store.bucket, err = blob.OpenBucket(ctx, url)
	default:
		return nil, fmt.Errorf("store URL %q: must be file:///directory or s3://bucket", url)
	}
	if err != nil {
		return nil, fmt.Errorf("store URL %q: %w", url, err)
	}
	return store, nil
}

// Close closes the bucket.
func (s *Store) Close() error {
	err := s.bucket.Close()
	if s.dir != nil {
		err = errors.Join(err, s.dir.close())
	}
	return err
}

// Ready tells whether the bucket can be reached.
func (s *Store) Ready(ctx context.Context) error {
	ok, err := s.bucket.IsAccessible(ctx)
	if err == nil && !ok {
		err = errors.New("the bucket does not exist")
	}
	return err
}

// Put stores size bytes of r, if they are those of the digest. Until they are all on the disk, or in S3, nothing is
// visible, and on any error nothing is left.
func (s *Store) Put(ctx context.Context, scope artifact.Scope, digest artifact.Digest, r io.Reader, size int64) error {
	if s.dir != nil {
		if err := s.dir.fits(size); err != nil {
			return full(err)
		}
	}
	key := artifactKey(scope, digest)
	defer s.begin(key)()
	// One byte more than declared shows a body that is too long.
	err := s.write(ctx, key, artifact.Verified(io.LimitReader(r, size+1), digest), false)
	if errors.Is(err, artifact.ErrCorrupt) {
		return fail(http.StatusUnprocessableEntity, "%v", err)
	}
	return full(err)
}

// begin marks a key as being written until the function that it returns is called.
func (s *Store) begin(key string) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.putting[key]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.putting[key]--; s.putting[key] == 0 {
			delete(s.putting, key)
		}
	}
}

// write makes an object of what r holds, or, on any error of r, of ctx or of the storage, leaves everything as it was.
func (s *Store) write(ctx context.Context, key string, r io.Reader, ifNotExist bool) error {
	options := &blob.WriterOptions{ContentType: "application/octet-stream", IfNotExist: ifNotExist}
	if s.dir != nil {
		return s.writeFile(ctx, key, r, options)
	}
	return s.upload(ctx, key, r, options)
}

// writeFile makes a write on a directory durable before its name is visible. bucket.Upload cannot be used: it would keep
// the part that was written before an error.
func (s *Store) writeFile(ctx context.Context, key string, r io.Reader, options *blob.WriterOptions) error {
	ctx, abort := context.WithCancel(ctx)
	defer abort()
	var file *os.File
	options.BeforeWrite = func(as func(any) bool) error {
		if !as(&file) {
			return errors.New("the bucket writes no file")
		}
		return nil
	}
	w, err := s.bucket.NewWriter(ctx, key, options)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	if err == nil {
		err = file.Sync()
	}
	if err != nil {
		abort()
		w.Close() //nolint:errcheck // the first error is the one to tell; an ended context makes Close undo the write
		return err
	}
	if err := w.Close(); err != nil {
		os.Remove(file.Name()) //nolint:errcheck // it is there only where closing the file is what failed
		return err
	}
	return s.dir.sync()
}

// upload writes to S3. The end of ctx must not reach the upload itself: what aborts it and removes its parts is a request
// under the same context. A client that is gone ends it all the same, as an error of r.
func (s *Store) upload(ctx context.Context, key string, r io.Reader, options *blob.WriterOptions) error {
	body := &recorder{ctx: ctx, r: r}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), uploadTimeout)
	defer cancel()
	err := s.bucket.Upload(ctx, key, body, options)
	if body.err != nil {
		return body.err // as it was, not as the uploader tells it
	}
	return err
}

// recorder keeps the first error of a reader, and ends it with its context.
type recorder struct {
	ctx context.Context
	r   io.Reader
	err error
}

func (r *recorder) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		r.err = err
		return 0, err
	}
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

// Get opens an artifact and returns its size. Its bytes end with artifact.ErrCorrupt if they are not those of the digest.
func (s *Store) Get(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (io.ReadCloser, int64, error) {
	r, err := s.bucket.NewReader(ctx, artifactKey(scope, digest), nil)
	if err != nil {
		return nil, 0, notFound(err, scope, digest)
	}
	return struct {
		io.Reader
		io.Closer
	}{artifact.Verified(r, digest), r}, r.Size(), nil
}

// Stat returns what is known of an artifact without reading it.
func (s *Store) Stat(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (artifact.Artifact, error) {
	attributes, err := s.bucket.Attributes(ctx, artifactKey(scope, digest))
	if err != nil {
		return artifact.Artifact{}, notFound(err, scope, digest)
	}
	return artifact.Artifact{Scope: scope, Digest: digest, Size: attributes.Size, Modified: attributes.ModTime}, nil
}

// List returns the artifacts of a scope, or of all where scope is nil.
func (s *Store) List(ctx context.Context, scope *artifact.Scope) ([]artifact.Artifact, error) {
	options := &blob.ListOptions{}
	if scope != nil {
		options.Prefix = scopePrefix(*scope)
	}
	if s.dir != nil {
		return s.dir.list(options.Prefix)
	}
	artifacts := []artifact.Artifact{} // a list in JSON, not null
	objects := s.bucket.List(options)
	for {
		object, err := objects.Next(ctx)
		if err == io.EOF {
			return artifacts, nil
		}
		if err != nil {
			return nil, err
		}
		if scope, digest, ok := parseArtifactKey(object.Key); ok {
			artifacts = append(artifacts, artifact.Artifact{Scope: scope, Digest: digest, Size: object.Size, Modified: object.ModTime})
		}
	}
}

// Delete deletes an artifact, and the scope's result if that names it, unless it is being stored or was stored after
// the time given.
func (s *Store) Delete(ctx context.Context, scope artifact.Scope, digest artifact.Digest, modified time.Time) error {
	return s.remove(ctx, scope, digest, modified, func(result artifact.Digest) bool { return result == digest })
}

// Discard deletes an artifact if its bytes are not those of its digest, and reports whether it has. The scope's result goes too: it
// names what is whole, and whoever needs it finds it lost, and makes it again. The bytes are read anew: they may have been damaged
// on their way.
func (s *Store) Discard(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (bool, error) {
	found, err := s.Stat(ctx, scope, digest)
	if err != nil {
		return false, err
	}
	r, _, err := s.Get(ctx, scope, digest)
	if err != nil {
		return false, err
	}
	defer r.Close()
	if _, err := io.Copy(io.Discard, r); !errors.Is(err, artifact.ErrCorrupt) {
		return false, err
	}
	err = s.remove(ctx, scope, digest, found.Modified, func(artifact.Digest) bool { return true })
	return err == nil, err
}

// remove deletes an artifact as Delete does, and the scope's result if it goes with it.
func (s *Store) remove(ctx context.Context, scope artifact.Scope, digest artifact.Digest, modified time.Time, goes func(result artifact.Digest) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := artifactKey(scope, digest)
	if s.putting[key] > 0 {
		return fail(http.StatusConflict, "%s/artifacts/%s is being stored", scope, digest)
	}
	present, err := s.Stat(ctx, scope, digest)
	if err != nil {
		return err
	}
	// Storages list and show times with different precision.
	if present.Modified.Sub(modified) >= time.Second {
		return fail(http.StatusConflict, "%s/artifacts/%s was stored again at %s", scope, digest, present.Modified.Format(time.RFC3339Nano))
	}
	// The result goes first: it must never name what is gone.
	switch result, err := s.result(ctx, scope); {
	case err != nil && !isNotFound(err):
		return err
	case err == nil && goes(result):
		if err := s.bucket.Delete(ctx, resultKey(scope)); err != nil {
			return err
		}
		if s.dir != nil {
			if err := s.dir.sync(); err != nil {
				return err
			}
		}
	}
	return s.bucket.Delete(ctx, key)
}

// Publish makes a stored artifact the scope's result if it has none, or one that is not there, and returns the one that it has.
func (s *Store) Publish(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (artifact.Digest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch result, err := s.result(ctx, scope); {
	case err == nil:
		if there, err := s.bucket.Exists(ctx, artifactKey(scope, result)); err != nil || there {
			return result, err
		}
		// What it names was lost, in a partial restore perhaps: nobody could ever read it, or publish what takes its place.
		if err := s.bucket.Delete(ctx, resultKey(scope)); err != nil && !isNotFound(err) {
			return "", err
		}
	case !isNotFound(err):
		return "", err
	}
	if _, err := s.Stat(ctx, scope, digest); err != nil {
		return "", err
	}
	data, err := json.Marshal(artifact.Result{Digest: digest})
	if err != nil {
		return "", err
	}
	err = s.write(ctx, resultKey(scope), bytes.NewReader(data), true)
	if gcerrors.Code(err) == gcerrors.FailedPrecondition { // another process of the same bucket was first
		return s.result(ctx, scope)
	}
	return digest, full(err)
}

// Published returns the scope's result.
func (s *Store) Published(ctx context.Context, scope artifact.Scope) (artifact.Digest, error) {
	digest, err := s.result(ctx, scope)
	if isNotFound(err) {
		return "", fail(http.StatusNotFound, "%s has no result", scope)
	}
	return digest, err
}

func (s *Store) result(ctx context.Context, scope artifact.Scope) (artifact.Digest, error) {
	r, err := s.bucket.NewReader(ctx, resultKey(scope), nil)
	if err != nil {
		return "", err
	}
	defer r.Close()
	var result artifact.Result
	if err := json.NewDecoder(io.LimitReader(r, maxResult)).Decode(&result); err != nil {
		return "", fmt.Errorf("result of %s: %w", scope, err)
	}
	return artifact.ParseDigest(string(result.Digest))
}

func notFound(err error, scope artifact.Scope, digest artifact.Digest) error {
	if isNotFound(err) {
		return fail(http.StatusNotFound, "there is no %s/artifacts/%s", scope, digest)
	}
	return err
}

func isNotFound(err error) bool { return gcerrors.Code(err) == gcerrors.NotFound }

// full turns the errors of a storage without space into the protocol's.
func full(err error) error {
	if err == nil {
		return nil
	}
	var answer interface{ HTTPStatusCode() int } // of S3
	for _, cause := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG} {
		if errors.Is(err, cause) {
			return fail(http.StatusInsufficientStorage, "the store is full: enlarge its volume, or shorten the retention")
		}
	}
	if errors.As(err, &answer) && answer.HTTPStatusCode() == http.StatusInsufficientStorage {
		return fail(http.StatusInsufficientStorage, "the store is full: enlarge its bucket, or shorten the retention")
	}
	return err
}
