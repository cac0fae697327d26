package router

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/jsonscan"
)

// cutMembers takes the members at a path out of JSON, through every element of the arrays on its way, and leaves every
// other byte as it is. An object that is empty without its member goes as well, where it is a member itself. There are no
// values where there is no such member, or data is not JSON.
func cutMembers(data []byte, path []string) (values []json.RawMessage, rest []byte) {
	if isArray(data) {
		return cutInElements(data, path)
	}
	start, valueStart, end, only, ok := findMember(data, path[0])
	if !ok {
		return nil, data
	}
	member := data[valueStart:end]
	if len(path) == 1 {
		return []json.RawMessage{bytes.Clone(member)}, cutRange(data, start, end, only)
	}
	values, inner := cutMembers(member, path[1:])
	if values == nil {
		return nil, data
	}
	if left, ok := jsonscan.Object(inner, nil); !ok || len(left) > 0 {
		return values, splice(data, valueStart, end, inner)
	}
	return values, cutRange(data, start, end, only)
}

// cutInElements cuts in each element of an array, whose values come in their order.
func cutInElements(data []byte, path []string) (values []json.RawMessage, rest []byte) {
	elements, ok := jsonscan.Array(data, nil)
	if !ok {
		return nil, data
	}
	rest = data
	for _, at := range slices.Backward(elements) { // so that what lies before keeps its place
		found, inner := cutMembers(data[at.Start:at.End], path)
		if found != nil {
			values, rest = slices.Concat(found, values), splice(rest, at.Start, at.End, inner)
		}
	}
	return values, rest
}

// findMember finds a member of the outermost object: where its key starts, where its value starts and ends, and whether it
// is the object's only one.
func findMember(data []byte, name string) (start, valueStart, end int, only, found bool) {
	members, ok := jsonscan.Object(data, nil)
	at := slices.IndexFunc(members, func(m jsonscan.Member) bool { return string(m.Key) == name })
	if !ok || at < 0 {
		return 0, 0, 0, false, false
	}
	m := members[at]
	return m.At, m.Start, m.End, len(members) == 1, true
}

// cutRange removes a member, and the comma that joins it to its neighbour.
func cutRange(data []byte, start, end int, only bool) []byte {
	if !only {
		if next := bytes.TrimLeft(data[end:], " \t\r\n"); len(next) > 0 && next[0] == ',' {
			end = len(data) - len(next) + 1
		} else {
			start = bytes.LastIndexByte(data[:start], ',')
		}
	}
	return splice(data, start, end, nil)
}

// editMember edits the value of the member at a path of a JSON object and leaves every other byte as it is. Of an array on
// the way each element is edited. What has no such member, or is no JSON, stays as it is.
func editMember(data []byte, path []string, edit func(value []byte) ([]byte, error)) ([]byte, error) {
	if isArray(data) {
		return editElements(data, func(element []byte) ([]byte, error) { return editMember(element, path, edit) })
	}
	if len(path) == 0 {
		return edit(data)
	}
	_, start, end, _, ok := findMember(data, path[0])
	if !ok {
		return data, nil
	}
	value, err := editMember(data[start:end], path[1:], edit)
	if err != nil {
		return nil, err
	}
	return splice(data, start, end, value), nil
}

// isArray reports whether a JSON text is an array, if it is JSON.
func isArray(data []byte) bool { return bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte{'['}) }

// editElements edits the elements of a JSON array.
func editElements(data []byte, edit func(element []byte) ([]byte, error)) ([]byte, error) {
	elements, ok := jsonscan.Array(data, nil)
	if !ok {
		return data, nil
	}
	var out []byte
	copied := 0
	for _, at := range elements {
		edited, err := edit(data[at.Start:at.End])
		if err != nil {
			return nil, err
		}
		out = append(append(out, data[copied:at.Start]...), edited...)
		copied = at.End
	}
	return append(out, data[copied:]...), nil
}

func splice(data []byte, start, end int, with []byte) []byte {
	out := make([]byte, 0, len(data)-(end-start)+len(with))
	out = append(out, data[:start]...)
	out = append(out, with...)
	return append(out, data[end:]...)
}

func newLineReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 64<<10) }

var dataPrefix = []byte("data:")

// edit changes the JSON text of a response, or of one event of a stream; of an event nil leaves it out. An error ends the
// response.
type edit func(data []byte, event bool) ([]byte, error)

// rewrite edits a response, and calls end once all of it has been edited.
func rewrite(response *http.Response, edit edit, end func()) error {
	if isStream(response) {
		response.Header.Del("Content-Length")
		response.ContentLength = -1
		response.Body = &eventStream{upstream: newLineReader(response.Body), body: response.Body, edit: edit, end: end}
		return nil
	}
	data, err := io.ReadAll(response.Body)
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

func isStream(response *http.Response) bool {
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
	edit     edit
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

// carriesNothing tells that an event of the OpenAI routes has neither a choice nor a usage: it was made for the routed
// experts alone.
func carriesNothing(data []byte) bool {
	event := parseBody(data)
	choices, ok := jsonscan.Array(event.get("choices"), nil)
	usage := event.get("usage")
	return ok && len(choices) == 0 && (usage == nil || string(usage) == "null")
}
