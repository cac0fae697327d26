// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrNoMemory reports a request that exceeds the memory limit.
var ErrNoMemory = errors.New("the server has no memory left for another request")

// releaseTimeout is the maximum time to wait for a revoked share. Its owner only has to notice that its read has failed.
const releaseTimeout = time.Second

// Memory limits the memory that is reserved for the requests of a server. Requests that are still arriving have a
// separate, lower limit. If they reach their limit, the reservation of the largest one is revoked in favor of smaller
// ones, so that clients that send large requests slowly do not block other clients. The memory of a revoked share
// counts until its owner releases it. Memory is safe for concurrent use.
type Memory struct {
	// Max limits the memory of all requests, in bytes. MaxArriving limits the memory of incomplete requests; 0 means
	// Max.
	Max, MaxArriving int64

	mu             sync.Mutex
	held, arriving int64
	// leaving is the part of arriving that revoked shares hold.
	leaving int64
	// shares are the non-empty shares of incomplete requests that are not revoked.
	shares map[*Share]bool
	// changed is closed when memory is released or a share is revoked; nil if no request waits for that.
	changed chan struct{}
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
// which must stop reading the request without blocking and without calling Take. The owner then releases the share.
// revoke is not called after Finish or Release.
func (m *Memory) Open(revoke func()) *Share { return &Share{memory: m, revoke: revoke} }

// Share is the memory that is reserved for one request. It is safe for concurrent use.
type Share struct {
	memory *Memory
	revoke func()

	// The lock of the memory guards the following fields.
	bytes            int64
	whole, isRevoked bool
}

// Take reserves more memory. It waits up to releaseTimeout for the memory of revoked shares. The error wraps
// ErrNoMemory if there is no memory, or if the share was revoked.
func (s *Share) Take(bytes int64) error {
	m := s.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	var timeout <-chan time.Time
	for {
		missing := m.held + bytes - m.Max
		if !s.whole {
			missing = max(missing, m.arriving+bytes-cmp.Or(m.MaxArriving, m.Max))
		}
		switch {
		case s.isRevoked:
			return m.none()
		case missing <= 0:
			s.add(bytes)
			return nil
		case missing > m.leaving:
			largest := m.largest()
			if largest == nil || largest == s || largest.bytes <= s.bytes+bytes {
				return m.none()
			}
			m.revoke(largest)
			continue
		}
		if timeout == nil {
			timeout = time.After(releaseTimeout)
		}
		if m.changed == nil {
			m.changed = make(chan struct{})
		}
		changed := m.changed
		m.mu.Unlock()
		expired := false
		select {
		case <-changed:
		case <-timeout:
			expired = true
		}
		m.mu.Lock()
		if expired {
			return m.none()
		}
	}
}

// add adds memory to the share. The caller holds the lock.
func (s *Share) add(bytes int64) {
	m := s.memory
	s.bytes += bytes
	m.held += bytes
	if s.whole {
		return
	}
	m.arriving += bytes
	if m.shares == nil {
		m.shares = map[*Share]bool{}
	}
	m.shares[s] = true
}

// revoke asks the owner of a share to release it. The caller holds the lock.
func (m *Memory) revoke(s *Share) {
	s.isRevoked = true
	m.leaving += s.bytes
	delete(m.shares, s)
	m.notify()
	s.revoke()
}

// notify wakes the waiting requests. The caller holds the lock.
func (m *Memory) notify() {
	if m.changed != nil {
		close(m.changed)
		m.changed = nil
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

// Give releases some memory of the share.
func (s *Share) Give(bytes int64) {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	s.give(min(bytes, s.bytes))
}

// give releases memory of the share. The caller holds the lock.
func (s *Share) give(bytes int64) {
	m := s.memory
	s.bytes -= bytes
	m.held -= bytes
	if !s.whole {
		m.arriving -= bytes
		if s.isRevoked {
			m.leaving -= bytes
		}
		if s.bytes == 0 {
			delete(m.shares, s)
		}
	}
	m.notify()
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
	s.give(s.bytes)
	s.whole = false
}
