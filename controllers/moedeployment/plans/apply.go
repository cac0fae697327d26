// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"context"
	"errors"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/internal/kube/writes"
)

// Apply executes the writes of a decision on profiles, plans and tables, in order. Serving does not depend on these
// objects, so a refused write does not prevent the next one: the refusal is added to the snapshot, so that a decision
// that is made again does not rely on the write. Apply stops at any other error.
func Apply(ctx context.Context, w childobjects.Writer, s *planner.Snapshot, ordered []writes.Write) (refused, err error) {
	for _, write := range ordered {
		err := w.Write(ctx, s.Moed, write)
		if err == nil {
			continue
		}
		if !writes.IsRefused(err) {
			return refused, err
		}
		refused = errors.Join(refused, err)
		switch write := write.(type) {
		case desired.ApplyConfigMap:
			s.TablesRefused = true
		case writes.Delete:
			if profile, ok := write.Object.(*semmoev1.AffinityProfile); ok {
				if s.Undeletable == nil {
					s.Undeletable = map[string]bool{}
				}
				s.Undeletable[profile.Name] = true
			}
		}
	}
	return refused, nil
}
