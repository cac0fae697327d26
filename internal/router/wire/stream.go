// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/router/jsonscan"
)

func newLineReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 64<<10) }

var dataPrefix = []byte("data:")

// Edit edits the JSON text of a response, or of one event of a stream. A nil result removes an event. An error ends the
// response.
type Edit func(data []byte, event bool) ([]byte, error)

// Rewrite edits a response and calls end once all of it has been edited. Buffered data takes memory from room. If the
// budget is exhausted, the response is forwarded unchanged, from its first byte or from the current line on.
func Rewrite(response *http.Response, edit Edit, end func(), budget MemoryBudget) error {
	if IsStream(response) {
		response.Header.Del("Content-Length")
		response.ContentLength = -1
		response.Body = &eventStream{upstream: newLineReader(response.Body), body: response.Body, edit: edit, end: end, budget: budget}
		return nil
	}
	parts, whole, err := readBuffered(response, budget)
	if err != nil {
		return err
	}
	if !whole {
		budget.GiveUp()
		response.Body = &unedited{parts: parts, rest: response.Body, passed: budget.Release}
		return nil
	}
	data := parts[0]
	if len(parts) > 1 {
		data = bytes.Join(parts, nil)
	}
	if data, err = edit(data, false); err != nil {
		return err
	}
	end()
	response.Body = &replacedBody{Reader: bytes.NewReader(data), Closer: response.Body}
	response.ContentLength = int64(len(data))
	response.Header.Set("Content-Length", strconv.Itoa(len(data)))
	return nil
}

// Length returns the body length that a response header declares; 0 if it declares none.
func Length(response *http.Response) int64 {
	length, err := strconv.ParseInt(response.Header.Get("Content-Length"), 10, 64)
	if err != nil {
		return 0
	}
	return max(0, length)
}

// IsStream reports whether a response is a stream of server-sent events.
func IsStream(response *http.Response) bool {
	kind, _, _ := strings.Cut(response.Header.Get("Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), "text/event-stream")
}

type replacedBody struct {
	io.Reader
	io.Closer
}

// maxEventBytes is the size above which an event is forwarded before it is complete.
const maxEventBytes = 64 << 10

// eventStream edits a stream of server-sent events. It forwards each event as soon as it is complete, in one piece, so
// that a client gets it in one write.
type eventStream struct {
	upstream *bufio.Reader
	body     io.Closer
	edit     Edit
	end      func()
	budget   MemoryBudget
	// event contains the lines of the current event; pending is the part that was not read yet. whole is true once the
	// event can be read.
	event, pending []byte
	whole          bool
	skip           bool // skip the blank line that ends a removed event
	// rest is the unedited rest of the stream after the budget was exhausted; nil before.
	rest io.ReadCloser
	err  error
}

func (s *eventStream) Read(p []byte) (int, error) {
	for len(s.pending) == 0 {
		if s.event = s.event[:0]; cap(s.event) > 2*maxEventBytes {
			s.event = nil
		}
		for s.whole = false; !s.whole && s.rest == nil && s.err == nil; {
			s.readLine()
		}
		if s.pending = s.event; len(s.pending) > 0 {
			break
		}
		if s.rest != nil {
			return s.rest.Read(p)
		}
		if s.err != nil {
			return 0, s.err
		}
	}
	n := copy(p, s.pending)
	s.pending = s.pending[n:]
	return n, nil
}

// readLine adds the next line, edited, to the event.
func (s *eventStream) readLine() {
	line, err := s.line()
	if s.rest != nil {
		return
	}
	s.err = err
	if err := s.pass(line); err != nil {
		s.err = err
	}
	if s.err == io.EOF {
		s.end()
	}
	s.whole = len(s.event) > 0 && len(bytes.TrimSpace(line)) == 0 || len(s.event) >= maxEventBytes
}

func (s *eventStream) Close() error {
	if s.rest != nil {
		return s.rest.Close()
	}
	return s.body.Close()
}

// line reads a line, which is valid until the next call. If the budget is exhausted, rest reads the start of the line
// and the rest of the stream.
func (s *eventStream) line() ([]byte, error) {
	var parts [][]byte
	held := int64(0)
	for {
		part, err := s.upstream.ReadSlice('\n')
		if err != bufio.ErrBufferFull && len(parts) == 0 {
			return part, err
		}
		parts = append(parts, bytes.Clone(part))
		if held += int64(len(part)); !s.budget.Reserve(held) {
			s.budget.GiveUp()
			s.rest = &unedited{parts: parts, rest: &replacedBody{Reader: s.upstream, Closer: s.body}, passed: s.budget.Release}
			return nil, nil
		}
		if err != bufio.ErrBufferFull {
			return bytes.Join(parts, nil), err
		}
	}
}

// pass edits a line and adds it to the event.
func (s *eventStream) pass(line []byte) error {
	if s.skip && len(bytes.TrimSpace(line)) == 0 {
		s.skip = false
		return nil
	}
	s.skip = false
	data, isData := bytes.CutPrefix(line, dataPrefix)
	if !isData {
		s.event = append(s.event, line...)
		return nil
	}
	edited, err := s.edit(data, true)
	if edited == nil {
		s.skip = true
		return err
	}
	s.event = append(append(s.event, dataPrefix...), edited...)
	return err
}

// IsEmptyEvent reports whether an event of the OpenAI routes has neither a choice nor a usage. Such an event carries
// only routed experts.
func IsEmptyEvent(data []byte) bool {
	event := ParseBody(data)
	choices, ok := jsonscan.Array(event.get("choices"), nil)
	usage := event.get("usage")
	return ok && len(choices) == 0 && (usage == nil || string(usage) == "null")
}

// Events counts the events with generated tokens in a stream of server-sent events, for any split into pieces.
// Keep-alive comments are not events. If events have names, as in Messages and Responses, events with tokens are named
// deltas; message_delta ends a message and does not count.
type Events struct {
	// N is the number of complete events.
	N int
	// filled is true if the current event has a field.
	filled bool
	// line is the start of the current line. name is the name of the current event.
	line, name []byte
}

var (
	eventPrefix = []byte("event:")
	blockDelta  = []byte("content_block_delta")
	deltaSuffix = []byte(".delta")
)

// maxEventNameBytes is the maximum number of bytes kept of a line. Event names are shorter.
const maxEventNameBytes = 96

// Add reads a piece, and reports whether it completes an event that counts.
func (e *Events) Add(piece []byte) bool {
	before := e.N
	for len(piece) > 0 {
		text, rest, ended := bytes.Cut(piece, []byte{'\n'})
		e.line = append(e.line, text[:min(len(text), maxEventNameBytes-len(e.line))]...)
		if ended {
			e.endLine(bytes.TrimRight(e.line, "\r"))
			e.line = e.line[:0]
		}
		piece = rest
	}
	return e.N > before
}

// endLine processes a complete line, given its start.
func (e *Events) endLine(line []byte) {
	name, named := bytes.CutPrefix(line, eventPrefix)
	switch {
	case named:
		e.filled, e.name = true, append(e.name[:0], bytes.TrimSpace(name)...)
	case len(line) > 0:
		e.filled = e.filled || line[0] != ':'
	default:
		if e.filled && (len(e.name) == 0 || bytes.Equal(e.name, blockDelta) || bytes.HasSuffix(e.name, deltaSuffix)) {
			e.N++
		}
		e.filled, e.name = false, e.name[:0]
	}
}
