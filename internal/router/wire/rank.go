// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/jsonscan"
)

// nested are the members of a request that contain members which may choose a rank: containers of engine options. Other
// members hold content, such as messages and tool schemas, which may mention a rank for another purpose.
var nested = map[string]bool{
	"sampling_params": true, "extra_body": true, "extra_args": true, "vllm_xargs": true, "kv_transfer_params": true, "nvext": true,
	"requests": true, "parameters": true,
}

// DropRank overwrites with spaces, in place, each member of the body that chooses a rank (engine.NamesRank): of the
// object, of the objects of an array, and of nested options. It reports whether there was one.
func (b *Body) DropRank() (dropped bool) {
	if !b.object {
		elements, _ := jsonscan.Array(b.data, nil)
		for _, at := range elements {
			element := ParseBody(b.data[at.Start:at.End])
			dropped = element.DropRank() || dropped
		}
		return dropped
	}
	kept := b.members[:0]
	for i, m := range b.members {
		switch key := string(m.Key); {
		case !engine.NamesRank(key):
			if nested[key] {
				options := ParseBody(b.data[m.Start:m.End])
				dropped = options.DropRank() || dropped
			}
			kept = append(kept, m)
			continue
		case i+1 < len(b.members):
			blank(b.data[m.At:b.members[i+1].At])
		case len(kept) > 0:
			blank(b.data[kept[len(kept)-1].End:m.End]) // with the comma
		default:
			blank(b.data[m.At:m.End])
		}
		dropped = true
	}
	b.members, b.empty = kept, len(kept) == 0
	return dropped
}

func blank(data []byte) {
	for i := range data {
		data[i] = ' '
	}
}

// MayChooseRank reports whether a body that is not strict JSON could choose a rank: some engines also read NaN, UTF-16
// and UTF-32, and forms. In doubt it returns true, also for the extended parameter name* of a part of a form (RFC 2231),
// which can spell a name in pieces.
func MayChooseRank(body []byte) bool {
	const keep = len("data_parallel_rank")
	tail := make([]byte, 0, 4*keep) // the latest characters, in lower case and unescaped
	for _, c := range body {
		if c == 0 { // part of an ASCII character in UTF-16 or UTF-32
			continue
		}
		if len(tail) == cap(tail) {
			tail = append(tail[:0], tail[len(tail)-keep:]...)
		}
		tail = unescapeLast(append(tail, c))
		last := &tail[len(tail)-1]
		if *last >= 'A' && *last <= 'Z' {
			*last += 'a' - 'A'
		}
		switch {
		case *last == 'k' && (bytes.HasSuffix(tail, []byte("dp_rank")) || bytes.HasSuffix(tail, []byte("data_parallel_rank"))):
			return true
		case *last == '*' && (bytes.HasSuffix(tail, []byte(" name*")) || bytes.HasSuffix(tail, []byte(";name*"))):
			return true
		}
	}
	return false
}

// unescapeLast replaces a trailing escape sequence of an ASCII character with the character: \u0000 of JSON, %00 of
// forms, and \c of quoted strings.
func unescapeLast(text []byte) []byte {
	n := len(text)
	switch {
	case n >= 6 && text[n-6] == '\\' && string(text[n-5:n-2]) == "u00":
		return unescapeHex(text, n-6)
	case n >= 3 && text[n-3] == '%':
		return unescapeHex(text, n-3)
	case n >= 2 && text[n-2] == '\\' && text[n-1] != '\\' && text[n-1] != 'u':
		text[n-2] = text[n-1]
		return text[:n-1]
	}
	return text
}

// unescapeHex replaces the text from at on, which ends with the hexadecimal code of a character, with the character.
func unescapeHex(text []byte, at int) []byte {
	code, err := strconv.ParseUint(string(text[len(text)-2:]), 16, 8)
	if err != nil || code == 0 {
		return text
	}
	return append(text[:at], byte(code))
}

// Compressed reports whether a request header declares a compressed body, in any of its lines. SGLang accepts both
// headers.
func Compressed(header http.Header) bool {
	return slices.ContainsFunc(header["Content-Encoding"], func(encoding string) bool { return encoding != "" && !strings.EqualFold(encoding, "identity") }) ||
		slices.ContainsFunc(header["X-Body-Compressed"], func(compressed string) bool { return compressed != "" })
}
