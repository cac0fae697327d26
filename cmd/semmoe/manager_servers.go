// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/util/cert"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	ctrlwebhook "sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/semmoe/operator/internal/httpserver"
)

// noServer is the address that disables a server of controller-runtime.
const noServer = "0"

// The servers of controller-runtime accept any number of connections, and headers of 1 MiB on each. A manager uses the
// servers below instead.

// managedServer is a server that a manager runs, whether or not it is the leader.
type managedServer struct {
	name, address string
	options       httpserver.Options
}

// NeedLeaderElection reports that every manager serves.
func (s *managedServer) NeedLeaderElection() bool { return false }

// shutdownTimeout is the time limit for the last requests after a signal. The manager stops its webhooks first, then
// its other servers; both fit into stopTimeout.
const shutdownTimeout = 250 * time.Millisecond

// Start serves until the context ends.
func (s *managedServer) Start(ctx context.Context) error { return s.serve(ctx, func() {}) }

func (s *managedServer) serve(ctx context.Context, started func()) error {
	s.options.Log = logr.FromContextOrDiscard(ctx)
	server := httpserver.New(s.options)
	listener, err := net.Listen("tcp", s.address)
	if err != nil {
		return fmt.Errorf("failed to serve %s: %w", s.name, err)
	}
	started()
	stopped := make(chan error, 1)
	defer context.AfterFunc(ctx, func() {
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		err := server.Shutdown(drain)
		if errors.Is(err, context.DeadlineExceeded) {
			err = server.Close()
		}
		stopped <- err
	})()
	if err := server.Serve(listener); err != nil || ctx.Err() == nil {
		return err
	}
	return <-stopped
}

// addMetricsServer serves the manager's metrics over HTTPS, with the certificate in certDir, or, if certDir is empty,
// with a self-signed one. The API server authenticates and authorizes the callers.
func addMetricsServer(manager ctrl.Manager, address, certDir string) error {
	if address == noServer {
		return nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if certDir == "" {
		certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
		if err != nil {
			return fmt.Errorf("failed to create the certificate of the metrics server: %w", err)
		}
		pair, err := tls.X509KeyPair(certificate, key)
		if err != nil {
			return err
		}
		config.Certificates = []tls.Certificate{pair}
	} else {
		watcher, err := certwatcher.New(filepath.Join(certDir, "tls.crt"), filepath.Join(certDir, "tls.key"))
		if err == nil {
			config.GetCertificate, err = watcher.GetCertificate, manager.Add(watcher)
		}
		if err != nil {
			return fmt.Errorf("--metrics-cert-dir: %w", err)
		}
	}
	filter, err := filters.WithAuthenticationAndAuthorization(manager.GetConfig(), manager.GetHTTPClient())
	if err != nil {
		return err
	}
	handler, err := filter(manager.GetLogger().WithName("metrics"), promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	if err != nil {
		return err
	}
	routes := http.NewServeMux()
	routes.Handle("/metrics", handler)
	return manager.Add(&managedServer{name: "metrics", address: address, options: httpserver.Options{
		Handler: routes, TLS: config,
		MaxConnections: 64, ReadTimeout: 30 * time.Second, WriteTimeout: time.Minute,
	}})
}

// addHealthServer serves /healthz, and /readyz with the given checks.
func addHealthServer(manager ctrl.Manager, address string, ready map[string]healthz.Checker) error {
	if address == noServer || address == "" {
		return nil
	}
	routes := http.NewServeMux()
	for path, checks := range map[string]map[string]healthz.Checker{"/healthz": {"ping": healthz.Ping}, "/readyz": ready} {
		handler := http.StripPrefix(path, &healthz.Handler{Checks: checks})
		routes.Handle(path, handler)
		routes.Handle(path+"/", handler)
	}
	return manager.Add(&managedServer{name: "health probes", address: address, options: httpserver.Options{
		Handler: routes, MaxConnections: 64, MaxHeaderBytes: 8 << 10, ReadTimeout: 30 * time.Second, WriteTimeout: time.Minute,
	}})
}

// webhookServer serves admission reviews of at most 7 MiB each.
type webhookServer struct {
	ctrlwebhook.Server
	managed managedServer
	certDir string
	started atomic.Bool
}

// newWebhookServer returns a server with the certificate in a directory, or, if certDir is empty, with the certificate
// that configure sets.
func newWebhookServer(address, certDir string, configure func(*tls.Config)) *webhookServer {
	s := &webhookServer{Server: ctrlwebhook.NewServer(ctrlwebhook.Options{}), certDir: certDir}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if certDir == "" {
		configure(config)
	}
	s.managed = managedServer{name: "webhooks", address: address, options: httpserver.Options{
		TLS: config, MaxConnections: 64, ReadTimeout: 30 * time.Second, WriteTimeout: 30 * time.Second,
	}}
	return s
}

// Start serves until the context ends.
func (s *webhookServer) Start(ctx context.Context) error {
	if s.certDir != "" {
		watcher, err := certwatcher.New(filepath.Join(s.certDir, "tls.crt"), filepath.Join(s.certDir, "tls.key"))
		if err != nil {
			return fmt.Errorf("failed to read the certificate of the webhooks: %w", err)
		}
		s.managed.options.TLS.GetCertificate = watcher.GetCertificate
		go watcher.Start(ctx) //nolint:errcheck // it logs read errors and keeps the current certificate
	}
	s.managed.options.Handler = s.WebhookMux()
	return s.managed.serve(ctx, func() { s.started.Store(true) })
}

// StartedChecker returns a check that a TLS handshake with the server succeeds.
func (s *webhookServer) StartedChecker() healthz.Checker {
	return func(r *http.Request) error {
		if !s.started.Load() {
			return errors.New("the webhook server has not started yet")
		}
		dialer := &tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: &tls.Config{InsecureSkipVerify: true}}
		ctx := context.Background()
		if r != nil {
			ctx = r.Context()
		}
		connection, err := dialer.DialContext(ctx, "tcp", s.managed.address)
		if err != nil {
			return fmt.Errorf("the webhook server is not reachable: %w", err)
		}
		return connection.Close()
	}
}
