package store

import (
	"net/http"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/artifact"
)

const (
	// maxUploads bounds the uploads in progress; maxBucketUploads those to S3, each of which takes up to 40 MB of memory. maxCallerUploads
	// bounds the uploads of one pod; the manager has no such bound.
	maxUploads       = 64
	maxBucketUploads = 8
	maxCallerUploads = 2
	// minUploadRate is the least number of bytes per second that an upload may average.
	minUploadRate = 64 << 10
	// maxScopeArtifacts and maxScopeUploads bound what one scope holds: the number of artifacts, and their bytes as a multiple of the
	// largest artifact. A profile or plan has up to ten artifacts, and failed attempts leave theirs until retention deletes them.
	maxScopeArtifacts = 128
	maxScopeUploads   = 4
)

// uploads counts the uploads in progress, by caller.
type uploads struct {
	max int

	mu       sync.Mutex
	total    int
	byCaller map[string]int
}

// begin admits an upload of a caller until the function that it returns is called. The error is a refusal (429): clients retry.
func (u *uploads) begin(who caller) (end func(), err error) {
	caller := who.name()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.total >= u.max || !who.manager && u.byCaller[caller] >= maxCallerUploads {
		return nil, fail(http.StatusTooManyRequests, "too many uploads are in progress")
	}
	if u.byCaller == nil {
		u.byCaller = map[string]int{}
	}
	u.total++
	u.byCaller[caller]++
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.total--
		if u.byCaller[caller]--; u.byCaller[caller] == 0 {
			delete(u.byCaller, caller)
		}
	}, nil
}

// uploadDeadline is when an upload of a size must have ended.
func uploadDeadline(begin time.Time, size int64) time.Time {
	return begin.Add(stallTimeout + time.Duration(size/minUploadRate)*time.Second)
}

// checkScope refuses an artifact beyond the bounds of its scope.
func checkScope(present []artifact.Artifact, digest artifact.Digest, size, largest int64) error {
	sum := size
	for _, a := range present {
		if a.Digest == digest {
			return nil // it takes the place of the same bytes
		}
		sum += a.Size
	}
	if len(present) >= maxScopeArtifacts || sum/maxScopeUploads > largest {
		return fail(http.StatusRequestEntityTooLarge, "the scope has %d artifacts, and %d bytes with this one; at most %d artifacts and %d bytes are allowed",
			len(present), sum, maxScopeArtifacts, maxScopeUploads*largest)
	}
	return nil
}
