// SPDX-License-Identifier: Apache-2.0

// Package connectproxy implements an HTTP proxy that only tunnels (method CONNECT). Test clusters use it to reach the
// pod network with end-to-end TLS, which the API server's proxy cannot forward.
package connectproxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
)

// Dial connects to the host and port of a CONNECT request.
type Dial func(ctx context.Context, network, address string) (net.Conn, error)

// ServeHTTP tunnels a connection until both sides are closed.
func (dial Dial) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodConnect {
		http.Error(w, "only CONNECT is allowed", http.StatusMethodNotAllowed)
		return
	}
	server, err := dial(r.Context(), "tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer server.Close()
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer client.Close()
	if _, err := fmt.Fprint(client, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	var both sync.WaitGroup
	both.Go(func() { tunnel(server, buffered, client) })
	both.Go(func() { tunnel(client, server, server) })
	both.Wait()
}

// tunnel copies one direction. At its end it closes both connections, which ends the other direction too.
func tunnel(to net.Conn, from io.Reader, source net.Conn) {
	io.Copy(to, from) //nolint:errcheck // an error ends the tunnel like the end of the stream
	to.Close()
	source.Close()
}
