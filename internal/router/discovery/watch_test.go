// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// TestWatchEndsWhileTheAPIServerIsSilent checks that Watch ends with its context although the API server does not
// answer a pending request.
func TestWatchEndsWhileTheAPIServerIsSilent(t *testing.T) {
	clients := fake.NewClientset()
	asked, release := make(chan struct{}, 1), make(chan struct{})
	defer close(release)
	clients.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		select {
		case asked <- struct{}{}:
		default:
		}
		<-release
		return false, nil, nil
	})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Watch(ctx, clients, "n", "a=b", t.TempDir(), func([]Backend) {}, func() {})
	}()
	<-asked
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
