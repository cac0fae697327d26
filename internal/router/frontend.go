// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/httpserver/buildinfo"
	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/internal/router/wire"
)

// EndpointPickerOptions configures a router that chooses endpoints for a gateway.
type EndpointPickerOptions struct {
	// Port serves gateways, HealthPort serves gRPC health checks without TLS.
	Port, HealthPort int
	// TLS is nil for plain text.
	TLS *tls.Config
	// Fallbacks is the number of endpoints that a gateway gets in addition to the chosen one.
	Fallbacks int
}

// frontend accepts the requests of the router.
type frontend interface {
	// Addr returns the listening address.
	Addr() net.Addr
	// Serve serves until Shutdown.
	Serve() error
	// SetReady sets whether endpoints are known and new requests are accepted.
	SetReady(bool)
	// Shutdown accepts no new requests and waits for running requests until the context ends.
	Shutdown(context.Context) error
}

// newFrontend returns a frontend that listens for clients or for a gateway.
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
		var secured *tls.Config
		if options.TLS != nil {
			secured = options.TLS.Server("http/1.1")
		}
		front.Server = httpserver.New(httpserver.Options{
			TLS: secured, Handler: closingUnless(&front.ready, health(&front.ready, proxy)), Log: log, ReadHeaderTimeout: headerTimeoutOf(options),
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

// DefaultMaxConnections is the default maximum number of client connections. An active connection takes about 60 KiB.
const DefaultMaxConnections = 4096

// maxClientHeaderBytes allows for cookies, which can be several times as large as all other headers.
const maxClientHeaderBytes = 64 << 10

// health answers the health checks of clients and load balancers by the readiness of the router: /health of SGLang and
// vLLM, /ping of SageMaker. /version is the version of the router, because pods may differ.
func health(ready *atomic.Bool, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reads := r.Method == http.MethodGet || r.Method == http.MethodHead
		switch {
		case reads && r.URL.Path == "/version":
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(map[string]string{"version": buildinfo.Read().Version}) // a disconnected client needs no answer
		case !(reads && (r.URL.Path == "/health" || r.URL.Path == "/ping") || r.Method == http.MethodPost && r.URL.Path == "/ping"):
			next.ServeHTTP(w, r)
		case !ready.Load():
			w.Header().Set("Retry-After", "1")
			wire.WriteError(w, r.URL.Path, http.StatusServiceUnavailable, wire.Unavailable, "the request router does not know its endpoints yet, or is draining")
		}
	})
}

// clientFrontend proxies requests of clients.
type clientFrontend struct {
	*httpserver.Server
	listener net.Listener
	ready    atomic.Bool
}

func (f *clientFrontend) Addr() net.Addr { return f.listener.Addr() }

func (f *clientFrontend) Serve() error { return f.Server.Serve(f.listener) }

// SetReady makes the frontend close client connections while the router is not ready. Connected clients do not observe
// the readiness of the pod.
func (f *clientFrontend) SetReady(is bool) { f.ready.Store(is) }

// gatewayFrontend chooses endpoints for gateways.
type gatewayFrontend struct {
	*picker.Server
	listener, probes net.Listener
}

func (f *gatewayFrontend) Addr() net.Addr { return f.listener.Addr() }

func (f *gatewayFrontend) Serve() error { return f.Server.Serve(f.listener, f.probes) }
