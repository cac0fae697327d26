// SPDX-License-Identifier: Apache-2.0

package store

import (
	"net/http"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/artifact"
)

const (
	// maxUploads limits the uploads in progress. maxBucketUploads limits the uploads to S3, each of which uses up to 40
	// MB of memory. maxCallerUploads limits the uploads of one pod; it does not apply to the manager.
	maxUploads       = 64
	maxBucketUploads = 8
	maxCallerUploads = 2
	// minUploadRate is the minimum average rate of an upload, in bytes per second.
	minUploadRate = 64 << 10
	// maxScopeArtifacts limits the number of artifacts of a scope, and maxScopeUploads their bytes, as a multiple of
	// the maximum size of an artifact. A profile or plan has up to ten artifacts, and those of failed attempts stay
	// until the retention period ends.
	maxScopeArtifacts = 128
	maxScopeUploads   = 4
)

// uploads counts the uploads in progress, in total and by caller.
type uploads struct {
	max int

	mu       sync.Mutex
	total    int
	byCaller map[string]int
}

// begin admits an upload of a caller, which ends when the returned function is called. The error has status 429, and
// clients retry.
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

// uploadDeadline returns the deadline of an upload of the given size.
func uploadDeadline(begin time.Time, size int64) time.Time {
	return begin.Add(stallTimeout + time.Duration(size/minUploadRate)*time.Second)
}

// checkScope returns an error if an artifact exceeds the limits of its scope.
func checkScope(present []artifact.Artifact, digest artifact.Digest, size, largest int64) error {
	sum := size
	for _, a := range present {
		if a.Digest == digest {
			return nil // it replaces equal bytes
		}
		sum += a.Size
	}
	if len(present) >= maxScopeArtifacts || sum/maxScopeUploads > largest {
		return fail(http.StatusRequestEntityTooLarge, "the scope has %d artifacts, and %d bytes with this one; the maximum is %d artifacts and %d bytes",
			len(present), sum, maxScopeArtifacts, maxScopeUploads*largest)
	}
	return nil
}
