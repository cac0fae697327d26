// SPDX-License-Identifier: Apache-2.0

package router

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/picker"
)

const (
	// maxPrivateConnections is the maximum number of connections to the port for managers, verified or not.
	maxPrivateConnections = 256
	// privateWriteTimeout bounds the time to write a response to a manager; the largest response has about 200 MB.
	privateWriteTimeout = time.Minute
)

// newPrivateServer returns the server of observations and live samples. It answers only clients with a certificate of
// the managers' authority, given as PEM, because live samples can contain prompts.
func newPrivateServer(observations *Observations, authority []byte, log logr.Logger) (*httpserver.Server, error) {
	managers := x509.NewCertPool()
	if !managers.AppendCertsFromPEM(authority) {
		return nil, errors.New("the certificate authority of the managers is invalid: at least one PEM certificate is required")
	}
	config, err := picker.TLSConfig("", "", "")
	if err != nil {
		return nil, err
	}
	config.MinVersion, config.NextProtos = tls.VersionTLS13, nil
	config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, managers
	return httpserver.New(httpserver.Options{
		Handler: privateRoutes(observations), TLS: config, Log: log, MaxConnections: maxPrivateConnections,
		ReadTimeout: httpserver.DefaultReadHeaderTimeout, WriteTimeout: privateWriteTimeout,
	}), nil
}

func privateRoutes(observations *Observations) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /v1/observations", observations)
	mux.HandleFunc("GET "+livesamples.CountsPath, observations.live.ServeCounts)
	mux.HandleFunc("GET "+livesamples.SequencesPath, observations.live.ServeSequences)
	return mux
}

// listenPrivately opens the port for managers. The server is nil if no authority is configured.
func listenPrivately(options Options, observations *Observations, log logr.Logger) (*httpserver.Server, net.Listener, error) {
	if len(options.ManagerAuthority) == 0 {
		return nil, nil, nil
	}
	server, err := newPrivateServer(observations, options.ManagerAuthority, log)
	if err != nil {
		return nil, nil, err
	}
	listener, err := listen(options.Host, options.PrivatePort)
	if err != nil {
		return nil, nil, err
	}
	return server, listener, nil
}
