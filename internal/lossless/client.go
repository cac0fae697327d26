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
)

const (
	// requestLimit bounds a request: engines compile kernels when the first ones arrive, which takes a minute or more.
	requestLimit = 2 * time.Minute
	// maxResponseBytes bounds an answer, which is a few kilobytes.
	maxResponseBytes = 1 << 20
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
}

type completionResponse struct {
	Choices []struct {
		Logprobs *completionLogprobs `json:"logprobs"`
	} `json:"choices"`
}

// completionLogprobs has pointers for numbers that engines write as null where they are none.
type completionLogprobs struct {
	Tokens        []string              `json:"tokens"`
	TokenLogprobs []*float64            `json:"token_logprobs"`
	TopLogprobs   []map[string]*float64 `json:"top_logprobs"`
}

// Record asks the engine for its answers. It fails where it gives none that others can be compared with.
func Record(ctx context.Context, client *Client, modelDigest string) (*Answers, error) {
	a := &Answers{Format: Format, PromptSet: PromptSet, ModelDigest: modelDigest}
	for _, prompt := range Prompts {
		answer, err := client.ask(ctx, prompt, nil)
		if err != nil {
			return nil, err
		}
		a.Prompts = append(a.Prompts, answer)
	}
	if err := a.validate(); err != nil {
		return nil, fmt.Errorf("the engine's answers cannot be stored: %w", err)
	}
	return a, nil
}

// Check asks the engine for the answers again, and every rank for at least one of them, and compares them. It returns a
// *DifferenceError, ErrNothingCompared, or the reason why the engine did not answer. Requests are pinned to ranks by
// rankHeader; they are not where that is empty, or with one rank.
func Check(ctx context.Context, client *Client, answers *Answers, ranks int, rankHeader string) error {
	var total Drift
	for i := range max(len(answers.Prompts), ranks) {
		want := answers.Prompts[i%len(answers.Prompts)]
		header, where := http.Header{}, "the engine"
		if rankHeader != "" && ranks > 1 {
			header.Set(rankHeader, strconv.Itoa(i%ranks))
			where = fmt.Sprintf("rank %d", i%ranks)
		}
		got, err := client.ask(ctx, want.Prompt, header)
		if err != nil {
			return fmt.Errorf("%s: %w", where, err)
		}
		drift, err := Compare(want, got)
		if err != nil {
			return fmt.Errorf("%s: %w", where, err)
		}
		total = total.plus(drift)
	}
	return total.Err()
}

// ask sends one prompt. A log-probability that the engine gives as null is NaN.
func (c *Client) ask(ctx context.Context, prompt string, header http.Header) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	body, err := json.Marshal(completionRequest{Model: c.Model, Prompt: prompt, MaxTokens: answerTokens, Logprobs: alternatives})
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
		return Answer{}, fmt.Errorf("the engine answers %s: %.300s", response.Status, strings.TrimSpace(string(text)))
	case len(text) > maxResponseBytes:
		return Answer{}, fmt.Errorf("the engine's answer is larger than %d bytes", maxResponseBytes)
	}
	return parse(prompt, text)
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
	answer := Answer{Prompt: prompt, Tokens: found.Tokens}
	for i, token := range found.Tokens {
		logprob := math.NaN()
		if l := found.TokenLogprobs[i]; l != nil {
			logprob = rounded(*l)
		}
		answer.Logprobs = append(answer.Logprobs, logprob)
		answer.Margins = append(answer.Margins, rounded(found.margin(i, token, logprob)))
	}
	return answer, nil
}

// margin is the distance to the most likely other token, 0 where none is told: engines list alternatives by their text,
// and parts of characters share it.
func (c *completionLogprobs) margin(i int, token string, logprob float64) float64 {
	second, told := math.Inf(-1), false
	if i < len(c.TopLogprobs) {
		for text, l := range c.TopLogprobs[i] {
			if text != token && l != nil {
				second, told = max(second, *l), true
			}
		}
	}
	if !told || math.IsNaN(logprob) {
		return 0
	}
	return min(max(logprob-second, 0), mostMargin)
}
