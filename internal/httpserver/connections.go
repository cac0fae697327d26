package httpserver

import (
	"bytes"
	"container/list"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

// headerLineBytes is what a parsed line of a header takes next to its text: its place in the map, its strings, and their copies in the
// request that is passed on.
const headerLineBytes = 256

// connections are the open connections of a server. Where there are too many, a new one takes the place of the one that has waited longest
// for a request, or for the rest of one. A client of HTTP repeats a request on a connection that was closed while it was idle.
type connections struct {
	max    int
	memory *Memory

	mu  sync.Mutex
	all map[*connection]bool
	// waiting are the connections without a whole request, the longest wait first.
	waiting list.List
}

// limitedListener accepts connections within their limit.
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
		accepted.Close() // every connection has a request: the newest client has to come back
	}
}

// add returns nil where no place is free.
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

// remove forgets a connection. Removing it twice is a no-op.
func (s *connections) remove(c *connection) *connection {
	delete(s.all, c)
	c.stopWaiting()
	return c
}

// limited is the connection that was accepted, below TLS.
func limited(conn net.Conn) (*connection, bool) {
	if secured, ok := conn.(*tls.Conn); ok {
		conn = secured.NetConn()
	}
	c, ok := conn.(*connection)
	return c, ok
}

// changed follows the states of a connection, as a ConnState hook of net/http.
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
		c.headerWhole(true)
	case http.StateIdle:
		c.wait()
		c.headerWhole(false)
	case http.StateClosed, http.StateHijacked:
		s.remove(c)
		if c.share != nil {
			c.share.Release()
		}
	}
}

// connection counts what arrives of a header.
type connection struct {
	net.Conn
	server *connections
	// place is where the connection waits; nil while it has a whole request. The server's lock guards it.
	place *list.Element

	// share is what the header of the present request takes; nil where headers are not counted.
	share *Share
	mu    sync.Mutex
	// arriving is true from the end of a request until the header of the next one is whole.
	arriving bool
}

func (c *connection) stopWaiting() {
	if c.place != nil {
		c.server.waiting.Remove(c.place)
		c.place = nil
	}
}

// headerWhole keeps what a header takes until its request has been answered, and forgets it then.
func (c *connection) headerWhole(whole bool) {
	if c.share == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arriving = !whole
	if whole {
		c.share.Finish() //nolint:errcheck // the connection of a revoked share is closed
	} else {
		c.share.Release()
	}
}

// connectionKey is where a request's context has its connection.
type connectionKey struct{}

// BodyArrives marks the connection of a request as waiting for the request's body, until arrived is called.
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

// wait puts an open connection at the end of those that wait.
func (c *connection) wait() {
	if c.place == nil && c.server.all[c] {
		c.place = c.server.waiting.PushBack(c)
	}
}

// Read reads from the connection, and ends it where there is no memory for its header.
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

// CloseWrite lets net/http end an answer before the connection, so that a client that still sends reads it.
func (c *connection) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
