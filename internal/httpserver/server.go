// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
)

// The default limits of a server.
const (
	// defaultMaxHeaderBytes is enough for a bearer token and the headers of a few proxies.
	defaultMaxHeaderBytes = 16 << 10
	// defaultMaxConnections is for servers that only cluster components use: probes, monitoring, managers and engines.
	defaultMaxConnections = 256
	// DefaultReadHeaderTimeout limits the time of a TLS handshake, and of receiving a header. Both are short.
	DefaultReadHeaderTimeout = 10 * time.Second
	// BodyShutdownTimeout limits the time that a server that shuts down waits for the rest of a body (see BodyArrives).
	BodyShutdownTimeout = time.Second
	// defaultIdleTimeout limits the time that a connection stays open between two requests.
	defaultIdleTimeout = 2 * time.Minute
)

// Options are the settings of a server. Every limit has a default, so that a server always has all limits.
type Options struct {
	Handler http.Handler
	// Log receives the connection errors of net/http, at V(1).
	Log logr.Logger
	// MaxHeaderBytes limits the size of a request header. MaxConnections limits the number of open connections.
	MaxHeaderBytes, MaxConnections int
	// ReadHeaderTimeout limits the time to receive a header. IdleTimeout limits the time between two requests.
	ReadHeaderTimeout, IdleTimeout time.Duration
	// ReadTimeout and WriteTimeout limit the time of a request and of its response. They are 0 if the handler sets
	// deadlines.
	ReadTimeout, WriteTimeout time.Duration
	// TLS enables HTTPS. If it is nil, the server uses HTTP.
	TLS *tls.Config
	// MaxRequests limits the number of requests in progress of all connections; 0 means one for each connection.
	MaxRequests int
	// HTTP2 selects HTTP/2 only, with these settings. If it is nil, the server uses HTTP/1.1 only, with one request at
	// a time per connection.
	HTTP2 *http.HTTP2Config
	// Memory limits the memory of request headers. It may be nil if MaxConnections is a sufficient limit.
	Memory *Memory
}

// Server is an http.Server with all limits set.
type Server struct {
	*http.Server
	connections *connections
	running     running
}

// New returns a server. Serve starts it.
func New(o Options) *Server {
	s := &Server{connections: &connections{max: cmp.Or(o.MaxConnections, defaultMaxConnections), memory: o.Memory, all: map[*connection]bool{}}}
	s.connections.maxRequests = cmp.Or(o.MaxRequests, s.connections.max)
	s.Server = &http.Server{
		Handler:           s.counted(o.Handler),
		ErrorLog:          slog.NewLogLogger(logr.ToSlogHandler(o.Log.V(1)), slog.LevelInfo),
		MaxHeaderBytes:    cmp.Or(o.MaxHeaderBytes, defaultMaxHeaderBytes),
		ReadHeaderTimeout: cmp.Or(o.ReadHeaderTimeout, DefaultReadHeaderTimeout),
		IdleTimeout:       cmp.Or(o.IdleTimeout, defaultIdleTimeout),
		ReadTimeout:       o.ReadTimeout,
		WriteTimeout:      o.WriteTimeout,
		TLSConfig:         o.TLS,
		Protocols:         new(http.Protocols),
		HTTP2:             o.HTTP2,
		ConnState:         s.connections.changed,
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			c, ok := limited(conn)
			if !ok {
				return ctx
			}
			return context.WithValue(ctx, connectionKey{}, c)
		},
	}
	s.Protocols.SetHTTP1(o.HTTP2 == nil)
	s.Protocols.SetHTTP2(o.HTTP2 != nil && o.TLS != nil)
	s.Protocols.SetUnencryptedHTTP2(o.HTTP2 != nil && o.TLS == nil)
	return s
}

// NewProbes returns a server for health, readiness and metrics: requests without a body, and short responses.
func NewProbes(routes http.Handler, log logr.Logger) *Server {
	return New(Options{
		Handler: routes, Log: log, MaxHeaderBytes: 8 << 10, MaxConnections: 64, ReadTimeout: time.Minute, WriteTimeout: 5 * time.Minute,
	})
}

func (s *Server) counted(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer s.running.begin()()
		if c, ok := r.Context().Value(connectionKey{}).(*connection); ok {
			defer s.connections.begin(c)()
		}
		handler.ServeHTTP(w, r)
	})
}

// Shutdown accepts no new requests and waits for running requests until the context ends. It closes connections without
// a request after no request has run for a second, because http.Server waits 5 s for the first request of a connection.
// A request whose body is not complete after BodyShutdownTimeout fails as if its client were too slow: a client that
// stops sending must not delay the end of the process.
func (s *Server) Shutdown(ctx context.Context) error {
	idle, cancel := context.WithCancel(ctx)
	defer cancel()
	go s.connections.interruptBodies(idle)
	go func() {
		if s.running.idle(idle) {
			s.Close() //nolint:errcheck // Shutdown returns the error
		}
	}()
	return s.Server.Shutdown(ctx)
}

// Serve serves the connections of a listener. It returns nil after Shutdown or Close.
func (s *Server) Serve(listener net.Listener) error {
	listener = &limitedListener{listener, s.connections}
	var err error
	if s.TLSConfig != nil {
		err = s.ServeTLS(listener, "", "")
	} else {
		err = s.Server.Serve(listener)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
