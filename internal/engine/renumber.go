package engine

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
)

// Logical gives an expert of a layer, counted over hidden layers, the number that it has in the model.
type Logical func(layer int, id int32) int32

// TextEditor edits a text that comes in pieces and that may be large, of which it holds no more than a little. The text keeps its length.
type TextEditor interface {
	// Edit appends what the text up to the end of a piece has become, as far as that is known. With an error nothing is appended.
	Edit(dst, piece []byte) ([]byte, error)
	// End appends the rest.
	End(dst []byte) ([]byte, error)
}

// base64Editor edits the data that base64 stands for.
type base64Editor struct {
	edit func(data []byte, end bool) (done int, err error)
	// text is the beginning of a quantum of four characters, data what is not encoded again yet: edited bytes of it are edited.
	text, data []byte
	edited     int
	// padded tells that the text has had its end.
	padded bool
}

// EditBase64 returns an editor of the data that a text in base64 stands for. The function edits data in place and says how much of it, from
// its beginning, is done; the rest comes again, with more. At the end of the text all of it must be done.
func EditBase64(edit func(data []byte, end bool) (done int, err error)) TextEditor {
	return &base64Editor{edit: edit}
}

var errPadded = errors.New("routed experts: text after the end of base64")

func (e *base64Editor) Edit(dst, piece []byte) ([]byte, error) {
	if e.padded && len(piece) > 0 {
		return dst, errPadded
	}
	e.text = append(e.text, piece...)
	whole := len(e.text) / 4 * 4
	// A decoder leaves out line feeds, which would change the length.
	if at := bytes.IndexAny(e.text[:whole], "\r\n"); at >= 0 {
		return dst, base64.CorruptInputError(at)
	}
	before := len(e.data)
	var err error
	if e.data, err = base64.StdEncoding.AppendDecode(e.data, e.text[:whole]); err != nil {
		return dst, fmt.Errorf("routed experts: %w", err)
	}
	e.padded = len(e.data)-before < whole/4*3
	e.text = append(e.text[:0], e.text[whole:]...)
	return e.pass(dst, false)
}

func (e *base64Editor) End(dst []byte) ([]byte, error) {
	if len(e.text) > 0 {
		return dst, fmt.Errorf("routed experts: base64 ends in %q", e.text)
	}
	return e.pass(dst, true)
}

// pass edits, and appends what is edited in whole quanta of three bytes.
func (e *base64Editor) pass(dst []byte, end bool) ([]byte, error) {
	done, err := e.edit(e.data[e.edited:], end)
	if err != nil {
		return dst, fmt.Errorf("routed experts: %w", err)
	}
	e.edited += done
	whole := e.edited
	if !end {
		whole -= whole % 3
	}
	dst = base64.StdEncoding.AppendEncode(dst, e.data[:whole])
	e.data = append(e.data[:0], e.data[whole:]...)
	e.edited -= whole
	return dst, nil
}
