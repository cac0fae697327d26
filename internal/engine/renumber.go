// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
)

// Logical returns the number that an expert of a hidden layer has in the model.
type Logical func(layer int, id int32) int32

// TextEditor edits a text that arrives in pieces and may be large. It buffers only a small part of the text. The length
// of the text does not change.
type TextEditor interface {
	// Edit appends the edited text up to the end of a piece, as far as it can be edited without the next piece. On
	// error, it appends nothing.
	Edit(dst, piece []byte) ([]byte, error)
	// End appends the rest of the edited text.
	End(dst []byte) ([]byte, error)
}

// base64Editor edits data that is encoded in base64.
type base64Editor struct {
	edit func(data []byte, end bool) (done int, err error)
	// text is an incomplete quantum of up to three characters. data is decoded and not yet encoded again; its first
	// edited bytes are already edited.
	text, data []byte
	edited     int
	// padded reports whether the end of the base64 text was reached.
	padded bool
}

// EditBase64 returns an editor of the data in a base64 text. The function edits data in place and returns the number of
// bytes, from the beginning, that are done. It is called again with the remaining bytes and further data. At the end of
// the text, all data must be done.
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
	// A decoder skips line feeds, which would change the length.
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

// pass edits the data and appends the edited bytes in whole quanta of three bytes.
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
