// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/semmoe/operator/internal/router/jsonscan"
)

// TextEditor edits a text that arrives in pieces. It preserves the length of the text.
type TextEditor interface {
	// Edit appends the edited text up to the end of piece, as far as it is known. It appends nothing if it returns an
	// error.
	Edit(dst, piece []byte) ([]byte, error)
	// End appends the rest of the edited text.
	End(dst []byte) ([]byte, error)
}

const (
	// pieceBytes is the size of the pieces of a response that are edited. firstBytes of an unstreamed response are
	// edited before any byte is forwarded, so that an early error can still be returned as an error response.
	pieceBytes, firstBytes = 32 << 10, 64 << 10
	// maxKeyBytes is the maximum length of a key of a path, with its escapes.
	maxKeyBytes = 256
)

// EditTexts edits the strings at some paths of a response, or of the events of a stream, while they are forwarded. A
// path leads through every element of an array. null stays unchanged. Any other value at a path ends the response, like
// an error of the editor. All other bytes and the length of the response stay unchanged, also if data is not JSON or
// has no such member.
func EditTexts(response *http.Response, paths [][]string, edit func() (TextEditor, error)) error {
	texts := &textEdits{paths: paths, edit: edit}
	edited := &editedBody{body: response.Body, from: make([]byte, pieceBytes), pass: texts.pass, end: texts.end}
	response.Body = edited
	if IsStream(response) {
		edited.pass = (&eventTexts{texts: texts}).pass
		return nil
	}
	ahead := bufio.NewReaderSize(edited, firstBytes)
	if _, err := ahead.Peek(firstBytes); err != nil && err != io.EOF {
		return err
	}
	response.Body = &replacedBody{Reader: ahead, Closer: edited}
	return nil
}

// editedBody is a body that is edited piece by piece.
type editedBody struct {
	body io.ReadCloser
	pass func(dst, piece []byte) ([]byte, error)
	end  func() error
	// from is the read buffer, edited the edited last piece, pending its unread part.
	from, edited, pending []byte
	err                   error
}

func (b *editedBody) Read(p []byte) (int, error) {
	for len(b.pending) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		b.next()
	}
	n := copy(p, b.pending)
	b.pending = b.pending[n:]
	return n, nil
}

func (b *editedBody) next() {
	n, err := b.body.Read(b.from)
	var failed error
	b.edited, failed = b.pass(b.edited[:0], b.from[:n])
	if failed == nil && err == io.EOF {
		failed = b.end()
	}
	if failed != nil {
		err = failed
	}
	b.pending, b.err = b.edited, err
}

func (b *editedBody) Close() error { return b.body.Close() }

// eventTexts passes the data fields of server-sent events to textEdits.
type eventTexts struct {
	texts *textEdits
	// begun is the number of matched bytes of the data prefix in the current line. other is true if the line has
	// another prefix.
	begun int
	other bool
}

func (e *eventTexts) pass(dst, piece []byte) (_ []byte, err error) {
	for len(piece) > 0 {
		line := piece
		end := bytes.IndexByte(piece, '\n')
		if end >= 0 {
			line = piece[:end+1]
		}
		piece = piece[len(line):]
		for e.begun < len(dataPrefix) && !e.other && len(line) > 0 {
			e.other = line[0] != dataPrefix[e.begun]
			e.begun++
			dst, line = append(dst, line[0]), line[1:]
		}
		if e.other {
			dst = append(dst, line...)
		} else if dst, err = e.texts.pass(dst, line); err != nil {
			return dst, err
		}
		if end < 0 {
			continue
		}
		if err := e.texts.end(); err != nil {
			return dst, err
		}
		e.texts.reset()
		e.begun, e.other = 0, false
	}
	return dst, nil
}

// position is the state of the JSON parser.
type position int

const (
	between position = iota // between strings, also in numbers and literals
	inKey
	inText
	inEdited
)

// textEdits parses JSON incrementally and edits the strings at the paths.
type textEdits struct {
	paths [][]string
	edit  func() (TextEditor, error)

	at position
	// escaped is true after the backslash of an escape sequence.
	escaped bool
	// open contains the opening characters of the enclosing objects and arrays. keys contains the current member key of
	// each enclosing object.
	open []byte
	keys []string
	// wantsKey is true if the next string is a key. fresh is true if a value starts next.
	wantsKey, fresh bool
	// key is the key that is being read, with its escapes.
	key []byte
	// editor edits the current string. unescaped is the number of characters that removed escapes have saved.
	editor    TextEditor
	unescaped int
}

func (t *textEdits) reset() {
	*t = textEdits{paths: t.paths, edit: t.edit, open: t.open[:0], keys: t.keys[:0], key: t.key[:0]}
}

var errCutOff = errors.New("the text ends within a string that is to be edited")

// end reports whether the text may end here.
func (t *textEdits) end() error {
	if t.at == inEdited {
		return errCutOff
	}
	return nil
}

func (t *textEdits) pass(dst, piece []byte) (_ []byte, err error) {
	for len(piece) > 0 && err == nil {
		n := 0
		if t.at == between {
			n, err = t.structure(piece)
			dst = append(dst, piece[:n]...)
		} else {
			n, dst, err = t.text(dst, piece)
		}
		piece = piece[n:]
	}
	return dst, err
}

// structure reads up to and including the first quote, and returns the number of bytes read.
func (t *textEdits) structure(piece []byte) (n int, err error) {
	for i, c := range piece {
		switch c {
		case ' ', '\t', '\r', '\n':
			continue
		case '"':
			return i + 1, t.begin()
		case '[':
			t.open = append(t.open, c)
			t.wantsKey, t.fresh = false, true
			continue
		case ']', '}':
			t.close()
		case ',':
			t.wantsKey = len(t.open) > 0 && t.open[len(t.open)-1] == '{'
			t.fresh = true
			continue
		case ':':
			t.wantsKey, t.fresh = false, true
			continue
		default:
			if t.fresh && c != 'n' && !t.wantsKey && t.wanted() {
				return i, fmt.Errorf("%s is not a string: the value begins with %q", t.keys, c)
			}
			if c == '{' {
				t.open, t.keys = append(t.open, c), append(t.keys, "")
				t.wantsKey = true
			}
		}
		t.fresh = false
	}
	return len(piece), nil
}

// close closes the innermost object or array.
func (t *textEdits) close() {
	if last := len(t.open) - 1; last >= 0 {
		if t.open[last] == '{' {
			t.keys = t.keys[:len(t.keys)-1]
		}
		t.open = t.open[:last]
	}
	t.wantsKey = false
}

// wanted reports whether the next value is at one of the paths.
func (t *textEdits) wanted() bool {
	return slices.ContainsFunc(t.paths, func(path []string) bool { return slices.Equal(path, t.keys) })
}

// begin starts a string.
func (t *textEdits) begin() (err error) {
	fresh := t.fresh
	t.fresh = false
	switch {
	case t.wantsKey:
		t.at, t.key = inKey, t.key[:0]
	case fresh && t.wanted():
		t.at, t.unescaped = inEdited, 0
		t.editor, err = t.edit()
	default:
		t.at = inText
	}
	return err
}

// text reads a part of a string: its plain characters and the following quote or backslash. n is the number of bytes
// read.
func (t *textEdits) text(dst, piece []byte) (n int, _ []byte, err error) {
	if t.escaped {
		t.escaped = false
		dst, err = t.take(dst, piece[:1], true)
		return 1, dst, err
	}
	end := bytes.IndexByte(piece, '"')
	plain := piece
	if end >= 0 {
		plain = piece[:end]
	}
	if at := bytes.IndexByte(plain, '\\'); at >= 0 {
		end, plain = at, plain[:at]
	}
	if dst, err = t.take(dst, plain, false); err != nil || end < 0 {
		return len(plain), dst, err
	}
	if piece[end] == '"' {
		dst, err = t.finish(dst)
		return end + 1, dst, err
	}
	t.escaped = true
	if t.at != inEdited {
		dst, err = t.take(dst, piece[end:end+1], false)
	}
	return end + 1, dst, err
}

// take adds characters of a string to the key, the editor or the output. For an escape, the editor gets the escaped
// character without the backslash.
func (t *textEdits) take(dst, text []byte, escaped bool) ([]byte, error) {
	switch t.at {
	case inKey:
		t.key = append(t.key, text[:min(len(text), maxKeyBytes-len(t.key))]...)
	case inEdited:
		if escaped && text[0] != '/' {
			return dst, fmt.Errorf("%s: the escape sequence \\%c in an edited string is not supported", t.keys, text[0])
		}
		if escaped {
			t.unescaped++
		}
		return t.editor.Edit(dst, text)
	}
	return append(dst, text...), nil
}

// finish ends a string. Spaces after an edited string preserve the length of the response.
func (t *textEdits) finish(dst []byte) (_ []byte, err error) {
	spaces := 0
	switch t.at {
	case inKey:
		t.keys[len(t.keys)-1] = t.keyText()
	case inEdited:
		if dst, err = t.editor.End(dst); err != nil {
			return dst, err
		}
		t.editor, spaces = nil, t.unescaped
	}
	t.at = between
	return append(append(dst, '"'), bytes.Repeat([]byte{' '}, spaces)...), nil
}

// keyText returns the unescaped key; empty if it is longer than maxKeyBytes.
func (t *textEdits) keyText() string {
	if len(t.key) == maxKeyBytes {
		return ""
	}
	if bytes.IndexByte(t.key, '\\') < 0 {
		return string(t.key)
	}
	members, ok := jsonscan.Object(fmt.Appendf(nil, `{"%s":0}`, t.key), nil)
	if !ok || len(members) != 1 {
		return ""
	}
	return string(members[0].Key)
}
