// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
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

// TestWatchEndsWhileConnectionsAreRefused checks that Watch does not wait for the pause between two attempts to reach
// the API server, which grows to a minute.
func TestWatchEndsWhileConnectionsAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clients, err := kubernetes.NewForConfig(&rest.Config{Host: "http://192.0.2.1", Transport: refused{}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- Watch(ctx, clients, "n", "a=b", t.TempDir(), func([]Backend) {}, func() {})
		}()
		time.Sleep(10 * time.Minute)
		begin := time.Now()
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > time.Second {
			t.Errorf("Watch ends %v after its context", took)
		}
		time.Sleep(2 * time.Minute) // the informer ends after its pause
	})
}

// refused is a transport to an address without a server.
type refused struct{}

func (refused) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
}
