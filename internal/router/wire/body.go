// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"strconv"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/jsonscan"
)

const (
	// BytesPerToken is a typical ratio for byte-pair tokenizers. It is used for load balancing only, where an error
	// affects all requests equally.
	BytesPerToken = 4
	// defaultOutput is the expected number of generated tokens of a request without a limit.
	defaultOutput = 256
	// maxOutput bounds the number of generated tokens that a request can claim, so that one request cannot make a
	// rank look permanently full.
	maxOutput = 1 << 20
)

// Body is a parsed request body, or an object in it. One scan finds all members, because a body can be long. A member of
// an unexpected type counts as absent: the engine validates the request.
type Body struct {
	data    []byte
	members []jsonscan.Member
	// object is true for a JSON object, empty for an object without members.
	object, empty bool
}

// usualMembers is the initial capacity for the members of an object.
const usualMembers = 8

// ParseBody finds the members of a body. A body that is not a JSON object has none.
func ParseBody(data []byte) Body {
	if begin := bytes.TrimLeft(data, " \t\r\n"); len(begin) == 0 || begin[0] != '{' {
		return Body{data: data}
	}
	members, ok := jsonscan.Object(data, make([]jsonscan.Member, 0, usualMembers))
	if !ok {
		return Body{data: data}
	}
	return Body{data, members, true, len(members) == 0}
}

// Bytes returns the JSON text.
func (b Body) Bytes() []byte { return b.data }

// IsObject reports whether the body is one JSON object.
func (b Body) IsObject() bool { return b.object }

// IsJSON reports whether the body is one JSON object or array.
func (b Body) IsJSON() bool {
	if b.object {
		return true
	}
	_, array := jsonscan.Array(b.data, nil)
	return array
}

// Only returns the body with only the members of these names. The others stay in the text, but can no longer be found: a
// body of many short members takes several times its size while its members are kept.
func (b Body) Only(names []string) Body {
	all := b.members
	b.members = nil
	for _, name := range names {
		for i := len(all) - 1; i >= 0; i-- {
			if string(all[i].Key) == name {
				b.members = append(b.members, all[i])
				break
			}
		}
	}
	return b
}

// Has reports whether an object has a member.
func (b Body) Has(name string) bool { return b.get(name) != nil }

// get returns the value of a member; nil if there is none.
func (b Body) get(name string) []byte { return jsonscan.Get(b.data, b.members, name) }

// Output returns the maximum number of tokens that the request may generate in all answers.
func (b Body) Output(answers int64) int64 { return min(answers*b.limit(), maxOutput) }

// ExpectedAnswerTokens returns the expected maximum number of tokens of an answer. It ignores the client's limit, which
// is often generous. A longer unstreamed response declares its length; a stream does not, so the value for streams is
// larger.
func (b Body) ExpectedAnswerTokens() int64 {
	if string(b.get("stream")) == "true" {
		return 16384
	}
	return 4096
}

// Answers returns the number of answers to the request, and the number of answers per prompt.
func (b Body) Answers(path string) (all, each int64) {
	each = 1
	for _, value := range [][]byte{b.get("n"), ParseBody(b.get("sampling_params")).get("n")} {
		if n, err := strconv.ParseInt(string(value), 10, 64); err == nil && n > 1 {
			each = min(each*min(n, maxOutput), maxOutput)
		}
	}
	return min(b.prompts(path)*each, maxOutput), each
}

// limit returns the maximum number of tokens of one answer.
func (b Body) limit() int64 {
	native := ParseBody(b.get("sampling_params"))
	for _, value := range [][]byte{
		b.get("max_tokens"), b.get("max_completion_tokens"), b.get("max_output_tokens"), native.get("max_new_tokens"), native.get("max_tokens"),
		ParseBody(b.get("options")).get("num_predict"), ParseBody(ParseBody(b.get("parameters")).get("sampling_params")).get("max_new_tokens"),
	} {
		if limit, err := strconv.ParseInt(string(value), 10, 64); err == nil && limit >= 0 {
			return min(limit, maxOutput)
		}
	}
	return defaultOutput
}

// prompts returns the number of prompts of the request. A list has one prompt per element, except a list of token ids.
func (b Body) prompts(path string) int64 {
	api := engine.APIOf(path)
	if api.Form != engine.Texts || api.Limit == "" {
		return 1
	}
	for _, name := range api.Prompt {
		list := b.get(name)
		if len(list) == 0 || list[0] != '[' {
			continue
		}
		if first := bytes.TrimLeft(list[1:], " \t\r\n"); first[0] == '"' || first[0] == '[' {
			elements, _ := jsonscan.Array(list, nil)
			return int64(len(elements))
		}
	}
	return 1
}
