package profile

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
)

// maxLine bounds a line of a data set: longer ones are a sign that the file is not JSONL.
const maxLine = 16 << 20

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Item is one request of a data set: a prompt, or a conversation.
type Item struct {
	// Line is its line in the file, from 1: requests of one line are one document.
	Line int
	// Prompt is set, or Messages are.
	Prompt   string
	Messages []Message
	// Domain names the kind of text; it may be empty.
	Domain string
}

// DatasetError is a fault of a data set: it stays until somebody mends the file.
type DatasetError struct{ message string }

func (e *DatasetError) Error() string { return e.message }

func datasetErrorf(format string, args ...any) error {
	return &DatasetError{fmt.Sprintf(format, args...)}
}

// ReadDataset reads JSONL and keeps a uniform sample of at most limit of its items, chosen by the seed, in the order of
// the file. Each line is {"prompt": "..."}, {"messages": [{"role", "content"}, ...]} or ShareGPT's {"conversations":
// [{"from", "value"}, ...]}, with an optional "domain"; blank lines are passed over.
func ReadDataset(r io.Reader, limit int, seed uint64) ([]Item, error) {
	if limit < 1 {
		return nil, fmt.Errorf("%d requests; at least 1 is needed", limit)
	}
	random := rand.New(rand.NewPCG(seed, 0x64617461))
	var kept []Item
	seen := 0
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	line := 0
	for lines.Scan() {
		line++
		text := bytes.TrimSpace(lines.Bytes())
		if len(text) == 0 {
			continue
		}
		item, err := parseItem(text, line)
		if err != nil {
			return nil, err
		}
		seen++
		if len(kept) < limit {
			kept = append(kept, item)
		} else if i := random.IntN(seen); i < limit {
			kept[i] = item
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return nil, datasetErrorf("line %d is longer than %d bytes: each line must be one JSON object", line+1, maxLine)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(kept) == 0 {
		return nil, datasetErrorf("the data set is empty")
	}
	slices.SortFunc(kept, func(a, b Item) int { return a.Line - b.Line })
	return kept, nil
}

func parseItem(text []byte, line int) (Item, error) {
	var fields struct {
		Prompt        *string   `json:"prompt"`
		Messages      []Message `json:"messages"`
		Conversations []struct {
			From  string `json:"from"`
			Value string `json:"value"`
		} `json:"conversations"`
		Domain string `json:"domain"`
	}
	if err := json.Unmarshal(text, &fields); err != nil {
		return Item{}, datasetErrorf("line %d is not a JSON object of the known form: %v", line, err)
	}
	item := Item{Line: line, Domain: fields.Domain}
	for _, turn := range fields.Conversations {
		item.Messages = append(item.Messages, Message{Role: role(turn.From), Content: turn.Value})
	}
	switch {
	case fields.Prompt != nil && fields.Messages == nil && fields.Conversations == nil:
		item.Prompt = *fields.Prompt
		if item.Prompt == "" {
			return Item{}, datasetErrorf("line %d: prompt is empty", line)
		}
	case fields.Messages != nil && fields.Prompt == nil && fields.Conversations == nil:
		item.Messages = fields.Messages
	case fields.Conversations != nil && fields.Prompt == nil && fields.Messages == nil:
	default:
		return Item{}, datasetErrorf("line %d has none, or more than one, of prompt, messages and conversations: want exactly one", line)
	}
	if item.Prompt == "" && len(item.Messages) == 0 {
		return Item{}, datasetErrorf("line %d: the conversation is empty", line)
	}
	for i, message := range item.Messages {
		if message.Role == "" {
			return Item{}, datasetErrorf("line %d: message %d has no role", line, i+1)
		}
	}
	return item, nil
}

// role translates ShareGPT's names.
func role(from string) string {
	switch from {
	case "human":
		return "user"
	case "gpt":
		return "assistant"
	}
	return from
}
