// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"

	"k8s.io/client-go/kubernetes"
)

// Source calls set with the backends, first at the start and then after each change, until the context ends. It calls
// synced once the backends are known.
type Source func(ctx context.Context, set func([]Backend), synced func()) error

// Pods is the Source of the ready engine pods that match a selector (see Watch).
func Pods(clients kubernetes.Interface, namespace, selector, snapshotDir string) Source {
	return func(ctx context.Context, set func([]Backend), synced func()) error {
		return Watch(ctx, clients, namespace, selector, snapshotDir, set, synced)
	}
}
