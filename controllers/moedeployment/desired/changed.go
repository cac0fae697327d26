package desired

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// SpecChanged is whether the spec of a MoEDeployment is another by now than the cache has it, which will tell. Caches see each kind by
// itself: a child may be seen before the spec that it was made for, and would be taken for one that nobody wants. Whoever deletes, or makes anew, asks.
func SpecChanged(ctx context.Context, live client.Reader, moed *semmoev1.MoEDeployment) (bool, error) {
	var list semmoev1.MoEDeploymentList // the operator may list them, and needs no other right
	if err := live.List(ctx, &list, client.InNamespace(moed.Namespace), client.MatchingFields{"metadata.name": moed.Name}); err != nil {
		return false, err
	}
	return len(list.Items) != 1 || list.Items[0].UID != moed.UID || list.Items[0].Generation != moed.Generation, nil
}
