package lossless

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/regularfile"
)

// Format is the format of stored answers.
const Format = "semmoe-answers/1"

// The bounds of stored answers. Eight prompts with 16 tokens each take a few kilobytes; what is larger was not written by
// this package, and must not make the probe use up its memory.
const (
	maxAnswersBytes = 256 << 10
	maxPrompts      = 64
	maxTokens       = 256
	maxTextBytes    = 4 << 10
	// leastLogprob bounds the log-probability of the most likely token, which is at least -ln(vocabulary): -14 for a
	// million tokens.
	leastLogprob = -100.0
	// mostLogprob leaves room for rounding: the sum of all probabilities may come out as slightly less than 1.
	mostLogprob = 0.01
	// mostMargin is where margins are cut off: engines that mask tokens give the others log-probabilities of -1e38.
	mostMargin = 100.0
)

// Answers are what an engine without a plan answered.
type Answers struct {
	// Format is Format, PromptSet names the prompts that were asked.
	Format    string `json:"format"`
	PromptSet string `json:"promptSet"`
	// ModelDigest is the digest of the checkpoint that answered.
	ModelDigest string   `json:"modelDigest"`
	Prompts     []Answer `json:"prompts"`
}

// Answer is the greedy continuation of one prompt. Its three lists are equally long.
type Answer struct {
	Prompt string `json:"prompt"`
	// Tokens are the texts of the tokens.
	Tokens []string `json:"tokens"`
	// Logprobs are their log-probabilities, in nats.
	Logprobs []float64 `json:"logprobs"`
	// Margins tell how far above that of the second most likely token each log-probability is; 0 where the engine does not
	// tell the second.
	Margins []float64 `json:"margins"`
}

// Encode writes answers as JSON; equal answers give equal bytes.
func (a *Answers) Encode() ([]byte, error) {
	if err := a.validate(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(a)
	return append(text, '\n'), err
}

// Decode reads what Encode wrote. Errors name the field.
func Decode(text []byte) (*Answers, error) {
	if len(text) > maxAnswersBytes {
		return nil, fmt.Errorf("answers of %d bytes; allowed are up to %d", len(text), maxAnswersBytes)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	var a Answers
	if err := decoder.Decode(&a); err != nil {
		return nil, fmt.Errorf("not stored answers: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("not stored answers: text after the JSON object")
	}
	return &a, a.validate()
}

// Read reads a file that Encode wrote. Errors name the file.
func Read(path string) (*Answers, error) {
	text, err := regularfile.Read(path, maxAnswersBytes)
	if err != nil {
		return nil, fmt.Errorf("answers: %w", err)
	}
	a, err := Decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return a, nil
}

func (a *Answers) validate() error {
	if a.Format != Format {
		return fmt.Errorf("format is %q; this version reads %q", a.Format, Format)
	}
	if a.PromptSet == "" || len(a.PromptSet) > maxTextBytes {
		return fmt.Errorf("promptSet has %d bytes; allowed is 1 to %d", len(a.PromptSet), maxTextBytes)
	}
	if _, err := artifact.ParseDigest(a.ModelDigest); err != nil {
		return fmt.Errorf("modelDigest: %w", err)
	}
	if len(a.Prompts) < 1 || len(a.Prompts) > maxPrompts {
		return fmt.Errorf("%d prompts; allowed is 1 to %d", len(a.Prompts), maxPrompts)
	}
	tokens := 0
	for i, answer := range a.Prompts {
		if err := answer.validate(); err != nil {
			return fmt.Errorf("prompts[%d]: %w", i, err)
		}
		tokens += len(answer.Tokens)
	}
	if tokens == 0 {
		return errors.New("no prompt has a token as its answer: nothing can be compared with that")
	}
	return nil
}

func (a Answer) validate() error {
	n := len(a.Tokens)
	switch {
	case a.Prompt == "" || len(a.Prompt) > maxTextBytes:
		return fmt.Errorf("prompt has %d bytes; allowed is 1 to %d", len(a.Prompt), maxTextBytes)
	case n > maxTokens:
		return fmt.Errorf("%d tokens; allowed are up to %d", n, maxTokens)
	case len(a.Logprobs) != n || len(a.Margins) != n:
		return fmt.Errorf("%d tokens, %d logprobs and %d margins; they must be equally many", n, len(a.Logprobs), len(a.Margins))
	}
	for i, token := range a.Tokens {
		if len(token) > maxTextBytes {
			return fmt.Errorf("tokens[%d] has %d bytes; allowed are up to %d", i, len(token), maxTextBytes)
		}
		if l := a.Logprobs[i]; !(l >= leastLogprob && l <= mostLogprob) { // NaN is neither
			return fmt.Errorf("logprobs[%d] is %v; allowed is %v to %v", i, l, leastLogprob, mostLogprob)
		}
		if m := a.Margins[i]; !(m >= 0 && m <= mostMargin) {
			return fmt.Errorf("margins[%d] is %v; allowed is 0 to %v", i, m, mostMargin)
		}
	}
	return nil
}

// rounded keeps what means something: digits far below the tolerance would only make files that differ for no reason.
func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }
