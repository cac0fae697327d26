package wire

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/jsonscan"
)

// CutMembers takes the members at a path out of JSON, through every element of the arrays on its way, and leaves every
// other byte as it is. An object that is empty without its member goes as well, where it is a member itself. There are no
// values where there is no such member, or data is not JSON. Values are parts of data, which may be large, and are not copied.
func CutMembers(data []byte, path []string) (values []json.RawMessage, rest []byte) {
	if isArray(data) {
		return cutInElements(data, path)
	}
	start, valueStart, end, only, ok := findMember(data, path[0])
	if !ok {
		return nil, data
	}
	member := data[valueStart:end]
	if len(path) == 1 {
		return []json.RawMessage{member}, cutRange(data, start, end, only)
	}
	values, inner := CutMembers(member, path[1:])
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
	copied := 0
	for _, at := range elements {
		found, inner := CutMembers(data[at.Start:at.End], path)
		if found == nil {
			continue
		}
		values, rest = append(values, found...), append(append(rest, data[copied:at.Start]...), inner...)
		copied = at.End
	}
	if values == nil {
		return nil, data
	}
	return values, append(rest, data[copied:]...)
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

// isArray reports whether a JSON text is an array, if it is JSON.
func isArray(data []byte) bool { return bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte{'['}) }

func splice(data []byte, start, end int, with []byte) []byte {
	out := make([]byte, 0, len(data)-(end-start)+len(with))
	out = append(out, data[:start]...)
	out = append(out, with...)
	return append(out, data[end:]...)
}

// Ask adds a true boolean member to a JSON object. It reports false, and leaves the body alone, where the body is no
// object or has the member already: then the answer to it is the client's.
func Ask(body []byte, field string) ([]byte, bool) {
	members, ok := jsonscan.Object(body, nil)
	if !ok || jsonscan.Get(body, members, field) != nil {
		return body, false
	}
	open := bytes.IndexByte(body, '{') + 1
	member := memberText(field, "true", len(members) == 0)
	out := make([]byte, 0, len(body)+len(member))
	out = append(out, body[:open]...)
	out = append(out, member...)
	return append(out, body[open:]...), true
}

// With splits a JSON object with one more member in front into a short head and the rest, which is a part of body. It reports false
// where the body is no object.
func With(body []byte, field, value string) (head string, rest []byte, ok bool) {
	members, ok := jsonscan.Object(body, nil)
	if !ok {
		return "", body, false
	}
	return "{" + memberText(field, value, len(members) == 0), body[bytes.IndexByte(body, '{')+1:], true
}

func memberText(name, value string, only bool) string {
	text := strconv.Quote(name) + ":" + value
	if only {
		return text
	}
	return text + ","
}

// Asks reports whether a body asks for something about the routed experts by itself, by any of the names of a field. In doubt it does.
func Asks(body []byte, names []string) bool {
	members, ok := jsonscan.Object(body, nil)
	return slices.ContainsFunc(names, func(name string) bool {
		if !ok {
			// Engines read more than what is JSON by the letter.
			return bytes.Contains(body, []byte(name))
		}
		value := jsonscan.Get(body, members, name)
		return value != nil && string(value) != "false" && string(value) != "null"
	})
}
