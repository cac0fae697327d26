// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

type chatRequest struct {
	openAIRequest
	Messages            []chatMessage `json:"messages"`
	MaxCompletionTokens *int          `json:"max_completion_tokens"`
	Logprobs            bool          `json:"logprobs"`
	TopLogprobs         int           `json:"top_logprobs"`
}

// chatMessage is a message of a conversation. Content is nil if it is absent or null, as next to the tool calls of an
// assistant.
type chatMessage struct {
	Role    string       `json:"role"`
	Content *chatContent `json:"content"`
}

// textMessage returns a message with a text.
func textMessage(role, content string) chatMessage {
	c := chatContent(content)
	return chatMessage{role, &c}
}

// chatContent is a string or a list of text parts.
type chatContent string

func (c *chatContent) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*c = chatContent(one)
		return nil
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(text, &parts); err != nil {
		return errors.New("the content of a message must be a string or a list of parts")
	}
	for _, part := range parts {
		if part.Type != "text" {
			return badRequest("messages", "a message has content of type %q; this engine reads text only", part.Type)
		}
		*c += chatContent(part.Text)
	}
	return nil
}

var chatRoles = []string{"system", "developer", "user", "assistant", "tool"}

// renderChat formats a conversation as plain text that the assistant continues. The models of this engine have no chat
// template. Like SGLang, it accepts messages without content from all roles but user, and reads no tool calls
// (ChatCompletionMessageGenericParam in openai/protocol.py, content is None in openai/serving_chat.py).
func renderChat(messages []chatMessage) (string, error) {
	if len(messages) == 0 {
		return "", badRequest("messages", "messages is empty; give at least one message")
	}
	var text strings.Builder
	for i, m := range messages {
		if !slices.Contains(chatRoles, m.Role) {
			return "", badRequest("messages", "message %d has role %q; allowed are %s", i, m.Role, strings.Join(chatRoles, ", "))
		}
		if m.Content == nil && m.Role == "user" {
			return "", invalid("messages", "message %d has no content", i)
		}
		if text.WriteString(m.Role + ": "); m.Content != nil {
			text.WriteString(string(*m.Content))
		}
		text.WriteByte('\n')
	}
	return text.String() + "assistant:", nil
}

type chatAnswer struct {
	Index        int      `json:"index"`
	Message      chatText `json:"message"`
	Logprobs     any      `json:"logprobs"`
	FinishReason any      `json:"finish_reason"`
	MatchedStop  any      `json:"matched_stop"`
}

type chatText struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

type chatChunk struct {
	Index        int       `json:"index"`
	Delta        chatDelta `json:"delta"`
	Logprobs     any       `json:"logprobs"`
	FinishReason any       `json:"finish_reason"`
	MatchedStop  any       `json:"matched_stop"`
}

type chatDelta struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

func (e *Engine) chatCompletions(w http.ResponseWriter, r *http.Request) error {
	var req chatRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := e.checkModel(req.Model); err != nil {
		return err
	}
	if req.Logprobs || req.TopLogprobs != 0 {
		return badRequest("logprobs", "logprobs are not supported on this route; use /v1/completions or /generate")
	}
	if req.Messages == nil {
		return invalid("messages", "messages is empty; give at least one message")
	}
	prompt, err := renderChat(req.Messages)
	if err != nil {
		return err
	}
	req.maxTokens, req.maxTokensName, req.defaultMaxTokens = req.MaxTokens, "max_tokens", e.ContextLength
	if req.MaxCompletionTokens != nil {
		req.maxTokens, req.maxTokensName = req.MaxCompletionTokens, "max_completion_tokens"
	}
	j, err := e.prepare(r, e.Tokenizer.Encode(prompt), req.parameters)
	if err != nil {
		return err
	}
	return e.answer(w, r, req.openAIRequest, j, chatFormat)
}

var chatFormat = format{
	idPrefix: "chatcmpl-", object: "chat.completion", chunkObject: "chat.completion.chunk",
	first: func() any {
		empty := ""
		return chatChunk{Delta: chatDelta{Role: "assistant", Content: &empty}}
	},
	choice: func(_ *generation, text string, _ []scheduler.Token, end *outcome) any {
		reason, matched := finishReason(end)
		return chatAnswer{Message: chatText{Role: "assistant", Content: text}, FinishReason: reason, MatchedStop: matched}
	},
	chunk: func(_ *generation, text string, _ *scheduler.Token, end *outcome) any {
		reason, matched := finishReason(end)
		chunk := chatChunk{FinishReason: reason, MatchedStop: matched}
		if text != "" {
			chunk.Delta.Content = &text
		}
		return chunk
	},
}
