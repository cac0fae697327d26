// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/jsonscan"
)

const (
	// ReadTokens is the maximum number of tokens read from the start of a prompt. It bounds the cost of prompts of any
	// length. readBytes is the corresponding maximum number of bytes to tokenize.
	ReadTokens = 128 << 10
	readBytes  = ReadTokens * BytesPerToken
	// MediaTokens is the assumed number of tokens of a part that is not text, about the size of an image for common
	// models. The size of the part in bytes does not determine it.
	MediaTokens = 1024
)

// mediaMembers are the body members with images, videos or audio: a single value, the values of one prompt, or lists
// for several prompts. embedMembers contain encoder outputs.
var (
	mediaMembers = []string{"image_data", "video_data", "audio_data"}
	embedMembers = []string{"input_embeds", "prompt_embeds"}
)

// toolMembers are the body members that define the tools: the current one and its predecessor.
var toolMembers = []string{"tools", "functions"}

// textMembers are the members of a message part that contain text.
var textMembers = []string{"text", "refusal", "thinking"}

// Prompt is the start of the prompt of a request: texts to be tokenized one by one, or token ids.
type Prompt struct {
	Texts []string
	IDs   []int32
	// More is the number of tokens beyond the bound: exact for ids, estimated for texts.
	More int
	// Nested is true if the ids were read from a list of lists, which may contain several prompts.
	Nested bool
	// Media counts the parts that are not text.
	Media Media
	// Tools is the JSON text of the tools, up to the bound. Chat templates render the tools before the messages, in
	// their own format.
	Tools string
}

// Media counts parts of a prompt that are not text, and their bytes.
type Media struct{ Parts, Bytes int }

// Tokens returns the assumed number of tokens of the parts.
func (m Media) Tokens() int64 { return int64(m.Parts) * MediaTokens }

func (m *Media) add(part []byte) {
	m.Parts++
	m.Bytes += len(part)
}

// addLists adds a value, or the elements of lists nested up to depth.
func (m *Media) addLists(value []byte, depth int) {
	elements, ok := jsonscan.Array(value, nil)
	switch {
	case len(value) == 0 || string(value) == "null":
	case !ok || depth == 0:
		m.add(value)
	default:
		for _, at := range elements {
			m.addLists(value[at.Start:at.End], depth-1)
		}
	}
}

// addTools appends a list of tools, up to the bound.
func (p *Prompt) addTools(list []byte) {
	if tools, _ := jsonscan.Array(list, nil); len(tools) == 0 {
		return
	}
	cut := min(len(list), readBytes-len(p.Tools))
	p.Tools += string(list[:cut])
	p.More += (len(list) - cut) / BytesPerToken
}

// AllTexts returns the tools and the texts in the order in which the model reads them.
func (p *Prompt) AllTexts() []string {
	if p.Tools == "" {
		return p.Texts
	}
	return append([]string{p.Tools}, p.Texts...)
}

// Empty reports whether the prompt has neither texts nor ids.
func (p *Prompt) Empty() bool { return len(p.Texts) == 0 && len(p.IDs) == 0 }

// add appends a text, up to the bound.
func (p *Prompt) add(text string, used *int) {
	cut := min(len(text), readBytes-*used)
	for cut > 0 && cut < len(text) && !utf8.RuneStart(text[cut]) {
		cut--
	}
	p.More += (len(text) - cut) / BytesPerToken
	*used += cut
	if cut > 0 {
		if cut < len(text) {
			text = strings.Clone(text[:cut]) // release the rest of the text
		}
		p.Texts = append(p.Texts, text)
	}
}

func promptOfTexts(texts []string) Prompt {
	var p Prompt
	used := 0
	for _, text := range texts {
		p.add(text, &used)
	}
	return p
}

// PromptOf returns the prompt in the body of an inference route. It is empty if the tokens cannot be determined.
func PromptOf(path string, b Body) Prompt {
	var p Prompt
	switch api := engine.APIOf(path); api.Form {
	case engine.Texts:
		p = promptOfMembers(b, api.Prompt)
	case engine.Blocks:
		p = promptOfBlocks(b, api.Prompt[0], api.Prompt[1])
	default:
		return p
	}
	for _, name := range mediaMembers {
		p.Media.addLists(b.get(name), 2)
	}
	for _, name := range embedMembers {
		p.Media.addLists(b.get(name), 0)
	}
	return p
}

// MediaOf returns the media of the prompt in a body. It does not decode a prompt that is one string.
func MediaOf(path string, b Body) Media {
	b.members = slices.DeleteFunc(slices.Clone(b.members), func(m jsonscan.Member) bool {
		return b.data[m.Start] == '"' && !slices.Contains(mediaMembers, string(m.Key)) && !slices.Contains(embedMembers, string(m.Key))
	})
	return PromptOf(path, b).Media
}

// chatMember is the member with chat messages, or with lists of them.
const chatMember = "messages"

// promptOfMembers reads the texts of the members, in order, or the token ids of the first one if no member has texts.
func promptOfMembers(b Body, members []string) Prompt {
	var p, ids Prompt
	var texts []string
	more := 0
	for _, name := range members {
		value := b.get(name)
		if name == chatMember {
			texts, p.Media = messageParts(value, 1)
			for _, tools := range toolMembers {
				p.addTools(b.get(tools))
			}
			continue
		}
		if read := promptOfValue(value); len(read.Texts) > 0 {
			texts, more = append(texts, read.Texts...), more+read.More
		} else if ids.Empty() {
			ids = read
		}
	}
	used := 0
	for _, text := range texts {
		p.add(text, &used)
	}
	p.More += more
	if len(texts) == 0 {
		p.IDs, p.More, p.Nested = ids.IDs, p.More+ids.More, ids.Nested
	}
	return p
}

// promptOfValue reads a string, a list of strings, a list of token ids, or a list of such lists.
func promptOfValue(value []byte) Prompt {
	if text, ok := jsonscan.String(value); ok {
		return promptOfTexts([]string{text})
	}
	if len(value) == 0 || value[0] != '[' {
		return Prompt{}
	}
	if first := bytes.TrimLeft(value, "[ \t\r\n"); len(first) > 0 && first[0] == '"' {
		return promptOfTexts(stringsIn(value))
	}
	return PromptOfIDs(value)
}

// stringsIn returns the elements of a list of strings; nil if an element is not a string.
func stringsIn(list []byte) []string {
	elements, _ := jsonscan.Array(list, nil)
	texts := make([]string, len(elements))
	for i, at := range elements {
		var ok bool
		if texts[i], ok = jsonscan.String(list[at.Start:at.End]); !ok {
			return nil
		}
	}
	return texts
}

// PromptOfIDs reads the numbers of nested JSON lists. Any value that is not a token id makes the prompt empty. The
// parser is written by hand because decoding by reflection dominates the cost of a long prompt.
func PromptOfIDs(value []byte) Prompt {
	var p Prompt
	for i := 0; i < len(value); {
		switch c := value[i]; {
		case c >= '0' && c <= '9':
			id := int64(0)
			for ; i < len(value) && value[i] >= '0' && value[i] <= '9'; i++ {
				if id = id*10 + int64(value[i]-'0'); id > math.MaxInt32 {
					return Prompt{}
				}
			}
			if len(p.IDs) < ReadTokens {
				p.IDs = append(p.IDs, int32(id))
			} else {
				p.More++
			}
		case strings.IndexByte("[], \t\r\n", c) >= 0:
			p.Nested = p.Nested || c == '[' && i > 0
			i++
		default:
			return Prompt{}
		}
	}
	return p
}

// messageParts returns the texts of chat messages and their tool calls, and counts their media. With depth 1, the list
// may also contain lists of messages. It omits the text of
// the chat template: it is the same in all requests and does not distinguish ranks.
func messageParts(messages []byte, depth int) (texts []string, media Media) {
	list, _ := jsonscan.Array(messages, nil)
	for _, at := range list {
		message := ParseBody(messages[at.Start:at.End])
		if !message.object { // one conversation of a batch
			if depth > 0 {
				more, parts := messageParts(message.data, depth-1)
				texts = append(texts, more...)
				media.Parts, media.Bytes = media.Parts+parts.Parts, media.Bytes+parts.Bytes
			}
			continue
		}
		texts = message.appendContent(texts, &media)
		texts = message.appendCalls(texts)
	}
	return texts, media
}

// appendContent appends the texts of the content of a message, and adds its other parts to media.
func (b Body) appendContent(texts []string, media *Media) []string {
	content := b.get("content")
	if text, ok := jsonscan.String(content); ok {
		return append(texts, text)
	}
	parts, _ := jsonscan.Array(content, nil)
	for _, at := range parts {
		part := content[at.Start:at.End]
		body := ParseBody(part)
		if text, ok := jsonscan.String(body.get("text")); ok {
			texts = append(texts, text)
		} else if body.isMedia() {
			media.add(part)
		}
	}
	return texts
}

// appendCalls appends the names and arguments of the tool calls of a message, which chat templates render into the
// prompt.
func (b Body) appendCalls(texts []string) []string {
	calls := b.get("tool_calls")
	list, _ := jsonscan.Array(calls, nil)
	functions := [][]byte{b.get("function_call")} // the predecessor of tool_calls
	for _, at := range list {
		functions = append(functions, ParseBody(calls[at.Start:at.End]).get("function"))
	}
	for _, function := range functions {
		called := ParseBody(function)
		for _, value := range [][]byte{called.get("name"), called.get("arguments")} {
			if text := callText(value); text != "" {
				texts = append(texts, text)
			}
		}
	}
	return texts
}

// callText returns the name or the arguments of a tool call. Arguments are a string, or an object that is returned as
// JSON.
func callText(value []byte) string {
	if text, ok := jsonscan.String(value); ok {
		return text
	}
	if string(value) == "null" {
		return ""
	}
	return strings.ToValidUTF8(string(value), "\uFFFD")
}

// isMedia reports whether a message part is not text.
func (b Body) isMedia() bool {
	return len(b.members) > 0 && !slices.ContainsFunc(textMembers, func(name string) bool { return b.get(name) != nil })
}
