// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"bytes"
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// headerLineBytes is the memory of a parsed header line in addition to its text, in bytes: its map entry, its strings,
// and their copies in a forwarded request.
const headerLineBytes = 256

// connections holds the open connections of a server. If the limit is reached, a new connection replaces the connection
// that has waited longest for a request or for the rest of one. An HTTP client repeats a request if its idle connection
// is closed.
type connections struct {
	max, maxRequests int
	memory           *Memory

	mu  sync.Mutex
	all map[*connection]bool
	// waiting holds the connections without a complete request, in descending order of waiting time.
	waiting list.List
}

// limitedListener limits the number of accepted connections.
type limitedListener struct {
	net.Listener
	connections *connections
}

func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		accepted, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c := l.connections.add(accepted); c != nil {
			return c, nil
		}
		accepted.Close() // all connections have a request in progress; the new client must retry
	}
}

// add adds a connection. It returns nil if the limit is reached and no connection can be replaced.
func (s *connections) add(accepted net.Conn) *connection {
	c := &connection{Conn: accepted, server: s, arriving: true}
	if s.memory != nil {
		c.share = s.memory.Open(func() { accepted.Close() })
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= s.max {
		longest := s.waiting.Front()
		if longest == nil {
			return nil
		}
		s.remove(longest.Value.(*connection)).Conn.Close()
	}
	s.all[c] = true
	c.place = s.waiting.PushBack(c)
	return c
}

// remove removes a connection. Removing it twice is a no-op.
func (s *connections) remove(c *connection) *connection {
	delete(s.all, c)
	c.stopWaiting()
	return c
}

// requestsPerCheck is the number of requests by which those of a connection grow between two checks of the limit.
const requestsPerCheck = 16

// begin counts a request of a connection until end is called. Above the limit, it closes the connections with the most
// requests. To refuse requests would not help, because those that wait for their connection to send the refusal take
// memory too. It takes no lock that others hold: thousands of requests may begin at once.
func (s *connections) begin(c *connection) (end func()) {
	if c.requests.Add(1)%requestsPerCheck == 0 && s.mu.TryLock() {
		s.shed()
		s.mu.Unlock()
	}
	return func() { c.requests.Add(-1) }
}

// shed closes the connections with the most requests, until those of the others are within the limit.
func (s *connections) shed() {
	for {
		var sum, most int64
		var busiest *connection
		for c := range s.all {
			n := c.requests.Load()
			if sum += n; n > most {
				most, busiest = n, c
			}
		}
		if sum <= int64(s.maxRequests) {
			return
		}
		s.remove(busiest).Conn.Close()
	}
}

// limited returns the accepted connection below TLS.
func limited(conn net.Conn) (*connection, bool) {
	if secured, ok := conn.(*tls.Conn); ok {
		conn = secured.NetConn()
	}
	c, ok := conn.(*connection)
	return c, ok
}

// changed is the ConnState hook of net/http. It follows the state of a connection.
func (s *connections) changed(conn net.Conn, state http.ConnState) {
	c, ok := limited(conn)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch state {
	case http.StateActive:
		c.stopWaiting()
		c.headerComplete(true)
	case http.StateIdle:
		c.wait()
		c.headerComplete(false)
	case http.StateClosed, http.StateHijacked:
		s.remove(c)
		if c.share != nil {
			c.share.Release()
		}
	}
}

// connection counts the bytes of headers.
type connection struct {
	net.Conn
	server *connections
	// place is the position in the list of waiting connections, or nil while the connection has a complete request. The
	// server's lock guards it.
	place *list.Element
	// requests is the number of requests in progress.
	requests atomic.Int64

	// share is the memory of the header of the present request, or nil if headers are not counted.
	share *Share
	mu    sync.Mutex
	// arriving is true from the end of a request until the header of the next request is complete.
	arriving bool
}

func (c *connection) stopWaiting() {
	if c.place != nil {
		c.server.waiting.Remove(c.place)
		c.place = nil
	}
}

// headerComplete marks the header as complete, so that its memory stays reserved, or releases its memory after the
// response.
func (c *connection) headerComplete(complete bool) {
	if c.share == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arriving = !complete
	if complete {
		c.share.Finish() //nolint:errcheck // the connection of a revoked share is closed
	} else {
		c.share.Release()
	}
}

// connectionKey is the context key of a request's connection.
type connectionKey struct{}

// BodyArrives marks the connection of a request as waiting for the body of the request, until arrived is called.
func BodyArrives(r *http.Request) (arrived func()) {
	c, ok := r.Context().Value(connectionKey{}).(*connection)
	if !ok {
		return func() {}
	}
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	c.wait()
	return func() {
		c.server.mu.Lock()
		defer c.server.mu.Unlock()
		c.stopWaiting()
	}
}

// interruptBodies ends the reads of all bodies that are still arriving after BodyShutdownTimeout, until the context ends.
// A request whose header was arriving may begin later, so it repeats.
func (s *connections) interruptBodies(ctx context.Context) {
	tick := time.NewTicker(BodyShutdownTimeout)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s.mu.Lock()
		for place := s.waiting.Front(); place != nil; place = place.Next() {
			place.Value.(*connection).SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // a closed connection has no body to wait for
		}
		s.mu.Unlock()
	}
}

// wait appends an open connection to the list of waiting connections.
func (c *connection) wait() {
	if c.place == nil && c.server.all[c] {
		c.place = c.server.waiting.PushBack(c)
	}
}

// Read reads from the connection. It closes the connection if there is no memory for its header.
func (c *connection) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.share == nil || n == 0 {
		return n, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.arriving {
		if err := c.share.Take(int64(n + headerLineBytes*bytes.Count(p[:n], []byte{'\n'}))); err != nil {
			c.Conn.Close()
			return 0, err
		}
	}
	return n, err
}

// CloseWrite closes the write side. net/http uses it, so that a client that is still sending can read the response
// before the connection ends.
func (c *connection) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
