package httpserver

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
)

// ErrNoMemory is the error of a request for which there is no memory.
var ErrNoMemory = errors.New("the server has no memory left for another request")

// Memory bounds the memory that the requests of a server hold. Requests that are still arriving have a bound of their own within it: where
// they reach it, the largest of them gives way to smaller ones, so that clients who send large requests slowly keep nobody out.
// Memory is safe for concurrent use.
type Memory struct {
	// Max bounds what all requests hold, in bytes. MaxArriving bounds what requests hold that are not whole; 0 means Max.
	Max, MaxArriving int64

	mu             sync.Mutex
	held, arriving int64
	// shares are those that are arriving and hold something.
	shares map[*Share]bool
}

// Held returns the number of bytes that are held.
func (m *Memory) Held() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.held
}

// HasRoom reports whether a request of that size may find room, when those that are arriving give way.
func (m *Memory) HasRoom(bytes int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes <= m.Max-(m.held-m.arriving)
}

// Open returns an empty share of a request that is arriving. Another request may revoke the share: then revoke is called, which must stop
// the reading of the request, at once and without taking memory. It is not called after Finish or Release.
func (m *Memory) Open(revoke func()) *Share { return &Share{memory: m, revoke: revoke} }

// Share is what one request holds of a Memory. It is safe for concurrent use.
type Share struct {
	memory *Memory
	revoke func()

	// The lock of the memory guards the rest.
	bytes            int64
	whole, isRevoked bool
}

// Take takes more memory. The error wraps ErrNoMemory where there is none, or the share is revoked.
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
	return fmt.Errorf("%w: all requests may take %d bytes, those that are arriving %d", ErrNoMemory, m.Max, cmp.Or(m.MaxArriving, m.Max))
}

// largest returns the largest share of a request that is arriving.
func (m *Memory) largest() *Share {
	var largest *Share
	for share := range m.shares {
		if largest == nil || share.bytes > largest.bytes {
			largest = share
		}
	}
	return largest
}

// drop gives everything back. The memory is locked.
func (s *Share) drop() {
	s.memory.held -= s.bytes
	if !s.whole {
		s.memory.arriving -= s.bytes
		delete(s.memory.shares, s)
	}
	s.bytes = 0
}

// Give gives some of the memory back.
func (s *Share) Give(bytes int64) {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	bytes = min(bytes, s.bytes) // a revoked share has none
	s.bytes -= bytes
	s.memory.held -= bytes
	if !s.whole {
		s.memory.arriving -= bytes
	}
}

// Revoked reports whether the share was revoked.
func (s *Share) Revoked() bool {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	return s.isRevoked
}

// Finish keeps the share of a request that is whole: it is not revoked any more. The error wraps ErrNoMemory where it was before.
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

// Release gives everything back. The share can be used for another request then, unless it was revoked. Further calls do nothing.
func (s *Share) Release() {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	s.drop()
	s.whole = false
}
