package client

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// What a body takes counts from when it comes until it is dropped; one for which there is no room leaves nothing.
func TestBodies(t *testing.T) {
	const most = 1 << 20
	broken := errors.New("broken")
	for name, tc := range map[string]struct {
		size   int
		length int64
		held   int64 // by others
		end    error // in place of the end
		want   error
	}{
		"empty":                         {},
		"of known length":               {size: 200_000, length: 200_000},
		"of unknown length":             {size: 200_000, length: -1},
		"small, of unknown length":      {size: 511, length: -1},
		"longer than its header says":   {size: 1000, length: 10},
		"too much":                      {size: 800_000, length: -1, want: ErrNoRoom},
		"too much beside others":        {size: 100_000, length: -1, held: most - 200_000, want: ErrNoRoom},
		"too much by its header":        {length: 100_000, held: most - 90_000, end: broken, want: ErrNoRoom},
		"no room at all":                {size: 1, length: 1, held: most, want: ErrNoRoom},
		"promised, and not sent so far": {size: 10, length: 400_000, held: most - 500_000},
		"breaks off":                    {size: 100_000, length: 200_000, end: broken, want: broken},
	} {
		t.Run(name, func(t *testing.T) {
			bodies := &Bodies{Most: most}
			bodies.held.Store(tc.held)
			sent := bytes.Repeat([]byte("x"), tc.size)
			var from io.Reader = bytes.NewReader(sent)
			if tc.end != nil {
				from = io.MultiReader(from, iotest.ErrReader(tc.end))
			}
			body, err := bodies.Read(from, tc.length)
			if !errors.Is(err, tc.want) {
				t.Fatalf("error %v, want %v", err, tc.want)
			}
			if err != nil {
				if bodies.Held() != tc.held {
					t.Errorf("%d bytes are held, %d before", bodies.Held(), tc.held)
				}
				return
			}
			if got := bodies.Held() - tc.held; !bytes.Equal(body.Bytes(), sent) || got < int64(2*tc.size) || got > int64(max(4*tc.size, 2*(trustedBytes+1))) {
				t.Errorf("%d bytes came, %d are held for them", len(body.Bytes()), got)
			}
			body.Drop()
			body.Drop()
			if bodies.Held() != tc.held || body.Bytes() != nil {
				t.Errorf("%d bytes are held of a dropped body", bodies.Held()-tc.held)
			}
		})
	}
}

// A body of known length takes that much and what is read of its prompt, no more.
func TestLargeBody(t *testing.T) {
	const size = 8 << 20
	bodies := NewBodies(32 << 20)
	body, err := bodies.Read(strings.NewReader(strings.Repeat("x", size)), size)
	if want := int64(size + 1 + promptBytes); err != nil || bodies.Held() != want {
		t.Errorf("%d bytes are held, want %d; %v", bodies.Held(), want, err)
	}
	if kept, err := bodies.Keep(body.Bytes()); err != nil || bodies.Held() != 2*(size+promptBytes)+1 {
		t.Errorf("%d bytes are held of two; %v", bodies.Held(), err)
	} else {
		kept.Drop()
	}
	if largest := int64(1 << 30); NewBodies(largest).Most < 2*largest {
		t.Error("a router may not hold the largest body that it takes")
	}
}
