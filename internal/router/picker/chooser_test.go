// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"context"
	"crypto/tls"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// chooser is a Picker with configurable results that records its requests.
type chooser struct {
	decision Decision
	// err is the error of Pick. pick and modify replace Pick and ModifyResponse if they are not nil.
	err    error
	pick   func(context.Context, *Request) error
	modify func(response *http.Response) error

	mu       sync.Mutex
	requests []*Request
	served   []string
	released int
	codes    []int
}

func (c *chooser) Pick(ctx context.Context, r *Request) (Exchange, error) {
	c.mu.Lock()
	c.requests = append(c.requests, r)
	c.mu.Unlock()
	if c.pick != nil {
		if err := c.pick(ctx, r); err != nil {
			return nil, err
		}
	}
	if c.err != nil {
		return nil, c.err
	}
	decision := c.decision
	if decision.Endpoints == nil {
		decision.Endpoints = []string{"10.0.0.1:8000", "10.0.0.2:8000"}
	}
	if decision.Body == nil {
		decision.Body = r.Body
	}
	return &choice{chooser: c, decision: decision}, nil
}

func (c *chooser) Count(code int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.codes = append(c.codes, code)
}

// asked returns the only recorded request.
func (c *chooser) asked(t *testing.T) *Request {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.requests) != 1 {
		t.Fatalf("%d requests were asked for, want 1", len(c.requests))
	}
	return c.requests[0]
}

// ended waits until everything is released and the requests are counted with these codes.
func (c *chooser) ended(t *testing.T, released int, codes ...int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		c.mu.Lock()
		gotReleased, gotCodes := c.released, slices.Clone(c.codes)
		c.mu.Unlock()
		if gotReleased == released && slices.Equal(gotCodes, codes) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d exchanges were released, %v was counted; want %d and %v", gotReleased, gotCodes, released, codes)
		}
	}
}

type choice struct {
	*chooser
	decision Decision
	once     sync.Once
}

func (c *choice) Decision() Decision { return c.decision }

func (c *choice) ModifyResponse(served string, response *http.Response) error {
	c.mu.Lock()
	c.chooser.served = append(c.chooser.served, served)
	c.mu.Unlock()
	if c.modify != nil {
		return c.modify(response)
	}
	return nil
}

func (c *choice) Release() {
	c.once.Do(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.released++
	})
}

// serve serves a Picker over TCP and TLS.
func serve(t *testing.T, picker Picker) (server *Server, gateways, probes string) {
	t.Helper()
	gatewaytest.NoLeaks(t)
	config, err := TLSConfig("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	return serveWith(t, picker, config)
}

func serveWith(t *testing.T, picker Picker, config *tls.Config) (server *Server, gateways, probes string) {
	t.Helper()
	return serveOptions(t, picker, Options{TLS: config, MaxBodyBytes: maxBody})
}

func serveOptions(t *testing.T, picker Picker, options Options) (server *Server, gateways, probes string) {
	t.Helper()
	listen := func() net.Listener {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return listener
	}
	server = NewServer(picker, options)
	forGateways, forProbes := listen(), listen()
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(forGateways, forProbes) }()
	t.Cleanup(func() {
		stopped, cancel := context.WithCancel(context.Background())
		cancel()
		server.Shutdown(stopped) //nolint:errcheck // reports the streams that a test has left open
		if err := <-ended; err != nil {
			t.Errorf("the server ended with %v", err)
		}
	})
	return server, forGateways.Addr().String(), forProbes.Addr().String()
}

// open starts a request to a server with a Picker.
func open(t *testing.T, picker Picker, config *extprocv3.ProtocolConfiguration) *gatewaytest.Stream {
	t.Helper()
	_, address, _ := serve(t, picker)
	return gatewaytest.Open(t, gatewaytest.Dial(t, address), config)
}

func modes(request, response processingv3.ProcessingMode_BodySendMode) *extprocv3.ProtocolConfiguration {
	return &extprocv3.ProtocolConfiguration{RequestBodyMode: request, ResponseBodyMode: response}
}

func randomBytes(n int) []byte {
	data := make([]byte, n)
	source := rand.NewChaCha8([32]byte{1})
	source.Read(data) //nolint:errcheck // never fails
	return data
}
