// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"errors"
	"testing"
)

// share opens a share with the given number of bytes. It returns the share and the number of its revocations.
func share(t *testing.T, m *Memory, bytes int64) (*Share, *int) {
	t.Helper()
	revoked := new(int)
	s := m.Open(func() { *revoked++ })
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
	if *largeRevoked != 1 || *smallRevoked != 0 || *mediumRevoked != 0 || m.Held() != 50 {
		t.Errorf("revoked: large %d, small %d, medium %d times; %d bytes are held", *largeRevoked, *smallRevoked, *mediumRevoked, m.Held())
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
	if err := small.Take(100); !errors.Is(err, ErrNoMemory) || *mediumRevoked != 0 {
		t.Errorf("120 bytes of 100: %v", err)
	}
}

// TestCompleteRequestsAreNotRevoked verifies that a complete request keeps its memory and no longer counts as
// incomplete.
func TestCompleteRequestsAreNotRevoked(t *testing.T) {
	m := &Memory{Max: 250, MaxArriving: 100}
	for range 2 {
		whole, revoked := share(t, m, 100)
		if err := whole.Finish(); err != nil || *revoked != 0 {
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
