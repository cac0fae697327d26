// SPDX-License-Identifier: Apache-2.0

package pattern

import (
	"fmt"
	"slices"
	"unicode/utf8"
)

// Pattern is a compiled expression.
type Pattern struct {
	start *node
	// loops is the number of unbounded loops over one set. memos is the number of nodes with recorded failures in a
	// matcher.
	loops, memos int
	// begins marks the bytes with which a match can begin. A match is never empty.
	begins [256]bool
}

// node is a step of the expression, linked to the next step.
type node struct {
	op   op
	next *node
	// set is used by opSet and opLoop.
	set        *set
	min, max   int
	possessive bool
	loop       int // index of an unbounded opLoop
	memo       int // index of an opChoice or a bounded opLoop
	choice     []*node
	anchor     anchor
	sub        *node // opLook
	negated    bool
}

type op byte

const (
	opMatch op = iota
	opSet
	opLoop
	opChoice
	opAnchor
	opLook
)

// The limits of an expression bound the time and the memory of a match, which both grow with the length of the text
// times the number of steps. The longest expression of a known family has about 1,000 bytes and 60 steps.
const (
	maxExpression = 4096 // bytes
	maxNodes      = 4000 // steps, with expanded quantifiers of groups
	maxMemos      = 512  // steps with recorded failures
)

// Compile compiles an expression. An error names the invalid or unsupported construct. An expression that matches the
// empty text is refused, because it would cut nothing.
func Compile(expression string) (*Pattern, error) {
	if len(expression) > maxExpression {
		return nil, fmt.Errorf("expression %.40q... has %d bytes; the maximum is %d", expression, len(expression), maxExpression)
	}
	p := &parser{text: expression}
	if !utf8.ValidString(expression) {
		return nil, p.fail("not valid UTF-8")
	}
	parsed, err := p.choice()
	if err != nil {
		return nil, err
	}
	if p.more() {
		return nil, p.fail("unmatched closing parenthesis")
	}
	if parsed.nullable() {
		return nil, p.fail("it matches the empty text")
	}
	c := &compiler{}
	start, err := c.compile(parsed, &node{op: opMatch})
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", expression, err)
	}
	compiled := &Pattern{start: start, loops: c.loops, memos: c.memos}
	start.begins(&compiled.begins, map[*node]bool{})
	return compiled, nil
}

// nullable reports whether the expression can match the empty text.
func (s *syntax) nullable() bool {
	switch {
	case s.set != nil:
		return false
	case s.choice != nil:
		return slices.ContainsFunc(s.choice, (*syntax).nullable)
	case s.repeated != nil:
		return s.repeated.min == 0 || s.repeated.of.nullable()
	case s.anchor != 0 || s.lookahead != nil:
		return true
	}
	return !slices.ContainsFunc(s.sequence, func(one *syntax) bool { return !one.nullable() })
}

type compiler struct {
	steps, loops, memos int
	lookahead           bool
}

func (c *compiler) node(n node) (*node, error) {
	if n.op == opChoice || n.op == opLoop && n.max >= 0 {
		n.memo = c.memos
		if c.memos++; c.memos > maxMemos {
			return nil, fmt.Errorf("it needs more than %d choices", maxMemos)
		}
	}
	return &n, nil
}

// compile returns the node that matches s and continues with next. It counts calls, not nodes, because the repetition
// of an empty group has no node.
func (c *compiler) compile(s *syntax, next *node) (*node, error) {
	if c.steps++; c.steps > maxNodes {
		return nil, fmt.Errorf("it needs more than %d steps", maxNodes)
	}
	switch {
	case s.set != nil:
		return c.node(node{op: opSet, set: s.set, next: next})
	case s.choice != nil:
		choice := make([]*node, len(s.choice))
		for i, one := range s.choice {
			var err error
			if choice[i], err = c.compile(one, next); err != nil {
				return nil, err
			}
		}
		return c.node(node{op: opChoice, choice: choice})
	case s.repeated != nil:
		return c.repeat(s.repeated, next)
	case s.anchor != 0:
		return c.node(node{op: opAnchor, anchor: s.anchor, next: next})
	case s.lookahead != nil:
		outer := c.lookahead
		c.lookahead = true
		sub, err := c.compile(s.lookahead.of, &node{op: opMatch})
		if c.lookahead = outer; err != nil {
			return nil, err
		}
		return c.node(node{op: opLook, sub: sub, negated: s.lookahead.negated, next: next})
	}
	for _, one := range slices.Backward(s.sequence) {
		var err error
		if next, err = c.compile(one, next); err != nil {
			return nil, err
		}
	}
	return next, nil
}

func (c *compiler) repeat(r *repetition, next *node) (*node, error) {
	if c.lookahead && r.max < 0 {
		// Successful matches are not recorded, so the look-ahead could read the rest of the text from every position.
		return nil, fmt.Errorf("unbounded repetition in a look-ahead is not supported")
	}
	if r.of.set != nil {
		loop := node{op: opLoop, set: r.of.set, min: r.min, max: r.max, possessive: r.possessive, next: next}
		if r.max < 0 {
			loop.loop = c.loops
			c.loops++
		}
		return c.node(loop)
	}
	switch {
	case r.possessive:
		return nil, fmt.Errorf("a possessive quantifier of a group is not supported")
	case r.max < 0 && r.of.nullable():
		return nil, fmt.Errorf("unbounded repetition of a group that matches the empty text is not supported")
	case r.max < 0:
		again, err := c.node(node{op: opChoice})
		if err != nil {
			return nil, err
		}
		more, err := c.compile(r.of, again)
		if err != nil {
			return nil, err
		}
		again.choice = []*node{more, next}
		next = again
	}
	for range r.max - r.min {
		more, err := c.compile(r.of, next)
		if err != nil {
			return nil, err
		}
		if next, err = c.node(node{op: opChoice, choice: []*node{more, next}}); err != nil {
			return nil, err
		}
	}
	for range r.min {
		var err error
		if next, err = c.compile(r.of, next); err != nil {
			return nil, err
		}
	}
	return next, nil
}

// begins marks the bytes with which a match from n on can begin.
func (n *node) begins(bytes *[256]bool, seen map[*node]bool) {
	if seen[n] {
		return
	}
	seen[n] = true
	switch n.op {
	case opSet, opLoop:
		for b := range bytes {
			if b >= utf8.RuneSelf || n.set.ascii[b] {
				bytes[b] = true
			}
		}
		if n.op == opLoop && n.min == 0 {
			n.next.begins(bytes, seen)
		}
	case opChoice:
		for _, one := range n.choice {
			one.begins(bytes, seen)
		}
	case opAnchor, opLook:
		n.next.begins(bytes, seen)
	}
}
