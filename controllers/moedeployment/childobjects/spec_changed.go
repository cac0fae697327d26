// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// SpecChanged reports whether the spec on the API server is newer than the cached one, in which case an update event
// follows. Caches of different kinds are not synchronized: a child can appear before the spec that it was created for,
// and would then look unwanted. Callers check before they delete or recreate a child.
func SpecChanged(ctx context.Context, live client.Reader, moed *semmoev1.MoEDeployment) (bool, error) {
	var list semmoev1.MoEDeploymentList // RBAC allows list; get is not needed
	if err := live.List(ctx, &list, client.InNamespace(moed.Namespace), client.MatchingFields{"metadata.name": moed.Name}); err != nil {
		return false, err
	}
	return len(list.Items) != 1 || list.Items[0].UID != moed.UID || list.Items[0].Generation != moed.Generation, nil
}

// checkSpec returns an error if SpecChanged.
func (w Writer) checkSpec(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	changed, err := SpecChanged(ctx, w.Live, moed)
	if err != nil {
		return fmt.Errorf("failed to check MoEDeployment %s: %w", moed.Name, err)
	}
	if changed {
		return changedSinceRead("moedeployments", moed.Name)
	}
	return nil
}

// changedSinceRead returns the error of a decision that is based on an outdated object. A retry fixes it.
func changedSinceRead(resource, name string) error {
	return apierrors.NewConflict(semmoev1.GroupVersion.WithResource(resource).GroupResource(), name, errors.New("it has changed since it was read"))
}
