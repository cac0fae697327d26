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
		return []json.RawMessage{bytes.Clone(bytes.TrimSpace(member))}, cutRange(data, start, end, only)
	}
	values, inner := cutMembers(member, path[1:])
	if values == nil {
		return nil, data
	}
	var left map[string]json.RawMessage
	if json.Unmarshal(inner, &left) != nil || len(left) > 0 {
		return values, splice(data, valueStart, end, inner)
	}
	return values, cutRange(data, start, end, only)
}

// cutInElements cuts in each element of an array, whose values come in their order.
func cutInElements(data []byte, path []string) (values []json.RawMessage, rest []byte) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	if _, err := decoder.Token(); err != nil {
		return nil, data
	}
	var elements [][2]int
	for decoder.More() {
		var element json.RawMessage
		if err := decoder.Decode(&element); err != nil {
			return nil, data
		}
		end := int(decoder.InputOffset())
		elements = append(elements, [2]int{end - len(element), end})
	}
	if _, err := decoder.Token(); err != nil { // the closing bracket
		return nil, data
	}
	rest = data
	for _, at := range slices.Backward(elements) { // so that what lies before keeps its place
		found, inner := cutMembers(data[at[0]:at[1]], path)
		if found != nil {
			values, rest = slices.Concat(found, values), splice(rest, at[0], at[1], inner)
		}
	}
	return values, rest
}

// findMember finds a member of the outermost object: where its key starts, where its value starts (after the colon) and
// ends, and whether it is the object's only one.
func findMember(data []byte, name string) (start, valueStart, end int, only, found bool) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return 0, 0, 0, false, false
	}
	members := 0
	for decoder.More() {
		before := int(decoder.InputOffset())
		key, err := decoder.Token()
		if err != nil {
			return 0, 0, 0, false, false
		}
		after := int(decoder.InputOffset())
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return 0, 0, 0, false, false
		}
		members++
		if key == name && !found {
			found = true
			start = before + bytes.IndexByte(data[before:after], '"')
			end = int(decoder.InputOffset())
			valueStart = end - len(value)
		}
	}
	if _, err := decoder.Token(); err != nil { // the closing brace
		return 0, 0, 0, false, false
	}
	return start, valueStart, end, members == 1, found
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
	if !json.Valid(data) {
		return data, nil
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.Token() //nolint:errcheck // the opening bracket
	var out []byte
	copied := 0
	for decoder.More() {
		var element json.RawMessage
		if err := decoder.Decode(&element); err != nil {
			return nil, err
		}
		end := int(decoder.InputOffset())
		edited, err := edit(element)
		if err != nil {
			return nil, err
		}
		out = append(append(out, data[copied:end-len(element)]...), edited...)
		copied = end
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
	var event struct {
		Choices *[]json.RawMessage `json:"choices"`
		Usage   *json.RawMessage   `json:"usage"`
	}
	return json.Unmarshal(data, &event) == nil && event.Choices != nil && len(*event.Choices) == 0 && event.Usage == nil
}
