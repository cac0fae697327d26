// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// share opens a share with the given number of bytes, and returns it with the number of its revocations. Its owner
// releases it as soon as it is revoked.
func share(t *testing.T, m *Memory, bytes int64) (*Share, *atomic.Int32) {
	t.Helper()
	revoked := new(atomic.Int32)
	var s *Share
	s = m.Open(func() { revoked.Add(1); go s.Release() })
	if err := s.Take(bytes); err != nil {
		t.Fatal(err)
	}
	return s, revoked
}

// TestLargestArrivingRequestIsRevoked verifies that a small request gets memory if large incomplete requests use all of
// it. Only the largest one is revoked.
func TestLargestArrivingRequestIsRevoked(t *testing.T) {
	m := &Memory{Max: 1000, MaxArriving: 100}
	small, smallRevoked := share(t, m, 20)
	large, largeRevoked := share(t, m, 60)
	medium, mediumRevoked := share(t, m, 20)
	if err := medium.Take(10); err != nil {
		t.Fatalf("a request of 30 bytes next to one of 60: %v", err)
	}
	if largeRevoked.Load() != 1 || smallRevoked.Load() != 0 || mediumRevoked.Load() != 0 || m.Held() != 50 {
		t.Errorf("revoked: large %d, small %d, medium %d times; %d bytes are held", largeRevoked.Load(), smallRevoked.Load(), mediumRevoked.Load(), m.Held())
	}
	if err := errors.Join(large.Take(1), large.Finish()); !errors.Is(err, ErrNoMemory) {
		t.Errorf("Take on a revoked share: %v", err)
	}
	large.Give(60)
	large.Release()
	if m.Held() != 50 {
		t.Errorf("%d bytes are held after a revoked share has ended, want 50", m.Held())
	}
	// The largest request itself gets no memory.
	if err := small.Take(100); !errors.Is(err, ErrNoMemory) || mediumRevoked.Load() != 0 {
		t.Errorf("120 bytes of 100: %v", err)
	}
}

// TestRevokedMemoryCountsUntilItIsReleased verifies that a request waits for the memory of a revoked share, and that it
// gets none if the owner does not release it.
func TestRevokedMemoryCountsUntilItIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &Memory{Max: 1000, MaxArriving: 100}
		large := m.Open(func() {})
		small, _ := share(t, m, 20)
		if err := large.Take(80); err != nil {
			t.Fatal(err)
		}
		if err := small.Take(10); !errors.Is(err, ErrNoMemory) || m.Held() != 100 {
			t.Fatalf("before the revoked share is released: %v, %d bytes are held", err, m.Held())
		}
		var waiting sync.WaitGroup
		waiting.Go(func() {
			if err := small.Take(10); err != nil || m.Held() != 30 {
				t.Errorf("after the revoked share is released: %v, %d bytes are held", err, m.Held())
			}
		})
		synctest.Wait()
		large.Release()
		waiting.Wait()
	})
}

// TestCompleteRequestsAreNotRevoked verifies that a complete request keeps its memory and no longer counts as
// incomplete.
func TestCompleteRequestsAreNotRevoked(t *testing.T) {
	m := &Memory{Max: 250, MaxArriving: 100}
	for range 2 {
		whole, revoked := share(t, m, 100)
		if err := whole.Finish(); err != nil || revoked.Load() != 0 {
			t.Fatal(err)
		}
	}
	if next := m.Open(nil); !errors.Is(next.Take(60), ErrNoMemory) || m.Held() != 200 {
		t.Errorf("%d bytes are held of at most 250", m.Held())
	}
	if m.Fits(51) || !m.Fits(50) {
		t.Error("there is room for 50 bytes")
	}
	last, _ := share(t, m, 50)
	last.Release()
	last.Release()
	if err := last.Take(50); err != nil { // the next request of a connection
		t.Error(err)
	}
}
