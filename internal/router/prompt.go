package router

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"unicode/utf8"
)

const (
	// scoredTokens bounds the part of a prompt that is scored: what a prompt is about shows in its beginning, and a prompt
	// of any length costs a bounded time.
	scoredTokens = 32 << 10
	// scoredBytes bounds the text that is tokenized for that.
	scoredBytes = scoredTokens * bytesPerToken
)

// prompt is the beginning of what a request gives the model to read: texts to be tokenized one by one, or token ids.
type prompt struct {
	texts []string
	ids   []int32
	// more is the number of tokens beyond the bound: counted for ids, estimated for texts.
	more int
}

func (p *prompt) empty() bool { return len(p.texts) == 0 && len(p.ids) == 0 }

// add appends a text as far as the bound allows.
func (p *prompt) add(text string, used *int) {
	cut := min(len(text), scoredBytes-*used)
	for cut > 0 && cut < len(text) && !utf8.RuneStart(text[cut]) {
		cut--
	}
	p.more += (len(text) - cut) / bytesPerToken
	*used += cut
	if cut > 0 {
		p.texts = append(p.texts, text[:cut])
	}
}

func promptOfTexts(texts []string) prompt {
	var p prompt
	used := 0
	for _, text := range texts {
		p.add(text, &used)
	}
	return p
}

// promptOf is the prompt in the body of an inference route; it is empty where its tokens cannot be told.
func promptOf(path string, b *body) prompt {
	switch path {
	case "/v1/completions":
		return promptOfValue(b.Prompt)
	case "/v1/chat/completions":
		return promptOfTexts(messageTexts(b.Messages))
	case "/generate":
		if p := promptOfValue(b.Text); !p.empty() {
			return p
		}
		return promptOfValue(b.InputIDs)
	}
	return prompt{}
}

// promptOfValue reads a string, a list of strings, a list of token ids, or a list of such lists.
func promptOfValue(value json.RawMessage) prompt {
	if len(value) == 0 {
		return prompt{}
	}
	if value[0] == '"' {
		var text string
		if json.Unmarshal(value, &text) != nil {
			return prompt{}
		}
		return promptOfTexts([]string{text})
	}
	if value[0] != '[' {
		return prompt{}
	}
	if first := bytes.TrimLeft(value, "[ \t\r\n"); len(first) > 0 && first[0] == '"' {
		var texts []string
		if json.Unmarshal(value, &texts) != nil {
			return prompt{}
		}
		return promptOfTexts(texts)
	}
	return promptOfIDs(value)
}

// promptOfIDs reads the numbers of JSON lists, however nested. Anything that is no token id makes the prompt empty. It
// is written out because decoding by reflection takes longer than all the rest for a long prompt.
func promptOfIDs(value []byte) prompt {
	var p prompt
	for i := 0; i < len(value); {
		switch c := value[i]; {
		case c >= '0' && c <= '9':
			id := int64(0)
			for ; i < len(value) && value[i] >= '0' && value[i] <= '9'; i++ {
				if id = id*10 + int64(value[i]-'0'); id > math.MaxInt32 {
					return prompt{}
				}
			}
			if len(p.ids) < scoredTokens {
				p.ids = append(p.ids, int32(id))
			} else {
				p.more++
			}
		case strings.IndexByte("[], \t\r\n", c) >= 0:
			i++
		default:
			return prompt{}
		}
	}
	return p
}

// messageTexts are the texts of chat messages. The chat template's own text is left out: it is the same for all
// requests, so it would not tell one rank from another.
func messageTexts(messages json.RawMessage) []string {
	var list []struct {
		Content json.RawMessage `json:"content"`
	}
	if json.Unmarshal(messages, &list) != nil {
		return nil
	}
	var texts []string
	for _, message := range list {
		var text string
		if json.Unmarshal(message.Content, &text) == nil {
			texts = append(texts, text)
			continue
		}
		var parts []struct {
			Text string `json:"text"`
		}
		if json.Unmarshal(message.Content, &parts) != nil {
			continue
		}
		for _, part := range parts {
			texts = append(texts, part.Text)
		}
	}
	return texts
}
