// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/semmoe/operator/internal/httpserver"
)

// TestBodies checks that the memory of a body counts from its arrival until it is dropped, and that a body that does
// not fit leaves nothing.
func TestBodies(t *testing.T) {
	const most = 1 << 20
	broken := errors.New("broken")
	for name, tc := range map[string]struct {
		size   int
		length int64
		held   int64 // by other requests
		end    error // instead of io.EOF
		want   error
	}{
		"empty":                          {},
		"of known length":                {size: 200_000, length: 200_000},
		"of unknown length":              {size: 200_000, length: -1},
		"small, of unknown length":       {size: 511, length: -1},
		"longer than declared":           {size: 1000, length: 10},
		"too much":                       {size: 800_000, length: -1, want: ErrNoMemory},
		"too much in addition to others": {size: 100_000, length: -1, held: most - 200_000, want: ErrNoMemory},
		"too much by its header":         {length: 100_000, held: most - 90_000, end: broken, want: ErrNoMemory},
		"no room at all":                 {size: 1, length: 1, held: most, want: ErrNoMemory},
		"promised, and not sent so far":  {size: 10, length: 400_000, held: most - 500_000},
		"breaks off":                     {size: 100_000, length: 200_000, end: broken, want: broken},
	} {
		t.Run(name, func(t *testing.T) {
			bodies := &httpserver.Memory{Max: most}
			others := bodies.Open(nil)
			if err := errors.Join(others.Finish(), others.Take(tc.held)); err != nil {
				t.Fatal(err)
			}
			sent := bytes.Repeat([]byte("x"), tc.size)
			var from io.Reader = bytes.NewReader(sent)
			if tc.end != nil {
				from = io.MultiReader(from, iotest.ErrReader(tc.end))
			}
			body, err := Read(bodies, from, tc.length, most, func() {})
			if !errors.Is(err, tc.want) {
				t.Fatalf("error %v, want %v", err, tc.want)
			}
			if err != nil {
				if bodies.Held() != tc.held {
					t.Errorf("%d bytes are counted, %d before", bodies.Held(), tc.held)
				}
				return
			}
			if got := bodies.Held() - tc.held; !bytes.Equal(body.Bytes(), sent) || got < int64(2*tc.size) || got > int64(max(4*tc.size, 2*(chunkBytes+1))) {
				t.Errorf("%d bytes arrived, %d are counted", len(body.Bytes()), got)
			}
			body.Drop()
			body.Drop()
			if bodies.Held() != tc.held || body.Bytes() != nil {
				t.Errorf("%d bytes are counted for a dropped body", bodies.Held()-tc.held)
			}
		})
	}
}

// TestLargeBody checks that a body of known length takes its length and the memory of its parsed prompt, and no more.
func TestLargeBody(t *testing.T) {
	const size = 8 << 20
	bodies := NewMemory(32 << 20)
	body, err := Read(bodies, strings.NewReader(strings.Repeat("x", size)), size, 32<<20, func() {})
	if want := int64(size + promptBytes); err != nil || bodies.Held() != want {
		t.Errorf("%d bytes are counted, want %d; %v", bodies.Held(), want, err)
	}
	if kept, err := Keep(bodies, body.Bytes()); err != nil || bodies.Held() != 2*(size+promptBytes) {
		t.Errorf("%d bytes are counted for two bodies; %v", bodies.Held(), err)
	} else {
		kept.Drop()
	}
}

// TestRoomForTheLargestBody checks that an empty memory budget fits every accepted body, with and without a
// declared length, and that a body that is too large gets that error.
func TestRoomForTheLargestBody(t *testing.T) {
	for _, largest := range []int64{0, 1, 255, 511, 512, 513, 1000, 1023, 1024, chunkBytes, 100_000, promptBytes - 1, promptBytes, 3<<20 - 1, 3 << 20} {
		for _, size := range []int64{largest / 2, largest - 1, largest, largest + 1, 2 * largest} {
			for _, length := range []int64{-1, 0, size / 2, size} {
				if size < 0 {
					continue
				}
				bodies := &httpserver.Memory{Max: memoryFor(largest)}
				body, err := Read(bodies, bytes.NewReader(make([]byte, size)), length, largest, func() {})
				if err != nil {
					t.Errorf("%d of at most %d bytes, said to be %d: %v", size, largest, length, err)
				} else if got := int64(len(body.Bytes())); got != min(size, largest+1) {
					t.Errorf("%d of at most %d bytes, said to be %d: %d have come", size, largest, length, got)
				}
			}
		}
	}
	for largest, want := range map[int64]int64{0: DefaultMemory, 32 << 20: DefaultMemory, 191 << 20: DefaultMemory, 192 << 20: 384<<20 + 640<<10 + 1, 1 << 30: 2<<30 + 640<<10 + 1} {
		if got := NewMemory(largest).Max; got != want {
			t.Errorf("bodies of at most %d bytes may take %d, want %d", largest, got, want)
		}
	}
}
