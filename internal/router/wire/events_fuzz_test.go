// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"testing"
)

// FuzzEvents checks that the number of events does not depend on the split into pieces, and that a line without fields
// is not an event.
func FuzzEvents(f *testing.F) {
	for _, stream := range []string{
		"data: {\"choices\":[]}\n\n", ": ping\n\ndata: 1\r\n\r\ndata: [DONE]\n\n", "event: a\ndata: 1\ndata: 2\n\n\n\n", "data", "\n\n", "\r\n:\n\n",
	} {
		f.Add([]byte(stream), 1)
		f.Add([]byte(stream), 5)
	}
	f.Fuzz(func(t *testing.T, stream []byte, size int) {
		var whole, parts Events
		whole.Add(stream)
		ended := 0
		for rest := stream; len(rest) > 0; {
			n := min(len(rest), max(1, size))
			before := parts.N
			if parts.Add(rest[:n]) != (parts.N > before) {
				t.Fatal("Add reports an event that it does not count")
			}
			ended += parts.N - before
			rest = rest[n:]
		}
		if whole.N != ended || whole.N > bytes.Count(stream, []byte("\n"))/2+1 {
			t.Fatalf("%d events at once, %d in pieces of %d: %q", whole.N, ended, size, stream)
		}
		IsEmptyEvent(stream)
	})
}
