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
	// MaxBytes bounds the text that an engine is asked to tokenize. A longer one would keep its front end, which
	// serves requests, busy for longer than locality gains.
	MaxBytes = 64 << 10
	// timeout bounds what a request waits for that, and pause is how long engines are left alone once one
	// has not answered: else each request would wait in vain.
	timeout = 50 * time.Millisecond
	pause   = time.Second
	// maxAnswer bounds what is read of an answer, far above what the ids of MaxBytes take.
	maxAnswer = 1 << 20
)

// Remote asks engines for the token ids of prompts, where the checkpoint's tokenizer.json cannot be used here. It is safe for
// concurrent use.
type Remote struct {
	under     func(plan string) (url string, ok bool)
	transport http.RoundTripper
	// pausedUntil is a Unix time in nanoseconds.
	pausedUntil atomic.Int64
}

// New returns what asks engines for it. under tells the URL by which one that serves under a plan answers, if there is any.
func New(under func(plan string) (url string, ok bool), transport http.RoundTripper) *Remote {
	return &Remote{under: under, transport: transport}
}

// For returns what a request asks for the tokens of its texts.
func (r *Remote) For(ctx context.Context) func(plan string, texts []string) wire.Prompt {
	return func(plan string, texts []string) wire.Prompt { return r.tokens(ctx, plan, texts) }
}

// tokens asks a pod that serves under a plan. The prompt is empty where that does not answer in time, or is not asked: a
// request is better sent by load than late.
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
