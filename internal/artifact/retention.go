package artifact

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
)

// Expired returns what a sweep deletes, oldest first: the artifacts that no object names by its digest, and that were
// stored longer ago than the retention period. The period protects what was stored before the object that names it was
// seen, and covers the difference between the clocks of storage and caller; it must be well above both.
func Expired(artifacts []Artifact, live sets.Set[Digest], retention time.Duration, now time.Time) []Artifact {
	var expired []Artifact
	for _, a := range artifacts {
		if !live.Has(a.Digest) && now.Sub(a.Modified) > retention {
			expired = append(expired, a)
		}
	}
	slices.SortStableFunc(expired, func(a, b Artifact) int { return a.Modified.Compare(b.Modified) })
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
