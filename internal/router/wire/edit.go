// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/router/jsonscan"
)

// CutMembers removes the members at a path from JSON, in every element of the arrays on the path. All other bytes stay.
// If the removal leaves an object empty that is itself a member, the object is removed too. values is nil if there is
// no such member or data is not JSON. The values are parts of data and are not copied, because they can be large.
func CutMembers(data []byte, path []string) (values []json.RawMessage, rest []byte) {
	return editMembers(data, path, nil)
}

// NullMembers sets the members at a path to null, and is otherwise like CutMembers.
func NullMembers(data []byte, path []string) (values []json.RawMessage, rest []byte) {
	return editMembers(data, path, []byte("null"))
}

// editMembers replaces the values of the members at a path, or removes these members if with is empty.
func editMembers(data []byte, path []string, with []byte) (values []json.RawMessage, rest []byte) {
	if isArray(data) {
		return editInElements(data, path, with)
	}
	start, valueStart, end, only, ok := findMember(data, path[0])
	if !ok {
		return nil, data
	}
	member := data[valueStart:end]
	switch {
	case len(path) == 1 && len(with) > 0:
		return []json.RawMessage{member}, splice(data, valueStart, end, with)
	case len(path) == 1:
		return []json.RawMessage{member}, cutRange(data, start, end, only)
	}
	values, inner := editMembers(member, path[1:], with)
	if values == nil {
		return nil, data
	}
	if left, ok := jsonscan.Object(inner, nil); !ok || len(left) > 0 {
		return values, splice(data, valueStart, end, inner)
	}
	return values, cutRange(data, start, end, only)
}

// editInElements applies editMembers to each element of an array. The values are in the order of the elements.
func editInElements(data []byte, path []string, with []byte) (values []json.RawMessage, rest []byte) {
	elements, ok := jsonscan.Array(data, nil)
	if !ok {
		return nil, data
	}
	copied := 0
	for _, at := range elements {
		found, inner := editMembers(data[at.Start:at.End], path, with)
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

// findMember finds a member of the outermost object. It returns the start of its key, the start and the end of its
// value, and whether it is the only member.
func findMember(data []byte, name string) (start, valueStart, end int, only, found bool) {
	members, ok := jsonscan.Object(data, nil)
	at := slices.IndexFunc(members, func(m jsonscan.Member) bool { return string(m.Key) == name })
	if !ok || at < 0 {
		return 0, 0, 0, false, false
	}
	m := members[at]
	return m.At, m.Start, m.End, len(members) == 1, true
}

// cutRange removes a member and the comma next to it.
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

// isArray reports whether a JSON text is an array. The text must be valid JSON.
func isArray(data []byte) bool { return bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte{'['}) }

func splice(data []byte, start, end int, with []byte) []byte {
	out := make([]byte, 0, len(data)-(end-start)+len(with))
	out = append(out, data[:start]...)
	out = append(out, with...)
	return append(out, data[end:]...)
}

// Addition is a member that is added to a body: its name, and its value as JSON.
type Addition struct{ Name, Value string }

// With prepends members to a JSON object. It returns a short head and the rest, which is a part of the body. It returns
// a body that is not an object unchanged.
func (b Body) With(additions ...Addition) (head string, rest []byte) {
	if !b.object || len(additions) == 0 {
		return "", b.data
	}
	var text strings.Builder
	for i, a := range additions {
		text.WriteByte("{,"[min(i, 1)])
		text.WriteString(strconv.Quote(a.Name) + ":" + a.Value)
	}
	if !b.empty {
		text.WriteByte(',')
	}
	return text.String(), b.data[bytes.IndexByte(b.data, '{')+1:]
}

// RequestsAny reports whether a body requests routed experts by any of the field names. In doubt it returns true.
func (b Body) RequestsAny(names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		if !b.object {
			// Engines accept more than strict JSON.
			return bytes.Contains(b.data, []byte(name))
		}
		value := b.get(name)
		return value != nil && string(value) != "false" && string(value) != "null"
	})
}
