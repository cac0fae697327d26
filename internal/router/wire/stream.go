package wire

import (
	"bufio"
	"bytes"
	"io"
	"mime"
	"net/http"
	"strconv"

	"github.com/semmoe/operator/internal/jsonscan"
)

func newLineReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 64<<10) }

var dataPrefix = []byte("data:")

// Edit changes the JSON text of a response, or of one event of a stream; of an event nil leaves it out. An error ends the
// response.
type Edit func(data []byte, event bool) ([]byte, error)

// Rewrite edits a response, and calls end once all of it has been edited. What is held of the response takes room; a response for which
// there is none is passed on as it is, from its first byte or its present line on.
func Rewrite(response *http.Response, edit Edit, end func(), room Room) error {
	if IsStream(response) {
		response.Header.Del("Content-Length")
		response.ContentLength = -1
		response.Body = &eventStream{upstream: newLineReader(response.Body), body: response.Body, edit: edit, end: end, room: room}
		return nil
	}
	parts, whole, err := readWithin(response, room)
	if err != nil {
		return err
	}
	if !whole {
		room.GiveUp()
		response.Body = &passedOn{parts: parts, rest: response.Body, passed: room.Release}
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

// Length is how long a response's body is, as its header says; 0 where it does not.
func Length(response *http.Response) int64 {
	length, err := strconv.ParseInt(response.Header.Get("Content-Length"), 10, 64)
	if err != nil {
		return 0
	}
	return max(0, length)
}

// IsStream reports whether a response is a stream of server-sent events.
func IsStream(response *http.Response) bool {
	kind, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
	return kind == "text/event-stream"
}

type replacedBody struct {
	io.Reader
	io.Closer
}

// eventStream is a stream of server-sent events, edited; every event is passed on as soon as it has arrived.
type eventStream struct {
	upstream *bufio.Reader
	body     io.Closer
	edit     Edit
	end      func()
	room     Room
	pending  []byte
	skip     bool // the blank line that ended an event that was left out
	// asIs is the rest of the stream once there was no room for a line; nil before.
	asIs io.ReadCloser
	err  error
}

func (s *eventStream) Read(p []byte) (int, error) {
	if s.asIs != nil {
		return s.asIs.Read(p)
	}
	for len(s.pending) == 0 {
		if s.err != nil {
			return 0, s.err
		}
		var line []byte
		line, s.err = s.line()
		if s.asIs != nil {
			return s.asIs.Read(p)
		}
		var err error
		if s.pending, err = s.pass(line); err != nil {
			s.err = err
		}
		if s.err == io.EOF {
			s.end()
		}
	}
	n := copy(p, s.pending)
	s.pending = s.pending[n:]
	return n, nil
}

func (s *eventStream) Close() error {
	if s.asIs != nil {
		return s.asIs.Close()
	}
	return s.body.Close()
}

// line reads a line, which is valid until the next one is read. Where there is no room for it, asIs reads what has come of it, and the rest of
// the stream.
func (s *eventStream) line() ([]byte, error) {
	var parts [][]byte
	held := int64(0)
	for {
		part, err := s.upstream.ReadSlice('\n')
		if err != bufio.ErrBufferFull && len(parts) == 0 {
			return part, err
		}
		parts = append(parts, bytes.Clone(part))
		if held += int64(len(part)); !s.room.Hold(held) {
			s.room.GiveUp()
			s.asIs = &passedOn{parts: parts, rest: &replacedBody{Reader: s.upstream, Closer: s.body}, passed: s.room.Release}
			return nil, nil
		}
		if err != bufio.ErrBufferFull {
			return bytes.Join(parts, nil), err
		}
	}
}

// pass returns what the client gets of a line.
func (s *eventStream) pass(line []byte) ([]byte, error) {
	if s.skip && len(bytes.TrimSpace(line)) == 0 {
		s.skip = false
		return nil, nil
	}
	s.skip = false
	data, isData := bytes.CutPrefix(line, dataPrefix)
	if !isData {
		return line, nil
	}
	edited, err := s.edit(data, true)
	if edited == nil {
		s.skip = true
		return nil, err
	}
	return append(append([]byte(nil), dataPrefix...), edited...), err
}

// CarriesNothing tells that an event of the OpenAI routes has neither a choice nor a usage: it was made for the routed
// experts alone.
func CarriesNothing(data []byte) bool {
	event := ParseBody(data)
	choices, ok := jsonscan.Array(event.get("choices"), nil)
	usage := event.get("usage")
	return ok && len(choices) == 0 && (usage == nil || string(usage) == "null")
}

// Events counts the events of a stream of server-sent events that contain generated tokens, however it is cut into pieces. Comments, which
// keep connections alive, are no events. Of events with names, as of Messages and Responses, those that contain tokens are called deltas;
// message_delta ends a message.
type Events struct {
	// N is how many have ended.
	N int
	// filled is true where the present event has a field.
	filled bool
	// line is the beginning of the present line, and name the name of the present event.
	line, name []byte
}

var (
	eventPrefix = []byte("event:")
	blockDelta  = []byte("content_block_delta")
	deltaSuffix = []byte(".delta")
)

// longestEventName bounds what is kept of a line. Names of events are shorter.
const longestEventName = 96

// Add reads a piece, and reports whether it has ended an event that counts.
func (e *Events) Add(piece []byte) bool {
	before := e.N
	for len(piece) > 0 {
		text, rest, ended := bytes.Cut(piece, []byte{'\n'})
		e.line = append(e.line, text[:min(len(text), longestEventName-len(e.line))]...)
		if ended {
			e.endLine(bytes.TrimRight(e.line, "\r"))
			e.line = e.line[:0]
		}
		piece = rest
	}
	return e.N > before
}

// endLine takes note of a line, or of its beginning.
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
