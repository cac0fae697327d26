// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/httpserver"
)

const (
	maxPprofConnections = 4
	// pprofWriteTimeout bounds one profile; ?seconds= selects its length.
	pprofWriteTimeout = 5 * time.Minute
)

// listenForPprof opens the port for profiles of the process. The server is nil if no address is configured.
func listenForPprof(address string, log logr.Logger) (*httpserver.Server, net.Listener, error) {
	if address == "" {
		return nil, nil, nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return httpserver.New(httpserver.Options{
		Handler: mux, Log: log, MaxConnections: maxPprofConnections, ReadTimeout: httpserver.DefaultReadHeaderTimeout, WriteTimeout: pprofWriteTimeout,
	}), listener, nil
}
