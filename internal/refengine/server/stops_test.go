// SPDX-License-Identifier: Apache-2.0

package server

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// For all splits of a text into pieces, the matcher emits the text before the first stop string.
func TestStopMatcherMatchesWholeText(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	random := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = "ab\n"[rng.IntN(3)]
		}
		return string(b)
	}
	for range 20000 {
		text := random(rng.IntN(12))
		var stops []string
		for range rng.IntN(3) {
			stops = append(stops, random(1+rng.IntN(4)))
		}
		// The expected text ends at the start of the stop string that is completed first.
		want, wantMatch := text, false
		for end := 0; end <= len(text) && !wantMatch; end++ {
			at := -1
			for _, stop := range stops {
				if strings.HasSuffix(text[:end], stop) && (at < 0 || end-len(stop) < at) {
					at = end - len(stop)
				}
			}
			if at >= 0 {
				want, wantMatch = text[:at], true
			}
		}
		m := stopMatcher{stops: stops}
		got, matched := "", ""
		// With pieces of one byte, the match is found at the byte that completes the stop string.
		for i := 0; i < len(text) && matched == ""; i++ {
			var piece string
			piece, matched = m.next(text[i : i+1])
			got += piece
		}
		if matched == "" {
			got += m.flush()
		}
		if got != want || (matched != "") != wantMatch {
			t.Fatalf("text %q, stops %q: got %q (%q), want %q (%v)", text, stops, got, matched, want, wantMatch)
		}
	}
}

func TestStopMatcherTakesTheFirstInAPiece(t *testing.T) {
	m := stopMatcher{stops: []string{"yy", "x"}}
	if text, matched := m.next("abxcyy"); text != "ab" || matched != "x" {
		t.Errorf("got %q, %q", text, matched)
	}
}

func TestEncodeRoutes(t *testing.T) {
	routes := []uint16{1, 2, 3, 0x102}
	for start, want := range map[int]string{0: "AQAAAAIAAAADAAAAAgEAAA==", 1: "AwAAAAIBAAA=", 2: "", 9: ""} {
		if got := encodeRoutes(routes, 2, start); got != want {
			t.Errorf("start %d: got %q, want %q", start, got, want)
		}
	}
}
