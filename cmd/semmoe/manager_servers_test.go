// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/semmoe/operator/internal/certs"
	"github.com/semmoe/operator/test/poll"
	"github.com/semmoe/operator/test/ports"
)

// A directory without a certificate is reported before the manager starts.
func TestMetricsCertificateMissing(t *testing.T) {
	manager, err := ctrl.NewManager(&rest.Config{Host: "https://" + ports.Address(t)}, ctrl.Options{Metrics: metricsserver.Options{BindAddress: noServer}})
	if err != nil {
		t.Fatal(err)
	}
	if err := addMetricsServer(manager, ports.Address(t), t.TempDir()); err == nil || !strings.Contains(err.Error(), "--metrics-cert-dir: open ") {
		t.Errorf("error %v", err)
	}
}

// A manager serves probes, metrics and webhooks with its own limits: it rejects a header that controller-runtime would
// accept. It ends immediately after a signal.
func TestManagerServers(t *testing.T) {
	health, metrics, webhooks := ports.Address(t), ports.Address(t), ports.Address(t)
	server := newWebhookServer(webhooks, "", func(config *tls.Config) { config.GetCertificate = certs.NewIssuer("localhost").Certificate })
	manager, err := ctrl.NewManager(&rest.Config{Host: "https://" + ports.Address(t)}, ctrl.Options{
		Metrics: metricsserver.Options{BindAddress: noServer}, HealthProbeBindAddress: noServer, WebhookServer: server,
	})
	if err != nil {
		t.Fatal(err)
	}
	metricsCertificate := t.TempDir()
	certificate, key, err := cert.GenerateSelfSignedCertKey("semmoe-manager-metrics", nil, nil)
	if err := errors.Join(err, os.WriteFile(filepath.Join(metricsCertificate, "tls.crt"), certificate, 0o600), os.WriteFile(filepath.Join(metricsCertificate, "tls.key"), key, 0o600)); err != nil {
		t.Fatal(err)
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(certificate)
	manager.GetWebhookServer().Register("/review", http.NotFoundHandler())
	ready := map[string]healthz.Checker{"ping": healthz.Ping}
	if err := errors.Join(addMetricsServer(manager, metrics, metricsCertificate), addHealthServer(manager, health, ready)); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()

	dial := map[string]func() (net.Conn, error){
		health: func() (net.Conn, error) { return net.Dial("tcp", health) },
		metrics: func() (net.Conn, error) {
			return tls.Dial("tcp", metrics, &tls.Config{RootCAs: authorities, ServerName: "semmoe-manager-metrics"})
		},
	}
	ask := func(address, path string, padding int) int {
		t.Helper()
		var connection net.Conn
		poll.Until(t, "the server at "+address+" accepts connections", func() bool {
			connection, err = dial[address]()
			return err == nil
		})
		defer connection.Close()
		if _, err := io.WriteString(connection, "GET "+path+" HTTP/1.1\r\nHost: x\r\nX-Long: "+strings.Repeat("x", padding)+"\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		response, err := http.ReadResponse(bufio.NewReader(connection), nil)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.StatusCode
	}
	for _, tc := range []struct {
		address, path string
		padding, want int
	}{
		{health, "/healthz", 10, http.StatusOK},
		{health, "/readyz", 10, http.StatusOK},
		{health, "/readyz/ping", 10, http.StatusOK},
		{health, "/healthz", 32 << 10, http.StatusRequestHeaderFieldsTooLarge},
		{metrics, "/metrics", 32 << 10, http.StatusRequestHeaderFieldsTooLarge},
		{metrics, "/metrics", 10, http.StatusUnauthorized},
	} {
		if got := ask(tc.address, tc.path, tc.padding); got != tc.want {
			t.Errorf("%s with a header of %d bytes: %d, want %d", tc.path, tc.padding, got, tc.want)
		}
	}
	poll.Until(t, "the webhook server starts", server.started.Load)
	// The issuer has no authority yet: the port is open, and handshakes fail.
	if err := server.StartedChecker()(nil); err == nil || !strings.Contains(err.Error(), "not reachable") {
		t.Errorf("a webhook server without a certificate is ready: %v", err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
