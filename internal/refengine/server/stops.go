package server

import "strings"

// stopMatcher finds the first stop string in a text that arrives in pieces. It holds back text that could be the begin
// of a stop string, so that nothing is emitted that has to be taken back.
type stopMatcher struct {
	stops   []string
	pending string
}

// next adds a piece and returns the text that is certain; matched is the stop string that was found, or empty. The stop
// string itself and what follows are never emitted.
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

// flush returns the text that was held back; no stop string can come any more.
func (m *stopMatcher) flush() string {
	text := m.pending
	m.pending = ""
	return text
}
