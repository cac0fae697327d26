// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/router/exchange"
	"github.com/semmoe/operator/internal/router/tlsfiles"
)

// engineHandshakeTimeout bounds a TLS handshake with an engine.
const engineHandshakeTimeout = 5 * time.Second

// EngineConnections configures the connections to engines. The zero value is for engines without TLS and without a key,
// and for engines with TLS whose certificates the authorities of the system verify.
type EngineConnections struct {
	// RequireTLS is true if all pods serve TLS. Otherwise their annotations select TLS. Backends of a list name the scheme.
	RequireTLS bool
	// TLS contains the authorities of the engines, and the certificate of the router; nil selects the authorities of the
	// system and no certificate.
	TLS *tlsfiles.Files
	// ServerName is the name in the certificates of the engines; empty selects the host of the address.
	ServerName string
	// APIKey is the key that the engines require; empty if there is none.
	APIKey string
	// Log receives TLS errors, once for each engine and error.
	Log logr.Logger
}

// newTransport returns the connections to all engines. It sets no timeout for the response header: a long prompt on a
// loaded engine may take any time, and the client decides how long it waits.
func newTransport(options EngineConnections) http.RoundTripper {
	const (
		idlePerHost = 256
		// Engine servers close a connection after 5 s without requests. A request that is sent at that moment is lost.
		idleTimeout = 4 * time.Second
		// The default of net/http is 10 MiB per response.
		maxHeader = 256 << 10
	)
	dialer := &engineDialer{Dialer: net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}, options: options, reported: map[string]string{}}
	transport := &exchange.Transport{
		Dial: dialer.DialContext, IdleTimeout: idleTimeout, MaxIdlePerHost: idlePerHost, MaxHeaderBytes: maxHeader,
		Other: &http.Transport{
			DialContext: dialer.DialContext, DialTLSContext: dialer.dialTLS, MaxIdleConnsPerHost: idlePerHost, IdleConnTimeout: idleTimeout,
			DisableCompression: true, MaxResponseHeaderBytes: maxHeader,
		},
	}
	if options.APIKey == "" {
		return transport
	}
	return &keyedTransport{transport, "Bearer " + options.APIKey}
}

// engineDialer opens connections to engines.
type engineDialer struct {
	net.Dialer
	options EngineConnections

	mu sync.Mutex
	// reported contains the last TLS error of each address.
	reported map[string]string
}

// dialTLS opens a TLS connection. An engine that fails the handshake counts as unreachable: it has received no request.
func (d *engineDialer) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	connection, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	secured, err := d.handshake(ctx, connection, address)
	if err == nil {
		d.report(address, nil)
		return secured, nil
	}
	connection.Close()
	if ctx.Err() == nil {
		d.report(address, err)
	}
	return nil, &net.OpError{Op: "dial", Net: network, Addr: connection.RemoteAddr(), Err: fmt.Errorf("TLS handshake with the engine: %w", err)}
}

func (d *engineDialer) handshake(ctx context.Context, connection net.Conn, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	files := d.options.TLS
	if files == nil {
		files = &tlsfiles.Files{}
	}
	config, err := files.Client(cmp.Or(d.options.ServerName, host))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, engineHandshakeTimeout)
	defer cancel()
	secured := tls.Client(connection, config)
	return secured, secured.HandshakeContext(ctx)
}

// maxReported bounds the number of addresses with a reported error.
const maxReported = 4096

// report logs an error of an engine that differs from its last one. A nil error forgets the last one.
func (d *engineDialer) report(address string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		delete(d.reported, address)
		return
	}
	reason := printable.Steady(err.Error())
	if d.reported[address] == reason || len(d.reported) == maxReported {
		return
	}
	d.reported[address] = reason
	d.options.Log.Info("TLS handshake with an engine failed; the engine gets no requests", "address", address, "reason", reason)
}

// keyedTransport authenticates the router to engines.
type keyedTransport struct {
	next          http.RoundTripper
	authorization string
}

// RoundTrip sends a copy of a request with the key.
func (t *keyedTransport) RoundTrip(in *http.Request) (*http.Response, error) {
	out := *in
	out.Header = in.Header.Clone()
	out.Header.Set("Authorization", t.authorization)
	return t.next.RoundTrip(&out)
}
