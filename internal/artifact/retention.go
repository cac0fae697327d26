package artifact

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
)

// together is how far apart artifacts are stored at most that one names the other: traces take minutes to store, and what names them follows.
const together = time.Hour

// refreshes is into how many parts the retention period is divided: a scope that is named is marked anew once in each.
const refreshes = 7

// mark is what a scope holds that was named: an artifact like others, which is stored again while the scope is named. When it was
// stored last is when the scope was last seen to be named, whoever asks.
func mark(scope Scope) string { return "semmoe-named/1 " + scope.String() + "\n" }

func markDigest(scope Scope) Digest {
	digest, _, _ := DigestOf(strings.NewReader(mark(scope))) // a string can be read
	return digest
}

// marks are when the scopes of artifacts were last marked.
func marks(artifacts []Artifact) map[Scope]time.Time {
	marked, digests := map[Scope]time.Time{}, map[Scope]Digest{}
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

// Mark remembers that scopes are named, of those that hold any of the artifacts: once they are named no more, the retention period of what
// they hold begins. Marks younger than a part of the period are left. One that cannot be stored does not keep the others; the errors are joined.
func (c *Client) Mark(ctx context.Context, artifacts []Artifact, named sets.Set[Scope], retention time.Duration, now time.Time) error {
	marked, seen := marks(artifacts), sets.New[Scope]()
	var failures []error
	for _, a := range artifacts {
		if seen.Has(a.Scope) || !named.Has(a.Scope) || now.Sub(marked[a.Scope]) < retention/refreshes {
			continue
		}
		seen.Insert(a.Scope)
		if _, err := c.Put(ctx, a.Scope, strings.NewReader(mark(a.Scope))); err != nil {
			failures = append(failures, fmt.Errorf("mark %s as named: %w", a.Scope, err))
		}
	}
	return errors.Join(failures...)
}

// Expired returns what a sweep deletes, newest first: the artifacts that no object names by its digest, and that were
// stored, and their scopes last marked, longer ago than the retention period. The period protects what was stored before the object that names it was
// seen, and covers the difference between the clocks of storage and caller; it must be well above both.
//
// What names other artifacts is stored after them, and goes before them: a sweep that ends in between leaves nothing that names what is
// gone. So does one that comes when the one is older than the period and the other is not: they go together.
func Expired(artifacts []Artifact, live sets.Set[Digest], retention time.Duration, now time.Time) []Artifact {
	marked := marks(artifacts)
	kept := map[Scope][]time.Time{} // when artifacts that nothing names were stored, within the period
	var old []Artifact
	for _, a := range artifacts {
		switch {
		case live.Has(a.Digest):
		case now.Sub(a.Modified) > retention && now.Sub(marked[a.Scope]) > retention+retention/refreshes:
			old = append(old, a)
		default:
			kept[a.Scope] = append(kept[a.Scope], a.Modified)
		}
	}
	expired := slices.DeleteFunc(old, func(a Artifact) bool {
		return slices.ContainsFunc(kept[a.Scope], func(later time.Time) bool { return later.Sub(a.Modified) < together })
	})
	slices.SortStableFunc(expired, func(a, b Artifact) int { return b.Modified.Compare(a.Modified) })
	return expired
}

// Sweep deletes the expired artifacts of all scopes and returns those that it deleted. An artifact that was stored again
// meanwhile stays. One that cannot be deleted does not keep the others; the errors are joined.
//
// live must be complete: with an error while it is collected, do not sweep.
func (c *Client) Sweep(ctx context.Context, live sets.Set[Digest], retention time.Duration, now time.Time) ([]Artifact, error) {
	all, err := c.ListAll(ctx)
	if err != nil {
		return nil, err
	}
	var deleted []Artifact
	var failures []error
	for _, a := range Expired(all, live, retention, now) {
		switch err := c.Delete(ctx, a); {
		case err == nil:
			deleted = append(deleted, a)
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrConflict): // somebody else deleted it, or stored it again
		default:
			failures = append(failures, fmt.Errorf("delete %s/%s: %w", a.Scope, a.Digest, err))
		}
	}
	return deleted, errors.Join(failures...)
}
