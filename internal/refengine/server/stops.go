// SPDX-License-Identifier: Apache-2.0

package server

import "strings"

// stopMatcher finds the first stop string in a text that arrives in pieces. It buffers text that may be the beginning
// of a stop string, so that emitted text is final.
type stopMatcher struct {
	stops   []string
	pending string
}

// next adds a piece and returns the text that is final. matched is the stop string that was found, or empty. The stop
// string and the text after it are never emitted.
func (m *stopMatcher) next(piece string) (text, matched string) {
	m.pending += piece
	first := -1
	for _, stop := range m.stops {
		if at := strings.Index(m.pending, stop); at >= 0 && (first < 0 || at < first) {
			first, matched = at, stop
		}
	}
	if first >= 0 {
		text, m.pending = m.pending[:first], ""
		return text, matched
	}
	keep := 0
	for _, stop := range m.stops {
		for n := min(len(stop)-1, len(m.pending)); n > keep; n-- {
			if strings.HasSuffix(m.pending, stop[:n]) {
				keep = n
			}
		}
	}
	text = m.pending[:len(m.pending)-keep]
	m.pending = m.pending[len(m.pending)-keep:]
	return text, ""
}

// flush returns the buffered text at the end, when no stop string can follow.
func (m *stopMatcher) flush() string {
	text := m.pending
	m.pending = ""
	return text
}
