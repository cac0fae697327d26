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

// Rewrite edits a response, and calls end once all of it has been edited.
func Rewrite(response *http.Response, edit Edit, end func()) error {
	if IsStream(response) {
		response.Header.Del("Content-Length")
		response.ContentLength = -1
		response.Body = &eventStream{upstream: newLineReader(response.Body), body: response.Body, edit: edit, end: end}
		return nil
	}
	data, err := readAll(response)
	if err != nil {
		return err
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

// trustedBytes is how much memory is made ready for an answer because its header says so.
const trustedBytes = 1 << 30

// readAll is io.ReadAll for a body whose length is probably known: routed experts can take hundreds of megabytes, which are then held
// once while they arrive.
func readAll(response *http.Response) ([]byte, error) {
	// As much more as it wants to be free to meet the end.
	data := bytes.NewBuffer(make([]byte, 0, int(min(Length(response), trustedBytes))+bytes.MinRead))
	_, err := data.ReadFrom(response.Body)
	return data.Bytes(), err
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
	pending  []byte
	skip     bool // the blank line that ended an event that was left out
	err      error
}

func (s *eventStream) Read(p []byte) (int, error) {
	for len(s.pending) == 0 {
		if s.err != nil {
			return 0, s.err
		}
		var line []byte
		line, s.err = s.upstream.ReadBytes('\n')
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

func (s *eventStream) Close() error { return s.body.Close() }

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

// Events counts the events of a stream of server-sent events, however it is cut into pieces. Comments, which keep connections
// alive, are none.
type Events struct {
	// N is how many have ended.
	N int
	// filled tells that the present event has a field, line that the present line is not empty.
	filled, line bool
}

// Add reads a piece, and reports whether it has ended an event.
func (e *Events) Add(piece []byte) bool {
	before := e.N
	for len(piece) > 0 {
		text, rest, ended := bytes.Cut(piece, []byte{'\n'})
		if text = bytes.TrimRight(text, "\r"); len(text) > 0 && !e.line {
			e.line = true
			e.filled = e.filled || text[0] != ':'
		}
		if ended {
			if !e.line && e.filled {
				e.N++
				e.filled = false
			}
			e.line = false
		}
		piece = rest
	}
	return e.N > before
}
