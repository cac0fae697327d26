// SPDX-License-Identifier: Apache-2.0

package tokenize

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/semmoe/operator/internal/router/wire"
)

const (
	// MaxBytes is the maximum size of a text that an engine is asked to tokenize. A longer text would block the
	// engine's front end, which serves requests, for longer than the gain in locality is worth.
	MaxBytes = 64 << 10
	// timeout is the maximum time that a request waits for token ids. pause is the time without further attempts after
	// a failed one, so that not every request waits in vain.
	timeout = 50 * time.Millisecond
	pause   = time.Second
	// maxAnswer is the maximum size of a response, far above the size of the ids of MaxBytes.
	maxAnswer = 1 << 20
)

// Remote gets the token ids of prompts from engines if the router cannot use the tokenizer.json of the checkpoint. It
// is safe for concurrent use.
type Remote struct {
	under     func(plan string) (url string, ok bool)
	transport http.RoundTripper
	// pausedUntil is a Unix time in nanoseconds.
	pausedUntil atomic.Int64
}

// New returns a Remote. under returns the tokenize URL of an engine that serves under a plan, if there is one.
func New(under func(plan string) (url string, ok bool), transport http.RoundTripper) *Remote {
	return &Remote{under: under, transport: transport}
}

// For returns the function with which a request gets the tokens of its texts.
func (r *Remote) For(ctx context.Context) func(plan string, texts []string) wire.Prompt {
	return func(plan string, texts []string) wire.Prompt { return r.tokens(ctx, plan, texts) }
}

// tokens asks a pod that serves under a plan. The prompt is empty if the pod does not respond in time or is not asked:
// a request is better balanced by load than delayed.
func (r *Remote) tokens(ctx context.Context, plan string, texts []string) wire.Prompt {
	size := 0
	for _, text := range texts {
		size += len(text)
	}
	url, ok := r.under(plan)
	if !ok || size > MaxBytes || time.Now().UnixNano() < r.pausedUntil.Load() {
		return wire.Prompt{}
	}
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer, err := r.ask(waiting, url, strings.Join(texts, "\n"))
	if err != nil && ctx.Err() == nil {
		r.pausedUntil.Store(time.Now().Add(pause).UnixNano())
	}
	return wire.PromptOfIDs(answer)
}

// ask returns the ids of a text as JSON.
func (r *Remote) ask(ctx context.Context, url, text string) (json.RawMessage, error) {
	body, err := json.Marshal(map[string]string{"prompt": text})
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := r.transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", url, response.Status)
	}
	var answer struct {
		Tokens json.RawMessage `json:"tokens"`
	}
	data, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return nil, err
	}
	err = json.Unmarshal(data, &answer)
	return answer.Tokens, err
}
