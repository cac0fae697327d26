package router

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
)

// cutMember takes the member at a path out of a JSON object and leaves every other byte as it is. An object that is
// empty without it goes as well. It reports false where there is no such member, or data is not JSON.
func cutMember(data []byte, path []string) (value json.RawMessage, rest []byte, ok bool) {
	start, keyEnd, end, empty, ok := findMember(data, path[0])
	if !ok {
		return nil, data, false
	}
	member := data[keyEnd:end]
	if len(path) > 1 {
		value, inner, ok := cutMember(member, path[1:])
		if !ok {
			return nil, data, false
		}
		var left map[string]json.RawMessage
		if json.Unmarshal(inner, &left) != nil || len(left) > 0 {
			return value, splice(data, keyEnd, end, inner), true
		}
		return value, cutRange(data, start, end, empty), true
	}
	return append(json.RawMessage(nil), bytes.TrimSpace(member)...), cutRange(data, start, end, empty), true
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

func splice(data []byte, start, end int, with []byte) []byte {
	out := make([]byte, 0, len(data)-(end-start)+len(with))
	out = append(out, data[:start]...)
	out = append(out, with...)
	return append(out, data[end:]...)
}

func newLineReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 64<<10) }

var dataPrefix = []byte("data:")

// eventStream is a stream of server-sent events without the routed experts; every event is passed on as soon as it has
// arrived. An event that carried nothing else is left out.
type eventStream struct {
	upstream *bufio.Reader
	body     io.Closer
	meter    *meter
	pending  []byte
	found    string
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
		s.pending = s.pass(line)
		if s.err == io.EOF {
			s.meter.count(s.found)
		}
	}
	n := copy(p, s.pending)
	s.pending = s.pending[n:]
	return n, nil
}

func (s *eventStream) Close() error { return s.body.Close() }

// pass returns what the client gets of a line.
func (s *eventStream) pass(line []byte) []byte {
	if s.skip && len(bytes.TrimSpace(line)) == 0 {
		s.skip = false
		return nil
	}
	s.skip = false
	data, isData := bytes.CutPrefix(line, dataPrefix)
	if !isData {
		return line
	}
	found, rest := s.meter.take(data)
	if found == "" {
		return line
	}
	s.found = found
	if carriesNothing(rest) {
		s.skip = true
		return nil
	}
	return append(append([]byte(nil), dataPrefix...), rest...)
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
