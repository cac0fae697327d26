package router

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/picker"
)

// EndpointPickerOptions are the settings of a router that chooses for a gateway.
type EndpointPickerOptions struct {
	// Port is for gateways, HealthPort for gRPC health checks without TLS.
	Port, HealthPort int
	// TLS is nil for plain text.
	TLS *tls.Config
	// Fallbacks is how many endpoints a gateway is told beside the chosen one.
	Fallbacks int
}

// frontend is where requests come to the router.
type frontend interface {
	// Addr is the address that it listens on.
	Addr() net.Addr
	// Serve serves until Shutdown.
	Serve() error
	// SetReady says whether endpoints are known, and new requests welcome.
	SetReady(bool)
	// Shutdown takes no new requests, and lets the running ones finish until the context ends.
	Shutdown(context.Context) error
}

// newFrontend listens for clients, or for a gateway.
func newFrontend(pool *Pool, registry *prometheus.Registry, log logr.Logger, options Options) (frontend, *Observations, error) {
	port := options.Port
	if options.EndpointPicker != nil {
		port = options.EndpointPicker.Port
	}
	listener, err := listen(options.Host, port)
	if err != nil {
		return nil, nil, err
	}
	if options.EndpointPicker == nil {
		if options.Memory == nil {
			options.Memory = client.NewMemory(options.MaxBodyBytes)
		}
		proxy, observations := NewProxy(pool, registry, log, options.ProxyOptions)
		front := &clientFrontend{listener: listener}
		front.Server = httpserver.New(httpserver.Options{
			Handler: closingUnless(&front.ready, proxy), Log: log, ReadHeaderTimeout: headerTimeoutOf(options),
			MaxHeaderBytes: maxClientHeaderBytes, MaxConnections: cmp.Or(options.MaxConnections, DefaultMaxConnections), Memory: options.Memory,
		})
		return front, observations, nil
	}
	probes, err := listen(options.Host, options.EndpointPicker.HealthPort)
	if err != nil {
		listener.Close()
		return nil, nil, err
	}
	chooser, observations := NewEndpointPicker(pool, registry, options.ProxyOptions, options.EndpointPicker.Fallbacks)
	server := picker.NewServer(chooser, picker.Options{
		Log: log, TLS: options.EndpointPicker.TLS, MaxBodyBytes: options.MaxBodyBytes, MaxStreams: cmp.Or(options.MaxConnections, DefaultMaxConnections),
		RequestTimeout: options.ClientTimeout, Memory: options.Memory,
	})
	return &gatewayFrontend{server, listener, probes}, observations, nil
}

// DefaultMaxConnections bounds the connections of clients. One that is served takes about 60 KiB.
const DefaultMaxConnections = 4096

// maxClientHeaderBytes leaves room for cookies, which grow to several times the size of other headers.
const maxClientHeaderBytes = 64 << 10

// clientFrontend proxies for clients.
type clientFrontend struct {
	*httpserver.Server
	listener net.Listener
	ready    atomic.Bool
}

func (f *clientFrontend) Addr() net.Addr { return f.listener.Addr() }

func (f *clientFrontend) Serve() error { return f.Server.Serve(f.listener) }

// SetReady asks clients to leave while the router is not ready: others find it by the readiness of its pod, those that are
// connected do not look.
func (f *clientFrontend) SetReady(is bool) { f.ready.Store(is) }

// gatewayFrontend chooses for gateways.
type gatewayFrontend struct {
	*picker.Server
	listener, probes net.Listener
}

func (f *gatewayFrontend) Addr() net.Addr { return f.listener.Addr() }

func (f *gatewayFrontend) Serve() error { return f.Server.Serve(f.listener, f.probes) }
