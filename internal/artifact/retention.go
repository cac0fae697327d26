package artifact

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
)

// together is how far apart artifacts are stored at most that one names the other: traces take minutes to store, and what names them follows.
const together = time.Hour

// Expired returns what a sweep deletes, newest first: the artifacts that no object names by its digest, and that were
// stored longer ago than the retention period. The period protects what was stored before the object that names it was
// seen, and covers the difference between the clocks of storage and caller; it must be well above both.
//
// What names other artifacts is stored after them, and goes before them: a sweep that ends in between leaves nothing that names what is
// gone. So does one that comes when the one is older than the period and the other is not: they go together.
func Expired(artifacts []Artifact, live sets.Set[Digest], retention time.Duration, now time.Time) []Artifact {
	kept := map[Scope][]time.Time{} // when artifacts that nothing names were stored, within the period
	var old []Artifact
	for _, a := range artifacts {
		switch {
		case live.Has(a.Digest):
		case now.Sub(a.Modified) > retention:
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
