// SPDX-License-Identifier: Apache-2.0

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

// RefusedError is a response by which the engine permanently rejects a request.
type RefusedError struct {
	Status  int
	Message string
}

// noExperts is the message of a RefusedError for a response without routed experts.
const noExperts = "the response contains no routed experts"

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the engine rejected the request: %d: %s", e.Status, e.Message)
}

// EngineError is an error of the engine that another attempt would repeat: the engine died, or does not return the
// routed experts of the model.
type EngineError struct{ message string }

func (e *EngineError) Error() string { return e.message }

// client calls the native routes of an engine.
type client struct {
	base    string // without a trailing slash
	http    *http.Client
	adapter engine.Adapter
	layers  int // hidden layers, including dense layers
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
				return nil // a request router serves for its engines, and has no health route of engines
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

// maxResponseBytes bounds a response of the engine. It is several times the size of the routed experts, in base64, of
// the longest recorded request.
const maxResponseBytes = 256 << 20

// post sends a request. It returns a *RefusedError for a status 4xx except 429. Other errors may be retried.
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
	if err := json.NewDecoder(io.LimitReader(response.Body, maxResponseBytes)).Decode(into); err != nil {
		return fmt.Errorf("failed to read a response of the engine (at most %d MiB): %w", maxResponseBytes>>20, err)
	}
	return nil
}

// errorMessage returns the message of an OpenAI error, or the text itself.
func errorMessage(text []byte) string {
	var response struct {
		Error struct{ Message string }
	}
	if json.Unmarshal(text, &response) == nil && response.Error.Message != "" {
		return response.Error.Message
	}
	return strings.TrimSpace(string(text))
}

// tokenize returns the token IDs of an item.
func (c *client) tokenize(ctx context.Context, item Item) ([]int32, error) {
	body := map[string]any{"prompt": item.Prompt}
	if item.Prompt == "" {
		body = map[string]any{"messages": item.Messages}
	}
	var response struct {
		Tokens []int32 `json:"tokens"`
	}
	return response.Tokens, c.post(ctx, c.adapter.Generation.TokenizePath, body, &response)
}

// record sends token IDs, which the engine continues by a number of tokens at a temperature, for a seed. It returns the
// tokens whose routing is known (all but the last generated token) and their experts, with the shape
// [tokens][layers][top].
func (c *client) record(ctx context.Context, ids []int32, newTokens int, temperature float64, seed int64) (tokens, experts []int32, err error) {
	var response json.RawMessage
	if err := c.post(ctx, c.adapter.Generation.Path, c.adapter.Generation.Body(ids, newTokens, temperature, seed), &response); err != nil {
		return nil, nil, err
	}
	generated, text, err := c.adapter.Generation.Answer(response)
	if err != nil {
		return nil, nil, fmt.Errorf("invalid response of the engine: %w", err)
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
		return nil, nil, &EngineError{fmt.Sprintf("the engine returned the experts of %d tokens for a prompt of %d and %d generated tokens", known, len(ids), len(generated))}
	}
	return all[:known], experts, nil
}
