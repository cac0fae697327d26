package lossless

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// requestLimit bounds a request: engines compile kernels when the first ones arrive, which takes a minute or more.
	requestLimit = 2 * time.Minute
	// maxResponseBytes bounds an answer, which has some tens of kilobytes.
	maxResponseBytes = 1 << 20
	// inFlight is how many prompts an engine is asked at a time: it computes them together, and other requests still run.
	inFlight = 4
)

// Client asks one engine.
type Client struct {
	// Address is the engine's base URL, without a slash at the end; Model the name by which it serves the model.
	Address, Model string
	// HTTP reaches the engine; nil means directly.
	HTTP *http.Client
}

// transport reaches engines directly: a proxy of the environment is none between pods, and a redirection leads to
// somebody else.
var transport = &http.Client{
	Transport:     &http.Transport{MaxIdleConns: 64, IdleConnTimeout: time.Minute},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// completionRequest is the part of OpenAI's completions that every engine has.
type completionRequest struct {
	Model       string  `json:"model"`
	Prompt      string  `json:"prompt"`
	MaxTokens   int     `json:"max_tokens"`
	Temperature float64 `json:"temperature"`
	Logprobs    int     `json:"logprobs"`
	// Echo asks for the prompt's tokens as well, and with Logprobs for their log-probabilities: vLLM 0.22 to 0.32
	// (vllm/entrypoints/openai/completion/serving.py) and SGLang 0.5.12 to 0.5.19
	// (python/sglang/srt/entrypoints/openai/serving_completions.py) return them and compute them without the prefix cache.
	// TensorRT-LLM 1.3 (tensorrt_llm/serve/postprocess_handlers.py) returns those of generated tokens only.
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

// statusError is an answer other than 200.
type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return "the engine answers " + e.text }

// completionLogprobs has pointers for numbers that engines write as null where they are none.
type completionLogprobs struct {
	Tokens        []string              `json:"tokens"`
	TokenLogprobs []*float64            `json:"token_logprobs"`
	TopLogprobs   []map[string]*float64 `json:"top_logprobs"`
}

// Record asks the engine for its answers. It fails where it gives none that others can be compared with.
func Record(ctx context.Context, client *Client, modelDigest string) (*Answers, error) {
	a := &Answers{Format: Format, PromptSet: PromptSet, ModelDigest: modelDigest, Prompts: make([]Answer, len(Prompts))}
	err := together(ctx, len(Prompts), func(ctx context.Context, i int) (err error) {
		a.Prompts[i], err = client.ask(ctx, Prompts[i], true, nil)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := a.validate(); err != nil {
		return nil, fmt.Errorf("the engine's answers cannot be stored: %w", err)
	}
	return a, nil
}

// Check asks the engine for the answers again and judges them. It returns a *DifferenceError, ErrNothingCompared, or the
// reason why the engine did not answer.
func Check(ctx context.Context, client *Client, answers *Answers, ranks int, rankHeader string) error {
	responses, err := Ask(ctx, client, answers, ranks, rankHeader)
	if err != nil {
		return err
	}
	return Judge(responses)
}

// Response is an engine's answer to a prompt whose answer is stored.
type Response struct {
	// Rank is the rank that the prompt was pinned to, AnyRank for none.
	Rank      int
	Want, Got Answer
}

// AnyRank is the Rank of a prompt that was not pinned.
const AnyRank = -1

// Ask asks the engine for all answers, and every rank for at least one. Requests are pinned to ranks by rankHeader; they are
// not pinned where rankHeader is empty, or with one rank.
func Ask(ctx context.Context, client *Client, answers *Answers, ranks int, rankHeader string) ([]Response, error) {
	responses := make([]Response, max(len(answers.Prompts), ranks))
	err := together(ctx, len(responses), func(ctx context.Context, i int) (err error) {
		r := &responses[i]
		r.Rank, r.Want = AnyRank, answers.Prompts[i%len(answers.Prompts)]
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

// together calls ask for 0 to n-1, a few at a time, until one fails.
func together(ctx context.Context, n int, ask func(ctx context.Context, i int) error) error {
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

// ask sends one prompt. With echo it asks for the log-probabilities of the prompt; an engine that refuses this is asked
// without.
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

// send sends one request. A log-probability that the engine returns as null is NaN.
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
		return Answer{}, fmt.Errorf("the engine's answer: %w", err)
	case response.StatusCode != http.StatusOK:
		return Answer{}, &statusError{response.StatusCode, fmt.Sprintf("%s: %.300s", response.Status, strings.TrimSpace(string(text)))}
	case len(text) > maxResponseBytes:
		return Answer{}, fmt.Errorf("the engine's answer is larger than %d bytes", maxResponseBytes)
	}
	return parse(completion.Prompt, text)
}

// parse reads a completion.
func parse(prompt string, text []byte) (Answer, error) {
	var completion completionResponse
	if err := json.Unmarshal(text, &completion); err != nil {
		return Answer{}, fmt.Errorf("the engine's answer is no completion: %w", err)
	}
	if len(completion.Choices) == 0 || completion.Choices[0].Logprobs == nil {
		return Answer{}, errors.New("the engine's answer has no log-probabilities")
	}
	found := completion.Choices[0].Logprobs
	if len(found.Tokens) != len(found.TokenLogprobs) {
		return Answer{}, fmt.Errorf("the engine's answer has %d tokens and %d log-probabilities", len(found.Tokens), len(found.TokenLogprobs))
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

// echoed returns how many tokens are those of a prompt of the given length: all of it or none. The first token of a prompt
// has no log-probability, since no token is before it.
func (c *completionLogprobs) echoed(promptTokens int) int {
	if len(c.Tokens) == 0 || c.TokenLogprobs[0] != nil || promptTokens > len(c.Tokens) {
		return 0
	}
	return max(promptTokens, 0)
}

// margin is the distance to the most likely other token, 0 where the engine returns none: engines list alternatives by
// their text, and parts of characters share it.
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
