// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/files/regularfile"
)

const (
	// format is the current format of stored answers.
	format = "semmoe-answers/2"
	// formatWithoutPrompts is the format of earlier releases, without log-probabilities of prompts. decode reads both
	// formats.
	formatWithoutPrompts = "semmoe-answers/1"
)

// The limits of stored answers. The answers of this package take 100 KB. A larger file has another origin, and must not
// exhaust the memory of the probe.
const (
	maxAnswersBytes = 256 << 10
	maxPrompts      = 64
	maxTokens       = 256
	maxTextBytes    = 4 << 10
	// maxPromptTokens is the maximum number of tokens of a prompt: a token has at least one byte.
	maxPromptTokens = maxTextBytes
	// minLogprob is the lower limit to which log-probabilities are clipped. Engines report -9999 or -1e38 for
	// impossible tokens.
	minLogprob = -100.0
	// maxLogprob allows for rounding: the sum of all probabilities can be slightly less than 1.
	maxLogprob = 0.01
	// maxMargin is the upper limit to which margins are clipped. Engines that mask tokens report log-probabilities of
	// -1e38 for them.
	maxMargin = 100.0
)

// Answers contains the recorded outputs of an engine without a plan.
type Answers struct {
	// Format is the format version. PromptSet is the name of the set of prompts.
	Format    string `json:"format"`
	PromptSet string `json:"promptSet"`
	// ModelDigest is the digest of the checkpoint that the engine served.
	ModelDigest string   `json:"modelDigest"`
	Prompts     []Answer `json:"prompts"`
}

// Answer is the output of an engine for one prompt: the log-probabilities of the prompt and its greedy continuation.
// Tokens, Logprobs and Margins have the same length.
type Answer struct {
	Prompt string `json:"prompt"`
	// PromptLogprobs lists the log-probabilities, in nats, of all tokens of the prompt except the first one. It is
	// empty if the engine does not return them.
	PromptLogprobs []float64 `json:"promptLogprobs,omitempty"`
	// Tokens lists the texts of the generated tokens.
	Tokens []string `json:"tokens"`
	// Logprobs lists the log-probabilities of the tokens, in nats.
	Logprobs []float64 `json:"logprobs"`
	// Margins lists the differences between the log-probabilities of the tokens and those of the second most likely
	// tokens. A margin is 0 if the engine does not return the second token.
	Margins []float64 `json:"margins"`
}

// Encode encodes answers as JSON. Equal answers give equal bytes.
func (a *Answers) Encode() ([]byte, error) {
	if err := a.validate(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(a)
	return append(text, '\n'), err
}

// decode decodes the result of Encode. Errors name the field.
func decode(text []byte) (*Answers, error) {
	if len(text) > maxAnswersBytes {
		return nil, fmt.Errorf("answers have %d bytes; the maximum is %d", len(text), maxAnswersBytes)
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

// Read reads a file with the result of Encode. Errors name the file.
func Read(path string) (*Answers, error) {
	text, err := regularfile.Read(path, maxAnswersBytes)
	if err != nil {
		return nil, fmt.Errorf("failed to read answers: %w", err)
	}
	a, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return a, nil
}

func (a *Answers) validate() error {
	if a.Format != format && a.Format != formatWithoutPrompts {
		return fmt.Errorf("format is %q; this version reads %q and %q", a.Format, format, formatWithoutPrompts)
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
		if a.Format == formatWithoutPrompts && len(answer.PromptLogprobs) > 0 {
			return fmt.Errorf("prompts[%d]: promptLogprobs is set; format %q has none", i, a.Format)
		}
		tokens += len(answer.PromptLogprobs) + len(answer.Tokens)
	}
	if tokens == 0 {
		return errors.New("no prompt has a log-probability, so the answers cannot be compared")
	}
	return nil
}

func (a Answer) validate() error {
	n := len(a.Tokens)
	switch {
	case a.Prompt == "" || len(a.Prompt) > maxTextBytes:
		return fmt.Errorf("prompt has %d bytes; allowed is 1 to %d", len(a.Prompt), maxTextBytes)
	case n > maxTokens:
		return fmt.Errorf("%d tokens; the maximum is %d", n, maxTokens)
	case len(a.PromptLogprobs) > maxPromptTokens:
		return fmt.Errorf("%d promptLogprobs; the maximum is %d", len(a.PromptLogprobs), maxPromptTokens)
	case len(a.Logprobs) != n || len(a.Margins) != n:
		return fmt.Errorf("%d tokens, %d logprobs and %d margins; the numbers must be equal", n, len(a.Logprobs), len(a.Margins))
	}
	for i, token := range a.Tokens {
		if len(token) > maxTextBytes {
			return fmt.Errorf("tokens[%d] has %d bytes; the maximum is %d", i, len(token), maxTextBytes)
		}
		if m := a.Margins[i]; !(m >= 0 && m <= maxMargin) { // also false for NaN
			return fmt.Errorf("margins[%d] is %v; allowed is 0 to %v", i, m, maxMargin)
		}
	}
	if err := validateLogprobs("promptLogprobs", a.PromptLogprobs); err != nil {
		return err
	}
	return validateLogprobs("logprobs", a.Logprobs)
}

func validateLogprobs(name string, logprobs []float64) error {
	for i, l := range logprobs {
		if !(l >= minLogprob && l <= maxLogprob) { // also false for NaN
			return fmt.Errorf("%s[%d] is %v; allowed is %v to %v", name, i, l, minLogprob, maxLogprob)
		}
	}
	return nil
}

// rounded rounds a value to four decimals. Digits far below the tolerance would only make files of equal answers
// differ.
func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }
