// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"cmp"
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/client"
)

// Services of the gRPC health checks.
const (
	// LivenessService is serving while the process runs.
	LivenessService = "liveness"
	// ReadinessService, like the service of the protocol, is serving while endpoints are known and new requests are
	// accepted.
	ReadinessService = "readiness"
)

// messageSlack is the maximum size of headers and metadata in a message, in addition to a body of maximum size.
const messageSlack = 1 << 20

const (
	// maxConnections is sufficient for all worker threads of a few gateways, each of which has one connection.
	maxConnections = 256
	// maxConnectionStreams is the maximum number of concurrent requests per connection. A gateway opens further
	// connections for more.
	maxConnectionStreams = 1000
	// DefaultMaxStreams is the default maximum number of concurrent requests of all connections.
	DefaultMaxStreams = 4096
	// streamBytes is the memory of a stream in addition to its messages: a goroutine and HTTP/2 buffers.
	streamBytes = 32 << 10
	// maxHeaderMessage is the maximum size of the message with the request header.
	maxHeaderMessage = 64 << 10
	// maxRefused is the maximum number of streams above the limit, which wait for their header to be refused.
	maxRefused = 256
	// maxChecks is the maximum number of concurrent health checks of a port.
	maxChecks = 256
	// maxIdle is the maximum time that a stream waits for the gateway once a request is complete: longer than any
	// engine computes.
	maxIdle = time.Hour
)

// http2Settings are the settings of gateway connections. The windows bound the data that arrives unread.
var http2Settings = http.HTTP2Config{
	MaxConcurrentStreams:          maxConnectionStreams,
	MaxReceiveBufferPerConnection: 512 << 10,
	MaxReceiveBufferPerStream:     128 << 10,
	SendPingTimeout:               30 * time.Second,
	PingTimeout:                   15 * time.Second,
	WriteByteTimeout:              time.Minute,
}

// Options configures a server.
type Options struct {
	// Log logs errors of individual connections.
	Log logr.Logger
	// TLS is nil for plain text.
	TLS *tls.Config
	// MaxBodyBytes is the maximum size of a request body, which stays in memory until an endpoint is picked.
	MaxBodyBytes int64
	// MaxStreams is the maximum number of concurrent requests; 0 means DefaultMaxStreams.
	MaxStreams int
	// RequestTimeout is the maximum time until the next message of a request; 0 means no limit.
	RequestTimeout time.Duration
	// Memory bounds the memory of all requests; nil selects client.NewMemory.
	Memory *httpserver.Memory
}

// Server serves the protocol and its health checks.
type Server struct {
	service, probes *httpserver.Server
	health          *health.Server
	processor       processor
	// gatewayChecks and probeChecks are the health checks of the two ports.
	gatewayChecks, probeChecks streams
	memory                     *httpserver.Memory
	maxMessage                 int64
	// stop ends the health checks that watch for changes.
	stopping context.Context
	stop     context.CancelFunc
}

// NewServer returns a server for a Picker. It is not ready until SetReady(true).
func NewServer(picker Picker, options Options) *Server {
	if options.Memory == nil {
		options.Memory = client.NewMemory(options.MaxBodyBytes)
		// A body that a gateway sends in one piece has two copies when it is returned.
		options.Memory.Max = max(options.Memory.Max, 4*options.MaxBodyBytes)
	}
	s := &Server{
		health: health.NewServer(), memory: options.Memory, maxMessage: min(options.MaxBodyBytes, 1<<30) + messageSlack,
		processor: processor{
			picker: picker, maxBody: options.MaxBodyBytes, memory: options.Memory, timeout: options.RequestTimeout,
			streams: streams{max: cmp.Or(options.MaxStreams, DefaultMaxStreams)},
		},
	}
	// Refusals wait for their connection to send them.
	maxRequests := s.processor.streams.max + 2*(maxRefused+maxChecks)
	s.stopping, s.stop = context.WithCancel(context.Background())
	settings, probeSettings := http2Settings, http2Settings
	s.service = httpserver.New(httpserver.Options{
		Handler: http.HandlerFunc(s.serveGateway), Log: options.Log, TLS: options.TLS, MaxConnections: maxConnections, MaxRequests: maxRequests, HTTP2: &settings,
	})
	s.gatewayChecks.max, s.probeChecks.max = maxChecks, maxChecks
	s.probes = httpserver.New(httpserver.Options{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serveProbe(w, r, &s.probeChecks) }), Log: options.Log,
		MaxConnections: 64, MaxRequests: 4 * maxChecks, HTTP2: &probeSettings,
	})
	s.health.SetServingStatus(LivenessService, healthpb.HealthCheckResponse_SERVING)
	s.SetReady(false)
	return s
}

// SetReady sets whether new requests are accepted.
func (s *Server) SetReady(ready bool) {
	state := healthpb.HealthCheckResponse_NOT_SERVING
	if ready {
		state = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(ReadinessService, state)
	s.health.SetServingStatus(extprocv3.ExternalProcessor_ServiceDesc.ServiceName, state)
}

// Serve serves gateways, and probes without TLS, until Shutdown.
func (s *Server) Serve(gateways, probes net.Listener) error {
	var group errgroup.Group
	group.Go(func() error { return s.service.Serve(gateways) })
	group.Go(func() error { return s.probes.Serve(probes) })
	return group.Wait()
}

// Shutdown accepts no new requests and waits for running ones until the context ends. Then it aborts them and returns
// an error.
func (s *Server) Shutdown(ctx context.Context) error {
	s.SetReady(false)
	s.stop()
	defer s.probes.Close()
	if err := s.service.Shutdown(ctx); err != nil {
		return errors.Join(fmt.Errorf("running requests were aborted: %w", err), s.service.Close())
	}
	return nil
}

// serveGateway serves a call of a gateway: a request, or a health check on the same port.
func (s *Server) serveGateway(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != extprocv3.ExternalProcessor_Process_FullMethodName {
		s.serveProbe(w, r, &s.gatewayChecks)
		return
	}
	serveCall(s.call(w, r, s.maxMessage), s.processor.process)
}

// serveProbe serves health checks. The checks are those of the port. If there are too many, the oldest one is interrupted.
func (s *Server) serveProbe(w http.ResponseWriter, r *http.Request, checks *streams) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	c := s.call(w, r.WithContext(ctx), 1<<10)
	c.limit, c.writeLimit = httpserver.DefaultReadHeaderTimeout, httpserver.DefaultReadHeaderTimeout
	serveCall(c, func(*call) error {
		method := s.checkHealth
		switch r.URL.Path {
		case healthpb.Health_Check_FullMethodName:
		case healthpb.Health_Watch_FullMethodName:
			method = s.watchHealth
		default:
			return status.Errorf(codes.Unimplemented, "unknown method %q", r.URL.Path)
		}
		interrupt := c.interrupt(c.control.SetReadDeadline)
		_, arrived, err := checks.open(func() { interrupt(); cancel() })
		if err != nil {
			return err
		}
		defer checks.close()
		defer arrived()
		return method(c)
	})
}

func (s *Server) call(w http.ResponseWriter, r *http.Request, maxMessage int64) *call {
	return &call{request: r, writer: w, control: http.NewResponseController(w), memory: s.memory, maxMessage: maxMessage}
}

func (s *Server) checkHealth(c *call) error {
	asked := &healthpb.HealthCheckRequest{}
	if err := c.receive(asked); err != nil {
		return ended(err)
	}
	answer, err := s.health.Check(c.Context(), asked)
	if err != nil {
		return err
	}
	return c.send(answer)
}

func (s *Server) watchHealth(c *call) error {
	asked := &healthpb.HealthCheckRequest{}
	if err := c.receive(asked); err != nil {
		return ended(err)
	}
	ctx, cancel := context.WithCancel(c.Context())
	defer cancel()
	defer context.AfterFunc(s.stopping, cancel)()
	return s.health.Watch(asked, &watcher{call: c, ctx: ctx})
}

// watcher is the stream of a health check that watches for changes.
type watcher struct {
	grpc.ServerStream // the health service calls no other method
	call              *call
	ctx               context.Context
}

func (w *watcher) Context() context.Context { return w.ctx }

func (w *watcher) Send(answer *healthpb.HealthCheckResponse) error {
	return errors.Join(w.call.send(answer), w.call.flush())
}

// processor implements the protocol.
type processor struct {
	picker  Picker
	maxBody int64
	memory  *httpserver.Memory
	timeout time.Duration
	streams streams
}

// process serves one request of a gateway.
func (p *processor) process(c *call) error {
	c.limit, c.writeLimit = p.timeout, p.timeout
	x := &exchange{stream: &stream{call: c}, picker: p.picker, maxBody: p.maxBody, memory: p.memory}
	var err error
	interrupt := c.interrupt(c.control.SetReadDeadline)
	if x.admitted, x.arrived, err = p.streams.open(func() { c.replaced.Store(true); interrupt() }); err != nil {
		return err
	}
	defer p.streams.close()
	if !x.admitted && p.timeout > 0 {
		c.limit = min(c.limit, httpserver.DefaultReadHeaderTimeout)
	}
	defer x.arrived()
	return x.run()
}

// errTooManyStreams ends a stream whose header is not read, or that another one has replaced.
var errTooManyStreams = status.Error(codes.ResourceExhausted, "there are too many concurrent requests")

// streams tracks the open streams of all connections. At the limit, a new stream replaces the stream that has waited
// longest for the rest of its request.
type streams struct {
	max int

	mu         sync.Mutex
	n          int
	incomplete list.List // functions that interrupt streams with an incomplete request, longest wait first
}

// open registers a new stream, which ends with close. If there are too many, it interrupts the one that has waited
// longest for its request. It reports false if all streams have complete requests: the new one can only be refused.
// The error reports that there are too many of these as well, or of streams that have not ended yet. arrived must be
// called when the request of the new stream is complete.
func (s *streams) open(interrupt func()) (admitted bool, arrived func(), err error) {
	// The interruption waits for another connection, so that it would delay all streams under the lock.
	replaced := func() {}
	defer func() { replaced() }()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n >= s.max+maxRefused {
		return false, nil, errTooManyStreams
	}
	if s.n >= s.max {
		longest := s.incomplete.Front()
		if longest == nil {
			s.n++
			return false, func() {}, nil
		}
		replaced = s.incomplete.Remove(longest).(func()) // the stream ends as soon as its reader returns
	}
	s.n++
	place := s.incomplete.PushBack(interrupt)
	return true, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.incomplete.Remove(place) // a second call is a no-op
	}, nil
}

func (s *streams) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n--
}
