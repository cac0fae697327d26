// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

// releaseTimeout is the time limit of the release of the leader lease. Its sum with stopTimeout is below endGrace: a
// manager ends in order even if the API server is unavailable, and its successor waits for the lease to expire.
const releaseTimeout = 300 * time.Millisecond

// leaseConfig returns the configuration of the client that renews and releases the leader lease. After the context
// ends, its requests have stopTimeout plus releaseTimeout in total.
func leaseConfig(ctx context.Context, config *rest.Config) *rest.Config {
	bounded := rest.CopyConfig(config)
	last, end := context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { time.AfterFunc(stopTimeout+releaseTimeout, end) })
	bounded.Wrap(func(next http.RoundTripper) http.RoundTripper { return &boundedTransport{next, last} })
	return bounded
}

// boundedTransport ends all requests when a context ends.
type boundedTransport struct {
	next http.RoundTripper
	last context.Context
}

// RoundTrip implements http.RoundTripper.
func (t *boundedTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(request.Context())
	stop := context.AfterFunc(t.last, cancel)
	end := func() { stop(); cancel() }
	response, err := t.next.RoundTrip(request.WithContext(ctx))
	if err != nil {
		end()
		return nil, err
	}
	response.Body = &boundedBody{response.Body, end}
	return response, nil
}

// boundedBody calls end when it is closed.
type boundedBody struct {
	io.ReadCloser
	end func()
}

// Close implements io.Closer.
func (b *boundedBody) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}
