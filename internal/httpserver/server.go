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

// Limits of a server that sets no others.
const (
	// DefaultMaxHeaderBytes holds a bearer token and the headers of a few proxies.
	DefaultMaxHeaderBytes = 16 << 10
	// DefaultMaxConnections is for servers that only components of a cluster use: probes, monitoring, managers, engines.
	DefaultMaxConnections = 256
	// DefaultReadHeaderTimeout bounds how long a TLS handshake and a header may take, since both are short.
	DefaultReadHeaderTimeout = 10 * time.Second
	// DefaultIdleTimeout bounds how long a connection stays open between two requests.
	DefaultIdleTimeout = 2 * time.Minute
)

// Options are the settings of a server. Every limit has a default: a server cannot be without one.
type Options struct {
	Handler http.Handler
	// Log receives what net/http reports of single connections, at V(1).
	Log logr.Logger
	// MaxHeaderBytes bounds the header of a request, MaxConnections the open connections.
	MaxHeaderBytes, MaxConnections int
	// ReadHeaderTimeout bounds the time of a header, IdleTimeout the time between two requests.
	ReadHeaderTimeout, IdleTimeout time.Duration
	// ReadTimeout and WriteTimeout bound a whole request and its answer; 0 where the handler sets deadlines itself.
	ReadTimeout, WriteTimeout time.Duration
	// TLS serves HTTPS; nil for HTTP.
	TLS *tls.Config
	// HTTP2 serves HTTP/2 only, with these settings; nil for HTTP/1.1 only, where a connection carries one request at a time.
	HTTP2 *http.HTTP2Config
	// Memory counts the headers of requests; nil where MaxConnections is bound enough.
	Memory *Memory
}

// Server is an http.Server whose limits are all set.
type Server struct {
	*http.Server
	connections *connections
	running     running
}

// New returns a server that serves nothing yet.
func New(o Options) *Server {
	s := &Server{connections: &connections{max: cmp.Or(o.MaxConnections, DefaultMaxConnections), memory: o.Memory, all: map[*connection]bool{}}}
	s.Server = &http.Server{
		Handler:           s.counted(o.Handler),
		ErrorLog:          slog.NewLogLogger(logr.ToSlogHandler(o.Log.V(1)), slog.LevelInfo),
		MaxHeaderBytes:    cmp.Or(o.MaxHeaderBytes, DefaultMaxHeaderBytes),
		ReadHeaderTimeout: cmp.Or(o.ReadHeaderTimeout, DefaultReadHeaderTimeout),
		IdleTimeout:       cmp.Or(o.IdleTimeout, DefaultIdleTimeout),
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

// NewProbes returns a server of routes whose requests have no body and whose answers are short: health, readiness, metrics.
func NewProbes(routes http.Handler, log logr.Logger) *Server {
	return New(Options{
		Handler: routes, Log: log, MaxHeaderBytes: 8 << 10, MaxConnections: 64, ReadTimeout: time.Minute, WriteTimeout: 5 * time.Minute,
	})
}

func (s *Server) counted(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer s.running.begin()()
		handler.ServeHTTP(w, r)
	})
}

// Shutdown takes no new requests, and lets those that run finish until the context ends. It closes connections without a request once no
// request has run for a second: http.Server waits 5 s for the first request of a connection.
func (s *Server) Shutdown(ctx context.Context) error {
	idle, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		if s.running.idle(idle) {
			s.Close() //nolint:errcheck // Shutdown returns what has failed
		}
	}()
	return s.Server.Shutdown(ctx)
}

// Serve serves the connections of a listener until Shutdown or Close, which are no error.
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
