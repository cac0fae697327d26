package router

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
	// tokenizeBytes bounds the text that an engine is asked to tokenize. A longer one would keep its front end, which
	// serves requests, busy for longer than locality gains.
	tokenizeBytes = 64 << 10
	// tokenizeTimeout bounds what a request waits for that, and tokenizePause is how long engines are left alone once one
	// has not answered: else each request would wait in vain.
	tokenizeTimeout = 50 * time.Millisecond
	tokenizePause   = time.Second
	// tokenizeAnswer bounds what is read of an answer, far above what the ids of tokenizeBytes take.
	tokenizeAnswer = 4 << 20
)

// remoteTokenizer asks engines for the token ids of prompts, where the checkpoint's tokenizer.json cannot be used here. It
// is safe for concurrent use. What it is told is kept nowhere.
type remoteTokenizer struct {
	pool      *Pool
	transport http.RoundTripper
	path      string
	// pausedUntil is a Unix time in nanoseconds.
	pausedUntil atomic.Int64
}

// newRemoteTokenizer returns nil where engines have no route for it.
func newRemoteTokenizer(pool *Pool, transport http.RoundTripper, path string) *remoteTokenizer {
	if path == "" {
		return nil
	}
	return &remoteTokenizer{pool: pool, transport: transport, path: path}
}

// tokenizer returns what a request asks for the tokens of its texts; nil where there is nobody to ask.
func (t *remoteTokenizer) tokenizer(ctx context.Context) func(plan string, texts []string) wire.Prompt {
	if t == nil {
		return nil
	}
	return func(plan string, texts []string) wire.Prompt { return t.tokens(ctx, plan, texts) }
}

// tokens asks a pod that serves under a plan. The prompt is empty where that does not answer in time, or is not asked: a
// request is better sent by load than late.
func (t *remoteTokenizer) tokens(ctx context.Context, plan string, texts []string) wire.Prompt {
	size := 0
	for _, text := range texts {
		size += len(text)
	}
	address, ok := t.pool.addressUnder(plan)
	if !ok || size > tokenizeBytes || time.Now().UnixNano() < t.pausedUntil.Load() {
		return wire.Prompt{}
	}
	waiting, cancel := context.WithTimeout(ctx, tokenizeTimeout)
	defer cancel()
	answer, err := t.ask(waiting, address, strings.Join(texts, "\n"))
	if err != nil && ctx.Err() == nil {
		t.pausedUntil.Store(time.Now().Add(tokenizePause).UnixNano())
	}
	return wire.PromptOfIDs(answer)
}

// ask returns the ids of a text as JSON.
func (t *remoteTokenizer) ask(ctx context.Context, address, text string) (json.RawMessage, error) {
	body, err := json.Marshal(map[string]string{"prompt": text})
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+t.path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := t.transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", address, response.Status)
	}
	var answer struct {
		Tokens json.RawMessage `json:"tokens"`
	}
	data, err := io.ReadAll(io.LimitReader(response.Body, tokenizeAnswer))
	if err != nil {
		return nil, err
	}
	err = json.Unmarshal(data, &answer)
	return answer.Tokens, err
}

// addressUnder returns the address of the backend with the fewest outstanding tokens among those that serve under a plan
// and were not just found unreachable.
func (p *Pool) addressUnder(plan string) (address string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.groups {
		if allowed := (filter{now: p.now()}); g.plan == plan && g.ranks(allowed) > 0 {
			return g.leastLoaded(allowed).on.Address, true
		}
	}
	return "", false
}
