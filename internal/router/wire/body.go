package wire

import (
	"bytes"
	"strconv"

	"github.com/semmoe/operator/internal/jsonscan"
)

const (
	// BytesPerToken is a usual ratio for byte-pair tokenizers. It only balances load; a wrong ratio is wrong for all
	// requests alike.
	BytesPerToken = 4
	// defaultOutput is what a request without a limit is expected to generate.
	defaultOutput = 256
	// largestOutput bounds what a request can claim to generate, so that one request cannot make a rank look full for ever.
	largestOutput = 1 << 20
)

// Body is a request's body. What is of another type than expected counts as absent: it is the engine's to refuse.
type Body struct {
	data    []byte
	members []jsonscan.Member
}

// ParseBody finds the members of a body; what is no JSON object has none.
func ParseBody(data []byte) Body {
	members, ok := jsonscan.Object(data, nil)
	if !ok {
		return Body{}
	}
	return Body{data, members}
}

// get returns the value of a member; nil where there is none.
func (b Body) get(name string) []byte { return jsonscan.Get(b.data, b.members, name) }

// Output is how many tokens the request may generate, so many answers together.
func (b Body) Output(answers int64) int64 { return min(answers*b.limit(), largestOutput) }

// Usual is how many tokens an answer is expected to have at most, whatever its client allows: clients set limits generously. An unstreamed
// answer that is longer says so when it comes; a stream does not, and more is expected of it.
func (b Body) Usual() int64 {
	if string(b.get("stream")) == "true" {
		return 16384
	}
	return 4096
}

// Answers is how many answers the request gets, and how many of them each of its prompts has.
func (b Body) Answers(path string) (all, each int64) {
	each = 1
	for _, value := range [][]byte{b.get("n"), ParseBody(b.get("sampling_params")).get("n")} {
		if n, err := strconv.ParseInt(string(value), 10, 64); err == nil && n > 1 {
			each = min(each*min(n, largestOutput), largestOutput)
		}
	}
	return min(b.prompts(path)*each, largestOutput), each
}

// limit is how many tokens one answer may have.
func (b Body) limit() int64 {
	native := ParseBody(b.get("sampling_params"))
	for _, value := range [][]byte{b.get("max_tokens"), b.get("max_completion_tokens"), b.get("max_output_tokens"), native.get("max_new_tokens")} {
		if limit, err := strconv.ParseInt(string(value), 10, 64); err == nil && limit >= 0 {
			return min(limit, largestOutput)
		}
	}
	return defaultOutput
}

// prompts is how many prompts the request has: each element of a list is one, but of a list of token ids.
func (b Body) prompts(path string) int64 {
	var list []byte
	switch path {
	case "/v1/completions":
		list = b.get("prompt")
	case "/generate":
		if list = b.get("text"); len(list) == 0 || list[0] != '[' {
			list = b.get("input_ids")
		}
	}
	if len(list) == 0 || list[0] != '[' {
		return 1
	}
	if first := bytes.TrimLeft(list[1:], " \t\r\n"); first[0] != '"' && first[0] != '[' {
		return 1
	}
	elements, _ := jsonscan.Array(list, nil)
	return int64(len(elements))
}
