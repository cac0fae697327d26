// SPDX-License-Identifier: Apache-2.0

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

// maxResult limits the size of a result, which is a digest in JSON.
const maxResult = 1 << 10

// uploadTimeout limits the time of an upload to S3. The largest artifact takes less time.
const uploadTimeout = time.Hour

// Store stores artifacts in a bucket. It is safe for concurrent use. Errors for clients are *artifact.StatusError. All
// other errors come from the bucket.
type Store struct {
	bucket *blob.Bucket
	// dir is the directory of the bucket, or nil for S3.
	dir *directory

	// mu serializes deletions and publications. Uploads hold it only briefly. putting counts the uploads in progress by
	// key. A key with uploads in progress must not be deleted.
	mu      sync.Mutex
	putting map[string]int
}

// open opens the bucket of a URL: file:///directory, which must exist and be writable, or s3://bucket with the
// parameters of gocloud.dev.
func open(ctx context.Context, url string) (*Store, error) {
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

// Ready returns an error if the bucket is unreachable.
func (s *Store) Ready(ctx context.Context) error {
	ok, err := s.bucket.IsAccessible(ctx)
	if err == nil && !ok {
		err = errors.New("the bucket does not exist")
	}
	return err
}

// Put stores size bytes of r if they match the digest. The artifact becomes visible after all bytes are on disk or in
// S3. After an error nothing remains.
func (s *Store) Put(ctx context.Context, scope artifact.Scope, digest artifact.Digest, r io.Reader, size int64) error {
	if s.dir != nil {
		if err := s.dir.fits(size); err != nil {
			return full(err)
		}
	}
	key := artifactKey(scope, digest)
	defer s.begin(key)()
	// Reading one byte more than declared detects a body that is too long.
	err := s.write(ctx, key, artifact.Verified(io.LimitReader(r, size+1), digest), false)
	if errors.Is(err, artifact.ErrCorrupt) {
		return fail(http.StatusUnprocessableEntity, "%v", err)
	}
	return full(err)
}

// begin marks a key as being written until the returned function is called.
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

// write writes an object with the bytes of r. On any error of r, ctx or the storage, it changes nothing.
func (s *Store) write(ctx context.Context, key string, r io.Reader, ifNotExist bool) error {
	options := &blob.WriterOptions{ContentType: "application/octet-stream", IfNotExist: ifNotExist}
	if s.dir != nil {
		return s.writeFile(ctx, key, r, options)
	}
	return s.upload(ctx, key, r, options)
}

// writeFile writes a file and makes it durable before its name becomes visible. bucket.Upload cannot be used, because
// it keeps the bytes that were written before an error.
func (s *Store) writeFile(ctx context.Context, key string, r io.Reader, options *blob.WriterOptions) error {
	ctx, abort := context.WithCancel(ctx)
	defer abort()
	var file *os.File
	options.BeforeWrite = func(as func(any) bool) error {
		if !as(&file) {
			return errors.New("the bucket does not write to a file")
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
		w.Close() //nolint:errcheck // the first error is reported; with an ended context, Close discards the write
		return err
	}
	if err := w.Close(); err != nil {
		os.Remove(file.Name()) //nolint:errcheck // the file exists only if closing it failed
		return err
	}
	return s.dir.sync()
}

// upload writes to S3. The upload must not use ctx directly, because the request that aborts it and removes its parts
// uses the same context. A disconnected client ends the upload by an error of r.
func (s *Store) upload(ctx context.Context, key string, r io.Reader, options *blob.WriterOptions) error {
	body := &recorder{ctx: ctx, r: r}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), uploadTimeout)
	defer cancel()
	err := s.bucket.Upload(ctx, key, body, options)
	if body.err != nil {
		return body.err // the original error, not the wrapped error of the uploader
	}
	return err
}

// recorder records the first error of a reader, and returns an error after its context ends.
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

// Get opens an artifact and returns its size. The reader ends with artifact.ErrCorrupt if the bytes do not match the
// digest.
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

// Stat returns the metadata of an artifact without reading its bytes.
func (s *Store) Stat(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (artifact.Artifact, error) {
	attributes, err := s.bucket.Attributes(ctx, artifactKey(scope, digest))
	if err != nil {
		return artifact.Artifact{}, notFound(err, scope, digest)
	}
	return artifact.Artifact{Scope: scope, Digest: digest, Size: attributes.Size, Modified: attributes.ModTime}, nil
}

// List returns the artifacts of a scope, or of all scopes if scope is nil.
func (s *Store) List(ctx context.Context, scope *artifact.Scope) ([]artifact.Artifact, error) {
	options := &blob.ListOptions{}
	if scope != nil {
		options.Prefix = scopePrefix(*scope)
	}
	if s.dir != nil {
		return s.dir.list(options.Prefix)
	}
	artifacts := []artifact.Artifact{} // encoded as an empty JSON list, not as null
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

// Delete deletes an artifact, unless it is being stored or was stored after the given time. If the artifact is the
// result of its scope, the result is deleted, too.
func (s *Store) Delete(ctx context.Context, scope artifact.Scope, digest artifact.Digest, modified time.Time) error {
	return s.remove(ctx, scope, digest, modified, func(result artifact.Digest) bool { return result == digest })
}

// Discard deletes an artifact if its bytes do not match its digest, and reports whether it did. The result of the scope
// is deleted, too, so that the operator creates the profile or plan again. The bytes are read again before, because
// they may have been damaged during the transfer.
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

// remove deletes an artifact like Delete, and the scope's result if required.
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
	// Storages return times with different precision for lists and for single objects.
	if present.Modified.Sub(modified) >= time.Second {
		return fail(http.StatusConflict, "%s/artifacts/%s was stored again at %s", scope, digest, present.Modified.Format(time.RFC3339Nano))
	}
	// The result is deleted first, because it must never refer to a deleted artifact.
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

// Publish makes a stored artifact the result of its scope, if the scope has no result or its artifact is missing. It
// returns the result of the scope.
func (s *Store) Publish(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (artifact.Digest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch result, err := s.result(ctx, scope); {
	case err == nil:
		if there, err := s.bucket.Exists(ctx, artifactKey(scope, result)); err != nil || there {
			return result, err
		}
		// The artifact of the result is missing, for example after a partial restore. The result is replaced. Without
		// this, the scope could never have a usable result.
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
	if gcerrors.Code(err) == gcerrors.FailedPrecondition { // another process with the same bucket was faster
		return s.result(ctx, scope)
	}
	return digest, full(err)
}

// Published returns the result of a scope.
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
		return fail(http.StatusNotFound, "%s/artifacts/%s does not exist", scope, digest)
	}
	return err
}

func isNotFound(err error) bool { return gcerrors.Code(err) == gcerrors.NotFound }

// full converts errors of a storage without space to the error of the protocol.
func full(err error) error {
	if err == nil {
		return nil
	}
	var answer interface{ HTTPStatusCode() int } // S3 error response
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
