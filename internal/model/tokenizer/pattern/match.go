// SPDX-License-Identifier: Apache-2.0

package pattern

import "unicode/utf8"

// Matcher finds the matches of a pattern in a sequence of texts.
type Matcher struct {
	pattern *Pattern
	text    string
	loops   []loopState
	// failed contains, for each choice and each bounded loop, the set of positions from which the node leads to no
	// match. An empty set is nil.
	failed []bits
	// depth is the number of nested choices.
	depth int
}

// bits is a set of positions in a text.
type bits []uint64

func (b bits) has(at int) bool { return b != nil && b[at/64]>>(at%64)&1 != 0 }

// maxDepth is the maximum number of nested choices, which also limits the repetitions of a group in one match. It
// bounds the stack.
const maxDepth = 50_000

// loopState caches results of an unbounded loop over one set. Whether the rest of the expression matches after a loop
// depends only on the position, so no position is tried twice. Without the cache, a long run of one character would
// take quadratic time.
type loopState struct {
	// The range from runFrom to runEnd is part of a run of the set's characters, and runEnd is the end of the run.
	runFrom, runEnd int
	// From every position between failedFrom and failedEnd, the end of the run, the loop leads to no match.
	failedFrom, failedEnd int
}

// Matcher returns a matcher. It must be used by one goroutine at a time.
func (p *Pattern) Matcher() *Matcher {
	return &Matcher{pattern: p, loops: make([]loopState, p.loops), failed: make([]bits, p.memos)}
}

// Reset sets the text.
func (m *Matcher) Reset(text string) {
	m.text = text
	for i := range m.loops {
		m.loops[i] = loopState{-1, -1, -1, -1}
	}
	clear(m.failed)
}

// fail records that a node leads to no match from a position.
func (m *Matcher) fail(n *node, at int) int {
	if m.failed[n.memo] == nil {
		m.failed[n.memo] = make(bits, len(m.text)/64+1)
	}
	m.failed[n.memo][at/64] |= 1 << (at % 64)
	return -1
}

// Find returns the first match that begins at or after a position.
func (m *Matcher) Find(at int) (start, end int, found bool) {
	for at < len(m.text) {
		if m.pattern.begins[m.text[at]] {
			if end := m.match(m.pattern.start, at); end >= 0 {
				return at, end, true
			}
		}
		_, size := m.character(at)
		at += size
	}
	return 0, 0, false
}

// character returns the character at a position and its length, which is 0 at the end of the text. A byte that is not
// valid UTF-8 counts as U+FFFD.
func (m *Matcher) character(at int) (rune, int) {
	if at < len(m.text) && m.text[at] < utf8.RuneSelf {
		return rune(m.text[at]), 1
	}
	return utf8.DecodeRuneInString(m.text[at:])
}

// match returns the end of the match of n and all nodes after it, or -1.
func (m *Matcher) match(n *node, at int) int {
	for {
		switch n.op {
		case opMatch:
			return at
		case opSet:
			c, size := m.character(at)
			if size == 0 || !n.set.has(c) {
				return -1
			}
			at, n = at+size, n.next
		case opLoop:
			if n.max < 0 {
				return m.unbounded(n, at)
			}
			return m.bounded(n, at)
		case opChoice:
			return m.choose(n, at)
		case opAnchor:
			if !m.holds(n.anchor, at) {
				return -1
			}
			n = n.next
		case opLook:
			if (m.match(n.sub, at) >= 0) == n.negated {
				return -1
			}
			n = n.next
		}
	}
}

func (m *Matcher) holds(a anchor, at int) bool {
	switch a {
	case lineBegin:
		return at == 0 || m.text[at-1] == '\n' && at < len(m.text)
	case lineEnd:
		return at == len(m.text) || m.text[at] == '\n'
	case textBegin:
		return at == 0
	}
	return at == len(m.text)
}

// choose matches the first alternative that leads to a match.
func (m *Matcher) choose(n *node, at int) int {
	if m.depth >= maxDepth || m.failed[n.memo].has(at) {
		return -1
	}
	m.depth++
	defer func() { m.depth-- }()
	for _, one := range n.choice {
		if end := m.match(one, at); end >= 0 {
			return end
		}
	}
	return m.fail(n, at)
}

// bounded matches a loop over a set with a maximum number of repetitions.
func (m *Matcher) bounded(n *node, at int) int {
	if m.failed[n.memo].has(at) {
		return -1
	}
	end, rounds := at, 0
	for rounds < n.max {
		c, size := m.character(end)
		if size == 0 || !n.set.has(c) {
			break
		}
		end += size
		rounds++
	}
	for ; rounds >= n.min; rounds-- {
		if result := m.match(n.next, end); result >= 0 {
			return result
		}
		if n.possessive || rounds == 0 {
			break
		}
		end -= m.sizeBefore(end)
	}
	return m.fail(n, at)
}

// unbounded matches a loop over a set without a maximum number of repetitions.
func (m *Matcher) unbounded(n *node, at int) int {
	end := m.runEnd(n, at)
	shortest, ok := m.advance(at, n.min, end)
	if !ok {
		return -1
	}
	if n.next.op == opMatch || n.possessive {
		return m.match(n.next, end)
	}
	state := &m.loops[n.loop]
	from := end
	if state.failedEnd == end {
		if at >= state.failedFrom {
			return -1
		}
		// The end positions tried from failedFrom need not be tried again.
		from, _ = m.advance(state.failedFrom, n.min, end)
		from -= m.sizeBefore(from)
	}
	for ; ; from -= m.sizeBefore(from) {
		if result := m.match(n.next, from); result >= 0 {
			return result
		}
		if from <= shortest {
			break
		}
	}
	state.failedFrom, state.failedEnd = at, end
	return -1
}

// advance moves forward by a number of characters. It returns false if it reaches end first.
func (m *Matcher) advance(at, characters, end int) (int, bool) {
	for range characters {
		if at >= end {
			return at, false
		}
		_, size := m.character(at)
		at += size
	}
	return at, true
}

// runEnd returns the end of the run of a loop's characters that begins at a position.
func (m *Matcher) runEnd(n *node, at int) int {
	state := &m.loops[n.loop]
	if at >= state.runFrom && at <= state.runEnd {
		return state.runEnd
	}
	end := at
	for end < len(m.text) {
		if end == state.runFrom {
			end = state.runEnd
			break
		}
		c, size := m.character(end)
		if !n.set.has(c) {
			break
		}
		end += size
	}
	state.runFrom, state.runEnd = at, end
	return end
}

// sizeBefore returns the length of the character that ends at a position. A byte that is not valid UTF-8 has length 1.
func (m *Matcher) sizeBefore(end int) int {
	_, size := utf8.DecodeLastRuneInString(m.text[:end])
	return size
}
