// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
)

// TestEvents checks that the events of a stream do not depend on its split into pieces.
func TestEvents(t *testing.T) {
	for text, want := range map[string]int{
		"":                                 0,
		"data: 1\n\n":                      1,
		"data: 1":                          0,
		"\n\n\n":                           0,
		": ping\n\n":                       0,
		": ping\n\ndata: 1\n\n":            1,
		"event: x\ndata: 1\n\ndata: 2\n\n": 1,
		"event: content_block_delta\ndata: 1\n\nevent:response.output_text.delta\r\ndata: 2\r\n\r\ndata: 3\n\n":  3,
		"event: message_start\ndata: 1\n\nevent: message_delta\ndata: 2\n\nevent: response.created\ndata: 3\n\n": 0,
		"event: ping\n\nevent: " + strings.Repeat("x", 200) + ".delta\ndata: 1\n\n":                              0,
		"data: 1\r\n\r\ndata: 2\r\n\r\n":        2,
		": why\ndata: 1\n\n\ndata: [DONE]\n\n":  2,
		"data:1\ndata:2\n\ndata:3\n\n: end\n\n": 2,
	} {
		random := rand.New(rand.NewPCG(1, 1))
		for range 50 {
			var e Events
			count := 0
			for rest := text; rest != ""; {
				n := 1 + random.IntN(len(rest))
				before := e.N
				if e.Add([]byte(rest[:n])) {
					count += e.N - before
				}
				rest = rest[n:]
			}
			if e.N != want || count != want {
				t.Fatalf("%q has %d events, %d of them reported; want %d", text, e.N, count, want)
			}
		}
	}
}

// TestRewrittenEventsAreWhole checks that an edited stream returns each event as a whole, as soon as it is complete, so
// that a client gets it in one write. An event that never ends is returned in parts.
func TestRewrittenEventsAreWhole(t *testing.T) {
	reader, writer := io.Pipe()
	defer writer.Close()
	response := &http.Response{Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: reader}
	edit := func(data []byte, _ bool) ([]byte, error) {
		if bytes.Contains(data, []byte("gone")) {
			return nil, nil
		}
		return bytes.ReplaceAll(data, []byte("1"), []byte("one")), nil
	}
	if err := Rewrite(response, edit, func() {}, &budget{most: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 1<<20)
	for _, event := range []struct{ sent, want string }{
		{"data: 1\n\n", "data: one\n\n"}, {"event: x\r\ndata: 1\r\ndata: 2\r\n\r\n", "event: x\r\ndata: one\r\ndata: 2\r\n\r\n"}, {": ping\n\n", ": ping\n\n"},
		{"data: gone\n\ndata: 3\n\n", "data: 3\n\n"}, {"data: " + strings.Repeat("x", 100) + "\n\n", "data: " + strings.Repeat("x", 100) + "\n\n"},
	} {
		go io.WriteString(writer, event.sent) //nolint:errcheck // the reader checks the text
		if n, err := response.Body.Read(buffer); err != nil || string(buffer[:n]) != event.want {
			t.Errorf("of %q, the first read returns %q, %v; want %q", event.sent, buffer[:n], err, event.want)
		}
	}
	line := ": " + strings.Repeat("x", 1000) + "\n"
	go io.WriteString(writer, strings.Repeat(line, 100)) //nolint:errcheck // the reader checks the text
	if n, err := response.Body.Read(buffer); err != nil || n < maxEventBytes || n > maxEventBytes+len(line) {
		t.Errorf("of an event without end, %d bytes are read first, %v", n, err)
	}
}
