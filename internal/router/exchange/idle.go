// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"syscall"
	"time"
)

// take returns the latest used connection to an address that can still be used; nil if there is none.
func (t *Transport) take(host string) *conn {
	for {
		t.mu.Lock()
		list := t.idle[host]
		if len(list) == 0 {
			t.mu.Unlock()
			return nil
		}
		c := list[len(list)-1]
		list[len(list)-1] = nil
		t.idle[host] = list[:len(list)-1]
		t.mu.Unlock()
		if time.Since(c.since) < t.IdleTimeout && c.alive() {
			return c
		}
		c.Close() //nolint:errcheck // it is not used any more
	}
}

// keep keeps a connection for the next request to its address.
func (t *Transport) keep(c *conn) {
	c.since = time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.idle[c.host]) >= t.MaxIdlePerHost {
		c.Close() //nolint:errcheck // it is not used any more
		return
	}
	if t.idle == nil {
		t.idle = map[string][]*conn{}
	}
	t.idle[c.host] = append(t.idle[c.host], c)
	if !t.sweeping {
		t.sweeping = true
		time.AfterFunc(t.IdleTimeout, t.sweep)
	}
}

// sweep closes the connections that were not used for the idle timeout.
func (t *Transport) sweep() { t.closeIdle(t.IdleTimeout) }

// CloseIdleConnections closes the connections without a request.
func (t *Transport) CloseIdleConnections() {
	t.closeIdle(0)
	if other, ok := t.Other.(interface{ CloseIdleConnections() }); ok {
		other.CloseIdleConnections()
	}
}

// closeIdle closes the connections that were not used for a time, and sets a timer while others are left.
func (t *Transport) closeIdle(unused time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, next := time.Now(), time.Duration(0)
	for host, list := range t.idle {
		old := 0 // connections are in the order of their last use
		for old < len(list) && now.Sub(list[old].since) >= unused {
			list[old].Close() //nolint:errcheck // it is not used any more
			old++
		}
		list = append(list[:0:0], list[old:]...)
		if t.idle[host] = list; len(list) == 0 {
			delete(t.idle, host)
			continue
		}
		next = max(next, t.IdleTimeout-now.Sub(list[0].since))
	}
	if t.sweeping = len(t.idle) > 0; t.sweeping {
		time.AfterFunc(max(next, time.Millisecond), t.sweep)
	}
}

// alive reports whether an idle connection is open and nothing has arrived on it. It does not block.
func (c *conn) alive() bool {
	file, ok := c.Conn.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return false
	}
	alive := false
	err = raw.Read(func(fd uintptr) bool {
		var next [1]byte
		n, err := syscall.Read(int(fd), next[:])
		alive = n < 0 && (err == syscall.EAGAIN || err == syscall.EWOULDBLOCK)
		return true
	})
	return err == nil && alive
}
