// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/probe/prompts"
	"github.com/semmoe/operator/internal/refengine"
)

func answers() *Answers {
	return &Answers{Format: format, PromptSet: prompts.Set, ModelDigest: strings.Repeat("ab", 32), Prompts: []Answer{stored(), {Prompt: "none"}}}
}

func TestAnswersRoundTrip(t *testing.T) {
	first, err := answers().Encode()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "answers.json")
	if err := os.WriteFile(path, first, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(answers(), got); diff != "" {
		t.Error(diff)
	}
	if second, err := got.Encode(); err != nil || !bytes.Equal(first, second) {
		t.Errorf("%s, then %s, %v", first, second, err)
	}
}

func TestAnswersAreRefused(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Answers)
		want   string
	}{
		"format":        {func(a *Answers) { a.Format = "semmoe-answers/3" }, `format is "semmoe-answers/3"; this version reads "semmoe-answers/2" and "semmoe-answers/1"`},
		"prompt set":    {func(a *Answers) { a.PromptSet = "" }, "promptSet has 0 bytes"},
		"model digest":  {func(a *Answers) { a.ModelDigest = "abc" }, "modelDigest: "},
		"no prompts":    {func(a *Answers) { a.Prompts = nil }, "0 prompts; allowed is 1 to 64"},
		"many prompts":  {func(a *Answers) { a.Prompts = make([]Answer, 65) }, "65 prompts"},
		"no tokens":     {func(a *Answers) { a.Prompts = a.Prompts[1:] }, "no prompt has a log-probability"},
		"empty prompt":  {func(a *Answers) { a.Prompts[0].Prompt = "" }, "prompts[0]: prompt has 0 bytes"},
		"many tokens":   {func(a *Answers) { a.Prompts[0].Tokens = make([]string, 257) }, "prompts[0]: 257 tokens"},
		"token missing": {func(a *Answers) { a.Prompts[0].Tokens = a.Prompts[0].Tokens[1:] }, "prompts[0]: 3 tokens, 4 logprobs and 4 margins"},
		"long token":    {func(a *Answers) { a.Prompts[0].Tokens[1] = strings.Repeat("x", 4097) }, "prompts[0]: tokens[1] has 4097 bytes"},
		"no logprob":    {func(a *Answers) { a.Prompts[0].Logprobs[2] = math.NaN() }, "prompts[0]: logprobs[2] is NaN; allowed is -100 to 0.01"},
		"logprob":       {func(a *Answers) { a.Prompts[0].Logprobs[2] = 1 }, "logprobs[2] is 1"},
		"prompt":        {func(a *Answers) { a.Prompts[0].PromptLogprobs[1] = -101 }, "prompts[0]: promptLogprobs[1] is -101; allowed is -100 to 0.01"},
		"many of them":  {func(a *Answers) { a.Prompts[0].PromptLogprobs = make([]float64, 4097) }, "prompts[0]: 4097 promptLogprobs"},
		"old format":    {func(a *Answers) { a.Format = formatWithoutPrompts }, `prompts[0]: promptLogprobs is set; format "semmoe-answers/1" has none`},
		"margin":        {func(a *Answers) { a.Prompts[0].Margins[3] = -1 }, "margins[3] is -1; allowed is 0 to 100"},
	} {
		t.Run(name, func(t *testing.T) {
			a := answers()
			test.change(a)
			if text, err := a.Encode(); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%s, %v; want %q", text, err, test.want)
			}
		})
	}
	good, err := answers().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct{ text, want string }{
		"empty":         {"", "not stored answers"},
		"other JSON":    {`{"layers":[]}`, `unknown field "layers"`},
		"list":          {`[]`, "not stored answers"},
		"text after it": {string(good) + "x", "text after the JSON object"},
		"too large":     {string(good) + strings.Repeat(" ", maxAnswersBytes), "the maximum is 262144"},
		"huge number":   {strings.Replace(string(good), "-0.2", "-1e999", 1), "not stored answers"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := decode([]byte(test.text)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v; want %q", err, test.want)
			}
		})
	}
	if _, err := Read("/nonexistent/answers.json"); err == nil || !strings.Contains(err.Error(), "/nonexistent/answers.json") {
		t.Error(err)
	}
}

// TestReadEarlierFormat checks that answers of earlier releases, without log-probabilities of prompts, remain valid.
func TestReadEarlierFormat(t *testing.T) {
	a, err := Read("testdata/answers-1.json")
	if err != nil {
		t.Fatal(err)
	}
	if a.Format != formatWithoutPrompts || len(a.Prompts) != 8 || len(a.Prompts[0].Tokens) != 16 || a.Prompts[0].PromptLogprobs != nil {
		t.Errorf("%+v", a)
	}
	client := startEngine(t, func(*refengine.Options) {})
	if err := Check(t.Context(), client, a, ranks, rankHeader); err != nil {
		t.Errorf("unchanged engine: %v", err)
	}
	client = startEngine(t, func(o *refengine.Options) {
		o.Fault, o.InitExpertLocation = refengine.FaultIgnoreMapAtDispatch, expertMap(t, 0, 1, 2, 3)
	})
	var different *DifferenceError
	if err := Check(t.Context(), client, a, ranks, rankHeader); !errors.As(err, &different) {
		t.Errorf("ignored map: %v, want a difference", err)
	}
}

// FuzzDecode checks that decoding any file terminates, and that decoded answers can be compared and encoded again.
func FuzzDecode(f *testing.F) {
	good, err := answers().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"format":"semmoe-answers/1","promptSet":"x","modelDigest":"","prompts":[{}]}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, text []byte) {
		a, err := decode(text)
		if err != nil {
			return
		}
		var same []Response
		for _, answer := range a.Prompts {
			same = append(same, Response{anyRank, answer, answer})
		}
		if err := Judge(same); err != nil {
			t.Fatalf("answers differ from themselves: %v", err)
		}
		first, err := a.Encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := decode(first)
		if err != nil {
			t.Fatal(err)
		}
		if second, err := again.Encode(); err != nil || !bytes.Equal(first, second) {
			t.Fatalf("%s, then %s, %v", first, second, err)
		}
	})
}
