// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/semmoe/operator/internal/artifact"
)

// maxReferenceDelay is the maximum time between storing an artifact and storing another artifact that refers to it.
// Traces take minutes to store.
const maxReferenceDelay = time.Hour

// refreshes is the number of times per retention period that the mark of a referenced scope is renewed.
const refreshes = 7

// mark returns the content of the mark of a scope. A mark is an artifact that is stored repeatedly while an object
// refers to the scope. Its modification time is the last time that a reference was seen.
func mark(scope artifact.Scope) string { return "semmoe-named/1 " + scope.String() + "\n" }

func markDigest(scope artifact.Scope) artifact.Digest {
	digest, _, _ := artifact.DigestOf(strings.NewReader(mark(scope))) // a string can be read
	return digest
}

// marks returns the times of the latest marks of the artifacts' scopes.
func marks(artifacts []artifact.Artifact) map[artifact.Scope]time.Time {
	marked, digests := map[artifact.Scope]time.Time{}, map[artifact.Scope]artifact.Digest{}
	for _, a := range artifacts {
		if digests[a.Scope] == "" {
			digests[a.Scope] = markDigest(a.Scope)
		}
		if a.Digest == digests[a.Scope] {
			marked[a.Scope] = a.Modified
		}
	}
	return marked
}

// Mark stores marks in the scopes of artifacts that objects refer to (named). The retention period of a scope starts at
// its last mark. A mark that is younger than retention/refreshes is not renewed. An error does not prevent other marks;
// the errors are joined.
func (c *Client) Mark(ctx context.Context, artifacts []artifact.Artifact, named sets.Set[artifact.Scope], retention time.Duration, now time.Time) error {
	marked, seen := marks(artifacts), sets.New[artifact.Scope]()
	var failures []error
	for _, a := range artifacts {
		if seen.Has(a.Scope) || !named.Has(a.Scope) || now.Sub(marked[a.Scope]) < retention/refreshes {
			continue
		}
		seen.Insert(a.Scope)
		if _, err := c.Put(ctx, a.Scope, strings.NewReader(mark(a.Scope))); err != nil {
			failures = append(failures, fmt.Errorf("failed to mark %s as referenced: %w", a.Scope, err))
		}
	}
	return errors.Join(failures...)
}

// Expired returns the artifacts that a sweep deletes, newest first: artifacts whose digest is not in live, that were
// stored before the retention period, and whose scopes were last marked before it. The period protects artifacts that
// were stored before the object that refers to them was observed. It must be much longer than that delay, and than the
// clock difference between storage and caller.
//
// An artifact that refers to others is stored after them and deleted before them, so that an interrupted sweep leaves
// no dangling references. For the same reason an artifact is kept while an unexpired artifact of its scope was stored
// less than maxReferenceDelay later.
func Expired(artifacts []artifact.Artifact, live sets.Set[artifact.Digest], retention time.Duration, now time.Time) []artifact.Artifact {
	marked := marks(artifacts)
	kept := map[artifact.Scope][]time.Time{} // the times of unexpired artifacts that are not in live
	var old []artifact.Artifact
	for _, a := range artifacts {
		switch {
		case live.Has(a.Digest):
		case now.Sub(a.Modified) > retention && now.Sub(marked[a.Scope]) > retention+retention/refreshes:
			old = append(old, a)
		default:
			kept[a.Scope] = append(kept[a.Scope], a.Modified)
		}
	}
	expired := slices.DeleteFunc(old, func(a artifact.Artifact) bool {
		return slices.ContainsFunc(kept[a.Scope], func(later time.Time) bool { return later.Sub(a.Modified) < maxReferenceDelay })
	})
	slices.SortStableFunc(expired, func(a, b artifact.Artifact) int { return b.Modified.Compare(a.Modified) })
	return expired
}

// Sweep deletes the expired artifacts of all scopes and returns the deleted ones. An artifact that was stored again in
// the meantime is kept. An error does not prevent other deletions; the errors are joined.
//
// live must be complete. Do not call Sweep after an error during its collection.
func (c *Client) Sweep(ctx context.Context, live sets.Set[artifact.Digest], retention time.Duration, now time.Time) ([]artifact.Artifact, error) {
	all, err := c.ListAll(ctx)
	if err != nil {
		return nil, err
	}
	var deleted []artifact.Artifact
	var failures []error
	for _, a := range Expired(all, live, retention, now) {
		switch err := c.Delete(ctx, a); {
		case err == nil:
			deleted = append(deleted, a)
		case errors.Is(err, artifact.ErrNotFound), errors.Is(err, artifact.ErrConflict): // deleted or stored again by another client
		default:
			failures = append(failures, fmt.Errorf("failed to delete %s/%s: %w", a.Scope, a.Digest, err))
		}
	}
	return deleted, errors.Join(failures...)
}
