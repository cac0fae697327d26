// SPDX-License-Identifier: Apache-2.0

package pattern

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// syntax is a parsed expression. At most one member is set. If none is set, the expression matches only the empty text.
type syntax struct {
	set       *set
	sequence  []*syntax
	choice    []*syntax
	repeated  *repetition
	lookahead *lookahead
	anchor    anchor
}

type repetition struct {
	of *syntax
	// max is the maximum number of repetitions. A negative max means no limit.
	min, max   int
	possessive bool
}

type lookahead struct {
	of      *syntax
	negated bool
}

type anchor byte

const (
	lineBegin anchor = iota + 1
	lineEnd
	textBegin
	textEnd
)

// maxRepeat is the maximum number in a quantifier; quantifiers of groups are expanded. maxNested is the maximum nesting
// depth of groups and classes.
const (
	maxRepeat = 100
	maxNested = 100
)

type parser struct {
	text  string
	at    int
	fold  bool
	depth int
}

func (p *parser) fail(format string, args ...any) error {
	return fmt.Errorf("expression %q at byte %d: %s", p.text, p.at, fmt.Sprintf(format, args...))
}

func (p *parser) more() bool { return p.at < len(p.text) }

func (p *parser) accept(word string) bool {
	if strings.HasPrefix(p.text[p.at:], word) {
		p.at += len(word)
		return true
	}
	return false
}

func (p *parser) next() rune {
	c, size := utf8.DecodeRuneInString(p.text[p.at:])
	p.at += size
	return c
}

func (p *parser) nest() error {
	if p.depth++; p.depth > maxNested {
		return p.fail("nested deeper than %d", maxNested)
	}
	return nil
}

func (p *parser) choice() (*syntax, error) {
	var choice []*syntax
	for {
		one, err := p.sequence()
		if err != nil {
			return nil, err
		}
		choice = append(choice, one)
		if !p.accept("|") {
			break
		}
	}
	if len(choice) == 1 {
		return choice[0], nil
	}
	return &syntax{choice: choice}, nil
}

func (p *parser) sequence() (*syntax, error) {
	var list []*syntax
	for p.more() && p.text[p.at] != '|' && p.text[p.at] != ')' {
		one, err := p.atom()
		if err != nil {
			return nil, err
		}
		if one, err = p.quantified(one); err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	if len(list) == 1 {
		return list[0], nil
	}
	return &syntax{sequence: list}, nil
}

func (p *parser) atom() (*syntax, error) {
	switch {
	case p.accept("("):
		return p.group()
	case p.accept("["):
		s, err := p.class()
		return &syntax{set: s}, err
	case p.accept("."):
		return &syntax{set: newline.not()}, nil
	case p.accept("^"):
		return &syntax{anchor: lineBegin}, nil
	case p.accept("$"):
		return &syntax{anchor: lineEnd}, nil
	case p.accept(`\A`):
		return &syntax{anchor: textBegin}, nil
	case p.accept(`\z`):
		return &syntax{anchor: textEnd}, nil
	case p.accept(`\`):
		s, err := p.escape(words)
		return &syntax{set: s}, err
	case strings.IndexByte("*+?", p.text[p.at]) >= 0:
		return nil, p.fail("nothing to repeat")
	}
	return &syntax{set: p.single(p.next())}, nil
}

// single returns the set of one character, and of its other cases if case is ignored.
func (p *parser) single(c rune) *set {
	s := newSet([]interval{{c, c}})
	if p.fold {
		return s.folded()
	}
	return s
}

// group parses the rest of a group after the opening parenthesis.
func (p *parser) group() (*syntax, error) {
	fold := p.fold
	defer func() { p.fold = fold; p.depth-- }()
	if err := p.nest(); err != nil {
		return nil, err
	}
	var look *lookahead
	switch {
	case p.accept("?:"):
	case p.accept("?i:"):
		p.fold = true
	case p.accept("?-i:"):
		p.fold = false
	case p.accept("?="):
		look = &lookahead{}
	case p.accept("?!"):
		look = &lookahead{negated: true}
	case p.accept("?"):
		return nil, p.fail("groups of this kind are not supported; supported are (?:, (?i:, (?-i:, (?= and (?!")
	}
	inner, err := p.choice()
	if err != nil {
		return nil, err
	}
	if !p.accept(")") {
		return nil, p.fail("a parenthesis is not closed")
	}
	if look != nil {
		look.of = inner
		return &syntax{lookahead: look}, nil
	}
	return inner, nil
}

// quantified parses the quantifiers after an atom.
func (p *parser) quantified(one *syntax) (*syntax, error) {
	for p.more() {
		r := &repetition{of: one, max: -1}
		braces := false
		switch {
		case p.accept("*"):
		case p.accept("+"):
			r.min = 1
		case p.accept("?"):
			r.max = 1
		case p.text[p.at] == '{':
			braces = true
			if err := p.counts(r); err != nil {
				return nil, err
			}
		default:
			return one, nil
		}
		if one.anchor != 0 || one.lookahead != nil {
			return nil, p.fail("a repeated assertion is not supported")
		}
		if p.accept("?") {
			return nil, p.fail("lazy quantifiers are not supported")
		}
		// After braces, a plus is a second quantifier, as in the reference implementation.
		r.possessive = !braces && p.accept("+")
		one = &syntax{repeated: r}
	}
	return one, nil
}

// counts parses {n}, {n,}, {n,m} or {,m}.
func (p *parser) counts(r *repetition) error {
	end := strings.IndexByte(p.text[p.at:], '}')
	if end < 0 {
		return p.fail("a brace is not closed")
	}
	low, high, ranged := strings.Cut(p.text[p.at+1:p.at+end], ",")
	number := func(digits string, missing int) (int, error) {
		if digits == "" && ranged {
			return missing, nil
		}
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil || n > maxRepeat {
			return 0, p.fail("quantifier %q: the maximum number is %d", p.text[p.at:p.at+end+1], maxRepeat)
		}
		return int(n), nil
	}
	var err error
	if r.min, err = number(low, 0); err != nil {
		return err
	}
	if r.max = r.min; ranged {
		if r.max, err = number(high, -1); err != nil {
			return err
		}
	}
	if low == "" && high == "" || r.max >= 0 && r.max < r.min {
		return p.fail("quantifier %q: the minimum is greater than the maximum, or both are missing", p.text[p.at:p.at+end+1])
	}
	p.at += end + 1
	return nil
}

// class parses the rest of a class after the opening bracket: members, nested classes, and && between intersected lists
// of members.
func (p *parser) class() (*set, error) {
	if err := p.nest(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	negated := p.accept("^")
	var whole *set
	var members []*set
	for first := true; ; first = false {
		switch {
		case !p.more():
			return nil, p.fail("a bracket is not closed")
		case !first && p.accept("]"):
			result := union(members...)
			if p.fold {
				result = result.folded()
			}
			if whole != nil {
				result = intersection(whole, result)
			}
			if negated {
				result = result.not()
			}
			return result, nil
		case p.accept("&&"):
			part := union(members...)
			if whole != nil {
				part = intersection(whole, part)
			}
			whole, members = part, nil
		case p.accept("[:"):
			return nil, p.fail("classes by POSIX name are not supported")
		case p.accept("["):
			nested, err := p.class()
			if err != nil {
				return nil, err
			}
			members = append(members, nested)
		default:
			member, err := p.member()
			if err != nil {
				return nil, err
			}
			members = append(members, member)
		}
	}
}

// member parses a character, a range or an escape within a class.
func (p *parser) member() (*set, error) {
	low, s, err := p.classCharacter()
	if err != nil || s != nil {
		return s, err
	}
	rest := p.text[p.at:]
	if !strings.HasPrefix(rest, "-") || strings.HasPrefix(rest, "-]") || strings.HasPrefix(rest, "-[") || strings.HasPrefix(rest, "-&&") {
		return newSet([]interval{{low, low}}), nil
	}
	p.at++
	high, s, err := p.classCharacter()
	switch {
	case err != nil:
		return nil, err
	case s != nil || high < low:
		return nil, p.fail("the end of the range that begins with %q is missing or lower", low)
	}
	return newSet([]interval{{low, high}}), nil
}

// classCharacter parses one character, or an escape for several characters. In the second case, the set is not nil.
func (p *parser) classCharacter() (rune, *set, error) {
	if !p.more() {
		return 0, nil, p.fail("a bracket is not closed")
	}
	if !p.accept(`\`) {
		return p.next(), nil, nil
	}
	fold := p.fold
	p.fold = false // case folding is applied to the whole class
	s, err := p.escape(classWords)
	p.fold = fold
	if err != nil {
		return 0, nil, err
	}
	if len(s.ranges) == 1 && s.ranges[0].low == s.ranges[0].high {
		return s.ranges[0].low, nil, nil
	}
	return 0, s, nil
}

// controls maps the escapes of control characters to the characters.
var controls = map[rune]rune{'n': '\n', 'r': '\r', 't': '\t', 'v': '\v', 'f': '\f', 'a': '\a', 'e': '\x1b'}

// escape parses the rest of an escape after the backslash. words is the meaning of \w.
func (p *parser) escape(words *set) (*set, error) {
	if !p.more() {
		return nil, p.fail("incomplete escape at the end")
	}
	switch c := p.next(); c {
	case 's':
		return spaces, nil
	case 'S':
		return spaces.not(), nil
	case 'd':
		return digits, nil
	case 'D':
		return digits.not(), nil
	case 'w':
		return words, nil
	case 'W':
		return words.not(), nil
	case 'p', 'P':
		s, err := p.property()
		if err == nil && c == 'P' {
			s = s.not()
		}
		return s, err
	case 'u':
		return p.hexadecimal(4)
	case 'x':
		if p.accept("{") {
			end := strings.IndexByte(p.text[p.at:], '}')
			if end < 0 {
				return nil, p.fail("a brace is not closed")
			}
			s, err := p.hexadecimal(end)
			p.at++
			return s, err
		}
		return p.hexadecimal(2)
	default:
		if control, ok := controls[c]; ok {
			return p.single(control), nil
		}
		if c == '_' || unicode.IsLetter(c) || unicode.IsNumber(c) {
			return nil, p.fail(`the escape \%c is not supported`, c)
		}
		return p.single(c), nil
	}
}

func (p *parser) hexadecimal(length int) (*set, error) {
	if length > len(p.text)-p.at {
		return nil, p.fail("a character number needs %d digits", length)
	}
	written := p.text[p.at : p.at+length]
	c, err := strconv.ParseUint(written, 16, 32)
	if err != nil || c > unicode.MaxRune {
		return nil, p.fail("%q is not a valid character number", written)
	}
	p.at += length
	return p.single(rune(c)), nil
}

// property parses {Name} or {^Name}. Name is a general category or a script.
func (p *parser) property() (*set, error) {
	end := strings.IndexByte(p.text[p.at:], '}')
	if !p.accept("{") || end < 0 {
		return nil, p.fail("a property needs its name in braces")
	}
	negated := p.accept("^")
	name := p.text[p.at : p.at+end-1]
	if negated {
		name = name[:len(name)-1]
	}
	table, ok := unicode.Categories[name]
	if !ok {
		table, ok = unicode.Scripts[name]
	}
	if !ok || name == "C" || name == "Cn" {
		return nil, p.fail("property %q is not supported: it is neither a general category nor a script", name)
	}
	p.at += len(name) + 1
	if negated {
		return ofTable(table).not(), nil
	}
	return ofTable(table), nil
}
