// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/semmoe/operator/test/load"
)

// unavailable is an API server that answers no request.
type unavailable func(*http.Request)

func (u unavailable) RoundTrip(r *http.Request) (*http.Response, error) {
	u(r)
	return nil, errors.New("busy")
}

// TestLeaseOfABusyNode checks that a request for the lease has more time on a busy machine, and that a failed request is
// repeated long before the lease ends.
func TestLeaseOfABusyNode(t *testing.T) {
	const factor, attempts = 10, 3
	load.Assume(t, factor)
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		defer end()
		begin := time.Now()
		var limits []time.Duration
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", Transport: unavailable(func(r *http.Request) {
			deadline, _ := r.Context().Deadline()
			if limits = append(limits, time.Until(deadline)); len(limits) == attempts {
				end()
			}
		})})
		if err != nil {
			t.Fatal(err)
		}
		keepLease(ctx, client, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
		if took := time.Since(begin); took != (attempts-1)*retryInterval {
			t.Errorf("%d attempts take %v, want one each %v", attempts, took, retryInterval)
		}
		for i, limit := range limits {
			if limit != factor*leaseTimeout {
				t.Errorf("attempt %d has %v, want %v", i, limit, factor*leaseTimeout)
			}
		}
	})
}
