// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/router/jsonscan"
)

// textMembersOfIDs and idMembers are the members of requests that can contain token ids, on any route: an engine may
// prefer them to another prompt. A text in the first ones is a prompt; in idMembers it can be the digits of an id.
var (
	textMembersOfIDs = []string{"prompt", "input", "query", "items"}
	idMembers        = []string{"input_ids", "token_ids"}
)

// instances is the member of a request that contains requests.
const instances = "instances"

// TokenOutside returns a token id in the prompts of a request that a vocabulary of the given size does not have. found
// is false if there is none. Numbers are compared as engines read them: 4e3, 4000.0 and, in lists of ids, "4000" are
// ids too.
func (b Body) TokenOutside(vocabulary int) (id string, found bool) {
	for _, name := range textMembersOfIDs {
		if id, found = idOutside(b.get(name), vocabulary, false); found {
			return id, true
		}
	}
	for _, name := range idMembers {
		if id, found = idOutside(b.get(name), vocabulary, true); found {
			return id, true
		}
	}
	list := b.get(instances)
	elements, _ := jsonscan.Array(list, nil)
	for _, at := range elements {
		element := ParseBody(list[at.Start:at.End])
		element.members = slices.DeleteFunc(element.members, func(m jsonscan.Member) bool { return string(m.Key) == instances })
		if id, found = element.TokenOutside(vocabulary); found {
			return id, true
		}
	}
	return "", false
}

// idOutside looks for an id outside of the vocabulary in nested lists. Objects end the search: engines reject them, or
// read no ids from them.
func idOutside(list []byte, vocabulary int, digits bool) (id string, found bool) {
	if len(list) == 0 || list[0] != '[' {
		return "", false
	}
	for i := 0; i < len(list); {
		switch c := list[i]; {
		case c >= '0' && c <= '9' || c == '-':
			end := i + 1
			for end < len(list) && !isDelimiter(list[end]) {
				end++
			}
			if outside(list[i:end], vocabulary) {
				return string(list[i:min(end, i+maxShownID)]), true
			}
			i = end
		case c == '"':
			end := endOfString(list, i)
			if digits && end-i > 2 && end-i < maxShownID && outside(list[i+1:end-1], vocabulary) {
				return string(list[i:end]), true
			}
			i = end
		case c == '{':
			return "", false
		default:
			i++
		}
	}
	return "", false
}

// maxShownID is the maximum length of an id in a message.
const maxShownID = 40

func isDelimiter(c byte) bool {
	return c == ',' || c == ']' || c == '[' || c == ' ' || c == '\t' || c == '\r' || c == '\n'
}

// endOfString returns the position after the JSON string that begins at i.
func endOfString(text []byte, i int) int {
	for i++; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(text)
}

// outside reports whether a number is not an id of the vocabulary. Text that is no number is none.
func outside(number []byte, vocabulary int) bool {
	value := 0
	for _, c := range number {
		if c < '0' || c > '9' || value > vocabulary {
			exact, err := strconv.ParseFloat(string(number[:min(len(number), maxParsedID)]), 64)
			return (err == nil || exact != 0) && (exact < 0 || exact >= float64(vocabulary))
		}
		value = value*10 + int(c-'0')
	}
	return value >= vocabulary
}

// maxParsedID is the maximum number of characters of an id that are parsed.
const maxParsedID = 400
