// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"slices"
	"syscall"

	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// maxLine bounds a line of a data set, in bytes. A longer line indicates a file that is not JSONL.
const maxLine = 16 << 20

// maxDomains is the maximum number of domains in a routing trace.
const maxDomains = 256

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Item is one request of a data set: a prompt, or a conversation.
type Item struct {
	// Line is the 1-based line in the file. Requests of one line are one document.
	Line int
	// Either Prompt or Messages is set, or Own: the model then continues the token Start, by tokens that Seed determines.
	Prompt   string
	Messages []Message
	Own      bool
	Start    int32
	Seed     int64
	// Domain is the kind of text. It may be empty.
	Domain string
}

// DatasetError is an error in a data set. It persists until a user fixes the file.
type DatasetError struct{ message string }

func (e *DatasetError) Error() string { return e.message }

func datasetErrorf(format string, args ...any) error {
	return &DatasetError{fmt.Sprintf(format, args...)}
}

// InspectDataset reads a data set to its end and checks every line.
func InspectDataset(path string) (inspection.DatasetReport, error) {
	return scanFile(path, func(Item) {})
}

// LoadDataset reads a data set, and returns a uniform sample of at most limit items, in the order of the file. The seed
// determines the sample.
func LoadDataset(path string, limit int, seed uint64) ([]Item, inspection.DatasetReport, error) {
	if limit < 1 {
		return nil, inspection.DatasetReport{}, fmt.Errorf("requests: %d is invalid: the minimum is 1", limit)
	}
	s := sampler{limit: limit, random: rand.New(rand.NewPCG(seed, 0x64617461))}
	report, err := scanFile(path, s.add)
	return s.items(), report, err
}

// sampler keeps a uniform sample of the items that it receives.
type sampler struct {
	limit, seen int
	random      *rand.Rand
	kept        []Item
}

func (s *sampler) add(item Item) {
	s.seen++
	if len(s.kept) < s.limit {
		s.kept = append(s.kept, item)
	} else if i := s.random.IntN(s.seen); i < s.limit {
		s.kept[i] = item
	}
}

// items returns the sample in the order of the file.
func (s *sampler) items() []Item {
	slices.SortFunc(s.kept, func(a, b Item) int { return a.Line - b.Line })
	return s.kept
}

// scanFile calls a function with each item of a file. Its errors contain the name of the file.
func scanFile(path string, each func(Item)) (inspection.DatasetReport, error) {
	file, err := regularfile.Open(path)
	if err != nil {
		return inspection.DatasetReport{}, classifyOpen(path, err)
	}
	defer file.Close()
	hash := sha256.New()
	counted := &countingReader{r: file}
	requests, err := scan(io.TeeReader(counted, hash), each)
	var invalid *DatasetError
	switch {
	case errors.As(err, &invalid):
		return inspection.DatasetReport{}, datasetErrorf("data set %s: %v", path, err)
	case err != nil:
		return inspection.DatasetReport{}, fmt.Errorf("data set %s: %w", path, err)
	}
	return inspection.DatasetReport{Digest: hex.EncodeToString(hash.Sum(nil)), Requests: requests, Bytes: counted.n}, nil
}

// classifyOpen distinguishes errors that persist until a user fixes the path from errors of the volume.
func classifyOpen(path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return datasetErrorf("data set %s does not exist: check the name of the file and the volume or ConfigMap that holds it", path)
	case errors.Is(err, fs.ErrPermission):
		return datasetErrorf("data set %s is not readable by this user: check its permissions", path)
	case errors.Is(err, syscall.ENOTDIR):
		return datasetErrorf("data set %s cannot be opened: a part of the path is a file, not a directory", path)
	}
	if errors.Is(err, regularfile.ErrIrregular) {
		return datasetErrorf("data set %s: %v: it must be a JSONL file", path, err)
	}
	return fmt.Errorf("data set %s: %w", path, err)
}

type countingReader struct {
	r io.Reader
	n int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// scan reads JSONL to its end and returns the number of items. Each line is {"prompt": "..."}, {"messages": [{"role",
// "content"}, ...]} or {"conversations": [{"from", "value"}, ...]} (ShareGPT), with an optional "domain". Blank lines
// are skipped.
func scan(r io.Reader, each func(Item)) (int, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	domains := map[string]bool{}
	line, items := 0, 0
	for lines.Scan() {
		line++
		text := bytes.TrimSpace(lines.Bytes())
		if len(text) == 0 {
			continue
		}
		item, err := parseItem(text, line)
		if err != nil {
			return 0, err
		}
		if domains[item.Domain] = true; len(domains) > maxDomains {
			return 0, datasetErrorf("line %d increases the number of domains to %d: the maximum is %d", line, len(domains), maxDomains)
		}
		items++
		each(item)
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return 0, datasetErrorf("line %d is longer than %d bytes: each line must be one JSON object", line+1, maxLine)
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	if items == 0 {
		return 0, datasetErrorf("the file is empty: write one request per line, such as {\"prompt\": \"...\"}")
	}
	return items, nil
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
		return Item{}, datasetErrorf(`line %d is not a supported JSON object: %v: want {"prompt": "..."}, {"messages": [...]} or {"conversations": [...]}`, line, err)
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
		return Item{}, datasetErrorf("line %d must have exactly one of prompt, messages and conversations", line)
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

// role maps the role names of ShareGPT to those of the OpenAI API.
func role(from string) string {
	switch from {
	case "human":
		return "user"
	case "gpt":
		return "assistant"
	}
	return from
}
