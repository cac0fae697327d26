// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
)

// ErrNoMemory reports a request that exceeds the memory limit.
var ErrNoMemory = errors.New("the server has no memory left for another request")

// Memory limits the memory that is reserved for the requests of a server. Requests that are still arriving have a
// separate, lower limit. If they reach their limit, the reservation of the largest one is revoked in favor of smaller
// ones, so that clients that send large requests slowly do not block other clients. Memory is safe for concurrent use.
type Memory struct {
	// Max limits the memory of all requests, in bytes. MaxArriving limits the memory of incomplete requests; 0 means
	// Max.
	Max, MaxArriving int64

	mu             sync.Mutex
	held, arriving int64
	// shares are the non-empty shares of incomplete requests.
	shares map[*Share]bool
}

// Held returns the number of reserved bytes.
func (m *Memory) Held() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.held
}

// Fits reports whether a request of the given size fits if the shares of all incomplete requests are revoked.
func (m *Memory) Fits(bytes int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes <= m.Max-(m.held-m.arriving)
}

// Open returns an empty share for an incomplete request. If another request revokes the share, Memory calls revoke,
// which must stop reading the request without blocking and without calling Take. revoke is not called after Finish or
// Release.
func (m *Memory) Open(revoke func()) *Share { return &Share{memory: m, revoke: revoke} }

// Share is the memory that is reserved for one request. It is safe for concurrent use.
type Share struct {
	memory *Memory
	revoke func()

	// The lock of the memory guards the following fields.
	bytes            int64
	whole, isRevoked bool
}

// Take reserves more memory. The error wraps ErrNoMemory if there is none, or if the share was revoked.
func (s *Share) Take(bytes int64) error {
	m := s.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		switch {
		case s.isRevoked:
			return m.none()
		case m.held+bytes <= m.Max && (s.whole || m.arriving+bytes <= cmp.Or(m.MaxArriving, m.Max)):
			s.bytes += bytes
			m.held += bytes
			if !s.whole {
				m.arriving += bytes
				if m.shares == nil {
					m.shares = map[*Share]bool{}
				}
				m.shares[s] = true
			}
			return nil
		}
		largest := m.largest()
		if largest == nil || largest == s || largest.bytes <= s.bytes+bytes {
			return m.none()
		}
		largest.isRevoked = true
		largest.drop()
		largest.revoke()
	}
}

func (m *Memory) none() error {
	return fmt.Errorf("%w: the limit is %d bytes for all requests, and %d for incomplete requests", ErrNoMemory, m.Max, cmp.Or(m.MaxArriving, m.Max))
}

// largest returns the largest share of an incomplete request.
func (m *Memory) largest() *Share {
	var largest *Share
	for share := range m.shares {
		if largest == nil || share.bytes > largest.bytes {
			largest = share
		}
	}
	return largest
}

// drop releases all memory of the share. The caller holds the lock.
func (s *Share) drop() {
	s.memory.held -= s.bytes
	if !s.whole {
		s.memory.arriving -= s.bytes
		delete(s.memory.shares, s)
	}
	s.bytes = 0
}

// Give releases some memory of the share.
func (s *Share) Give(bytes int64) {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	bytes = min(bytes, s.bytes) // a revoked share has no memory
	s.bytes -= bytes
	s.memory.held -= bytes
	if !s.whole {
		s.memory.arriving -= bytes
	}
}

// Finish marks the request as complete. Its share cannot be revoked from then on. The error wraps ErrNoMemory if the
// share was revoked before.
func (s *Share) Finish() error {
	m := s.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.isRevoked {
		return m.none()
	}
	if !s.whole {
		s.whole = true
		m.arriving -= s.bytes
		delete(m.shares, s)
	}
	return nil
}

// Release releases all memory of the share. Unless it was revoked, the share can then be used for another request.
// Further calls are no-ops.
func (s *Share) Release() {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	s.drop()
	s.whole = false
}
