package wire

import (
	"math/rand/v2"
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
