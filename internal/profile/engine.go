package profile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/engine"
)

// RefusedError is an answer by which the engine refuses a request for good.
type RefusedError struct {
	Status  int
	Message string
}

// noExperts is the message of a refusal in an answer.
const noExperts = "its answer has no routed experts"

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the engine refuses: %d: %s", e.Status, e.Message)
}

// EngineError is a fault of the engine that another attempt would meet again: it died, or does not tell the experts of
// the model.
type EngineError struct{ message string }

func (e *EngineError) Error() string { return e.message }

// client speaks an engine's native routes.
type client struct {
	base    string // without a slash at the end
	http    *http.Client
	adapter engine.Adapter
	layers  int // hidden layers, dense ones included
	top     int
}

// waitHealthy polls until the engine serves.
func (c *client) waitHealthy(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	last := errors.New("not tried")
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+c.adapter.HealthPath, nil)
		if err != nil {
			return err
		}
		response, err := c.http.Do(request)
		if err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK || response.StatusCode == http.StatusNotFound {
				return nil // a router answers for its engines, and has no health route of theirs
			}
			err = errors.New(response.Status)
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the engine at %s does not serve within %v: %w", c.base, limit, last)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// maxAnswerBytes bounds an answer of the engine: several times the routed experts, in base64, of the longest request that is recorded.
const maxAnswerBytes = 256 << 20

// post sends a request. Answers of 4xx are a *RefusedError; others may be tried again.
func (c *client) post(ctx context.Context, path string, body, into any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		if response.StatusCode >= 400 && response.StatusCode < 500 && response.StatusCode != http.StatusTooManyRequests {
			return &RefusedError{response.StatusCode, errorMessage(text)}
		}
		return fmt.Errorf("%s: %s", response.Status, errorMessage(text))
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswerBytes)).Decode(into); err != nil {
		return fmt.Errorf("failed to read an answer of the engine (at most %d MiB): %w", maxAnswerBytes>>20, err)
	}
	return nil
}

// errorMessage is the message in an OpenAI error, or the text itself.
func errorMessage(text []byte) string {
	var answer struct {
		Error struct{ Message string }
	}
	if json.Unmarshal(text, &answer) == nil && answer.Error.Message != "" {
		return answer.Error.Message
	}
	return strings.TrimSpace(string(text))
}

// tokenize returns the token ids of an item.
func (c *client) tokenize(ctx context.Context, item Item) ([]int32, error) {
	body := map[string]any{"prompt": item.Prompt}
	if item.Prompt == "" {
		body = map[string]any{"messages": item.Messages}
	}
	var answer struct {
		Tokens []int32 `json:"tokens"`
	}
	return answer.Tokens, c.post(ctx, c.adapter.Generation.TokenizePath, body, &answer)
}

// record sends token ids and returns the tokens whose routing is known (all but the last generated one) and their
// experts [tokens][layers][top].
func (c *client) record(ctx context.Context, ids []int32, newTokens int) (tokens, experts []int32, err error) {
	var answer json.RawMessage
	if err := c.post(ctx, c.adapter.Generation.Path, c.adapter.Generation.Body(ids, newTokens), &answer); err != nil {
		return nil, nil, err
	}
	generated, text, err := c.adapter.Generation.Answer(answer)
	if err != nil {
		return nil, nil, fmt.Errorf("the engine's answer: %w", err)
	}
	if text == "" {
		return nil, nil, &RefusedError{http.StatusOK, noExperts}
	}
	if experts, err = c.adapter.RoutedExperts.Decode(text, c.layers, c.top); err != nil {
		return nil, nil, &EngineError{err.Error()}
	}
	all := append(append([]int32(nil), ids...), generated...)
	known := len(experts) / (c.layers * c.top)
	if known > len(all) || known < len(ids) {
		return nil, nil, &EngineError{fmt.Sprintf("the engine tells the experts of %d tokens, for a prompt of %d and %d generated", known, len(ids), len(generated))}
	}
	return all[:known], experts, nil
}
