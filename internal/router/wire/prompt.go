package wire

import (
	"bytes"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/semmoe/operator/internal/jsonscan"
)

const (
	// ReadTokens bounds the beginning of a prompt that is looked at, so that a prompt of any length costs a bounded time, and
	// readBytes the text that is tokenized for that.
	ReadTokens = 128 << 10
	readBytes  = ReadTokens * BytesPerToken
)

// Prompt is the beginning of what a request gives the model to read: texts to be tokenized one by one, or token ids.
type Prompt struct {
	Texts []string
	IDs   []int32
	// More is the number of tokens beyond the bound: counted for ids, estimated for texts.
	More int
	// Nested tells that ids were read from a list of lists: there may be several prompts.
	Nested bool
}

// Empty tells that nothing could be read.
func (p *Prompt) Empty() bool { return len(p.Texts) == 0 && len(p.IDs) == 0 }

// add appends a text as far as the bound allows.
func (p *Prompt) add(text string, used *int) {
	cut := min(len(text), readBytes-*used)
	for cut > 0 && cut < len(text) && !utf8.RuneStart(text[cut]) {
		cut--
	}
	p.More += (len(text) - cut) / BytesPerToken
	*used += cut
	if cut > 0 {
		p.Texts = append(p.Texts, text[:cut])
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

// PromptOf is the prompt in the body of an inference route; it is empty where its tokens cannot be told.
func PromptOf(path string, b Body) Prompt {
	switch path {
	case "/v1/completions":
		return promptOfValue(b.get("prompt"))
	case "/v1/chat/completions":
		return promptOfTexts(messageTexts(b.get("messages")))
	case "/generate":
		if p := promptOfValue(b.get("text")); !p.Empty() {
			return p
		}
		return promptOfValue(b.get("input_ids"))
	}
	return Prompt{}
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

// stringsIn are the elements of a list of strings; nil where one of them is something else.
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

// PromptOfIDs reads the numbers of JSON lists, however nested. Anything that is no token id makes the prompt empty. It
// is written out because decoding by reflection takes longer than all the rest for a long prompt.
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

// messageTexts are the texts of chat messages. The chat template's own text is left out: it is the same for all
// requests, so it would not tell one rank from another.
func messageTexts(messages []byte) []string {
	list, _ := jsonscan.Array(messages, nil)
	var texts []string
	for _, at := range list {
		content := ParseBody(messages[at.Start:at.End]).get("content")
		if text, ok := jsonscan.String(content); ok {
			texts = append(texts, text)
			continue
		}
		parts, _ := jsonscan.Array(content, nil)
		for _, part := range parts {
			if text, ok := jsonscan.String(ParseBody(content[part.Start:part.End]).get("text")); ok {
				texts = append(texts, text)
			}
		}
	}
	return texts
}
