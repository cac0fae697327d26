// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/probe/prompts"
)

const (
	// requestLimit is the timeout of a request. Engines compile kernels for the first requests, which takes a minute or
	// more.
	requestLimit = 2 * time.Minute
	// maxResponseBytes is the maximum size of a response. Usual responses have a few tens of kilobytes.
	maxResponseBytes = 1 << 20
	// inFlight is the maximum number of concurrent prompts. The engine batches them, and other requests are still
	// served.
	inFlight = 4
	// answerTokens is the number of tokens that continue a prompt: enough that an error of the cache or of decoding
	// shows, few enough that a pod waits for seconds only.
	answerTokens = 16
	// alternatives is the number of most likely tokens that engines are asked for: the second gives the margin.
	alternatives = 2
)

// Client sends prompts to one engine.
type Client struct {
	// Address is the engine's base URL, without a trailing slash. Model is the name by which the engine serves the
	// model.
	Address, Model string
	// HTTP is the client for requests to the engine. If it is nil, the engine is contacted directly.
	HTTP *http.Client
}

// transport contacts engines directly. It ignores a proxy in the environment, which does not apply between pods, and
// does not follow redirects, which lead to another server.
var transport = newHTTPClient(&http.Transport{})

func newHTTPClient(transport *http.Transport) *http.Client {
	transport.MaxIdleConns, transport.IdleConnTimeout = 64, time.Minute
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// NewTLSClient returns the client for engines with TLS. config returns the configuration of a connection, whose server
// name is that of the address if it is empty.
func NewTLSClient(config func() (*tls.Config, error)) *http.Client {
	return newHTTPClient(&http.Transport{DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := config()
		if err != nil {
			return nil, err
		}
		return (&tls.Dialer{Config: c}).DialContext(ctx, network, address)
	}})
}

// completionRequest contains the fields of OpenAI's completions API that every engine supports.
type completionRequest struct {
	Model       string  `json:"model"`
	Prompt      string  `json:"prompt"`
	MaxTokens   int     `json:"max_tokens"`
	Temperature float64 `json:"temperature"`
	Logprobs    int     `json:"logprobs"`
	// Echo requests the tokens of the prompt as well, and with Logprobs their log-probabilities. vLLM 0.22 to 0.32
	// (vllm/entrypoints/openai/completion/serving.py) and SGLang 0.5.12 to 0.5.19
	// (python/sglang/srt/entrypoints/openai/serving_completions.py) return them, and compute them without the prefix
	// cache. TensorRT-LLM 1.3 (tensorrt_llm/serve/postprocess_handlers.py) returns only those of generated tokens.
	Echo bool `json:"echo,omitempty"`
}

type completionResponse struct {
	Choices []struct {
		Logprobs *completionLogprobs `json:"logprobs"`
	} `json:"choices"`
	Usage struct {
		PromptTokens int `json:"prompt_tokens"`
	} `json:"usage"`
}

// statusError is a response with a status other than 200.
type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return "the engine returned status " + e.text }

// completionLogprobs has pointers for numbers that engines may return as null.
type completionLogprobs struct {
	Tokens        []string              `json:"tokens"`
	TokenLogprobs []*float64            `json:"token_logprobs"`
	TopLogprobs   []map[string]*float64 `json:"top_logprobs"`
}

// Record records the engine's answers. It returns an error if the answers cannot be used for comparisons.
func Record(ctx context.Context, client *Client, modelDigest string) (*Answers, error) {
	a := &Answers{Format: format, PromptSet: prompts.Set, ModelDigest: modelDigest, Prompts: make([]Answer, len(prompts.All))}
	err := concurrently(ctx, len(prompts.All), func(ctx context.Context, i int) (err error) {
		a.Prompts[i], err = client.ask(ctx, prompts.All[i], true, nil)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := a.validate(); err != nil {
		return nil, fmt.Errorf("failed to record answers: %w", err)
	}
	return a, nil
}

// Check sends the prompts of the answers to the engine and judges the responses. It returns a *DifferenceError,
// errNothingCompared, or the reason why the engine did not respond.
func Check(ctx context.Context, client *Client, answers *Answers, ranks int, rankHeader string) error {
	responses, err := Ask(ctx, client, answers, ranks, rankHeader)
	if err != nil {
		return err
	}
	return Judge(responses)
}

// Response is an engine's answer to a prompt, together with the stored answer.
type Response struct {
	// Rank is the rank to which the prompt was pinned, or anyRank.
	Rank      int
	Want, Got Answer
}

// anyRank is the Rank of a prompt that was not pinned.
const anyRank = -1

// Ask sends all stored prompts to the engine, and at least one prompt to every rank. rankHeader pins requests to ranks.
// Requests are not pinned if rankHeader is empty or there is only one rank.
func Ask(ctx context.Context, client *Client, answers *Answers, ranks int, rankHeader string) ([]Response, error) {
	responses := make([]Response, max(len(answers.Prompts), ranks))
	err := concurrently(ctx, len(responses), func(ctx context.Context, i int) (err error) {
		r := &responses[i]
		r.Rank, r.Want = anyRank, answers.Prompts[i%len(answers.Prompts)]
		header := http.Header{}
		if rankHeader != "" && ranks > 1 {
			r.Rank = i % ranks
			header.Set(rankHeader, strconv.Itoa(r.Rank))
		}
		if r.Got, err = client.ask(ctx, r.Want.Prompt, len(r.Want.PromptLogprobs) > 0, header); err != nil {
			return fmt.Errorf("%s: %w", rankName(r.Rank), err)
		}
		return nil
	})
	return responses, err
}

// concurrently calls ask for 0 to n-1, at most inFlight calls at a time, until one returns an error.
func concurrently(ctx context.Context, n int, ask func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(inFlight)
	for i := range n {
		group.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return ask(ctx, i)
		})
	}
	return group.Wait()
}

// ask sends one prompt. With echo, it requests the log-probabilities of the prompt, and retries without echo if the
// engine refuses the request.
func (c *Client) ask(ctx context.Context, prompt string, echo bool, header http.Header) (Answer, error) {
	request := completionRequest{Model: c.Model, Prompt: prompt, MaxTokens: answerTokens, Logprobs: alternatives, Echo: echo}
	answer, err := c.send(ctx, request, header)
	var status *statusError
	if echo && errors.As(err, &status) && (status.code == http.StatusBadRequest || status.code == http.StatusUnprocessableEntity) {
		request.Echo = false
		return c.send(ctx, request, header)
	}
	return answer, err
}

// send sends one request. A log-probability that the engine returns as null becomes NaN.
func (c *Client) send(ctx context.Context, completion completionRequest, header http.Header) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	body, err := json.Marshal(completion)
	if err != nil {
		return Answer{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.Address+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	for name := range header {
		request.Header.Set(name, header.Get(name))
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := cmp.Or(c.HTTP, transport).Do(request)
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxResponseBytes+1))
	switch {
	case err != nil:
		return Answer{}, fmt.Errorf("failed to read the engine's response: %w", err)
	case response.StatusCode != http.StatusOK:
		return Answer{}, &statusError{response.StatusCode, fmt.Sprintf("%s: %.300s", response.Status, strings.TrimSpace(string(text)))}
	case len(text) > maxResponseBytes:
		return Answer{}, fmt.Errorf("the engine's response is larger than %d bytes", maxResponseBytes)
	}
	return parse(completion.Prompt, text)
}

// parse parses a completion.
func parse(prompt string, text []byte) (Answer, error) {
	var completion completionResponse
	if err := json.Unmarshal(text, &completion); err != nil {
		return Answer{}, fmt.Errorf("failed to parse the engine's response as a completion: %w", err)
	}
	if len(completion.Choices) == 0 || completion.Choices[0].Logprobs == nil {
		return Answer{}, errors.New("the engine's response has no log-probabilities")
	}
	found := completion.Choices[0].Logprobs
	if len(found.Tokens) != len(found.TokenLogprobs) {
		return Answer{}, fmt.Errorf("the engine's response has %d tokens and %d log-probabilities", len(found.Tokens), len(found.TokenLogprobs))
	}
	answer := Answer{Prompt: prompt}
	echoed := found.echoed(completion.Usage.PromptTokens)
	for i, token := range found.Tokens {
		logprob := math.NaN()
		if l := found.TokenLogprobs[i]; l != nil {
			logprob = rounded(max(*l, minLogprob))
		}
		switch {
		case i >= echoed:
			answer.Tokens = append(answer.Tokens, token)
			answer.Logprobs = append(answer.Logprobs, logprob)
			answer.Margins = append(answer.Margins, rounded(found.margin(i, token, logprob)))
		case i > 0:
			answer.PromptLogprobs = append(answer.PromptLogprobs, logprob)
		}
	}
	return answer, nil
}

// echoed returns the number of returned tokens that belong to a prompt of the given length: the whole prompt or none.
// The first token of a prompt has no log-probability, because no token precedes it.
func (c *completionLogprobs) echoed(promptTokens int) int {
	if len(c.Tokens) == 0 || c.TokenLogprobs[0] != nil || promptTokens > len(c.Tokens) {
		return 0
	}
	return max(promptTokens, 0)
}

// margin returns the difference to the log-probability of the most likely other token, or 0 if the engine returns none.
// Engines list alternatives by text, and tokens that are parts of characters can have the same text.
func (c *completionLogprobs) margin(i int, token string, logprob float64) float64 {
	second, found := math.Inf(-1), false
	if i < len(c.TopLogprobs) {
		for text, l := range c.TopLogprobs[i] {
			if text != token && l != nil {
				second, found = max(second, *l), true
			}
		}
	}
	if !found || math.IsNaN(logprob) {
		return 0
	}
	return min(max(logprob-second, 0), maxMargin)
}
