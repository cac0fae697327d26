// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

// stored returns an answer with four tokens to a prompt of four tokens. The third token has a small margin.
func stored() Answer {
	return Answer{
		Prompt: "one two", PromptLogprobs: []float64{-5, -1.5, -2}, Tokens: []string{" three", " four", " five", " six"},
		Logprobs: []float64{-0.2, -0.4, -0.9, -0.1}, Margins: []float64{2, 3, 0.3, 4},
	}
}

func TestCompare(t *testing.T) {
	const far = maxDifference
	for name, test := range map[string]struct {
		want, got       func(*Answer)
		positions, same int
		total           float64
	}{
		"equal":                        {positions: 7, same: 7},
		"small differences":            {got: func(a *Answer) { a.Logprobs[0] += 0.1; a.PromptLogprobs[2] -= 0.2 }, positions: 7, same: 7, total: 0.3},
		"large differences clipped":    {got: func(a *Answer) { a.Logprobs[0] = -50; a.PromptLogprobs[1] = -50 }, positions: 7, same: 7, total: 2 * far},
		"not a number":                 {got: func(a *Answer) { a.Logprobs[0], a.PromptLogprobs[0] = math.NaN(), math.NaN() }, positions: 7, same: 7, total: 2 * far},
		"another token":                {got: func(a *Answer) { a.Tokens[2], a.Logprobs[2] = " 5", -1 }, positions: 6, same: 5, total: 0.15},
		"what follows is not compared": {got: func(a *Answer) { a.Tokens[2], a.Logprobs[3] = " 5", -50 }, positions: 6, same: 5, total: 0.15},
		"another token, larger move":   {got: func(a *Answer) { a.Tokens[2], a.Logprobs[2] = " 5", -1.3 }, positions: 6, same: 5, total: 0.4},
		"another token, large margin":  {got: func(a *Answer) { a.Tokens[1] = " 5" }, positions: 5, same: 4, total: far},
		"shorter":                      {got: func(a *Answer) { cut(a, 2) }, positions: 6, same: 5, total: 0.15},
		"no token":                     {got: func(a *Answer) { cut(a, 0) }, positions: 4, same: 3, total: far},
		"longer":                       {want: func(a *Answer) { cut(a, 2) }, positions: 5, same: 5},
		"only tokens stored":           {want: func(a *Answer) { a.PromptLogprobs = nil }, positions: 4, same: 4},
		"only tokens returned":         {got: func(a *Answer) { a.PromptLogprobs = nil }, positions: 4, same: 4},
		"another tokenizer":            {got: func(a *Answer) { a.PromptLogprobs = a.PromptLogprobs[1:] }, positions: 4, same: 4},
		"nothing":                      {want: func(a *Answer) { cut(a, 0); a.PromptLogprobs = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			want, got := stored(), stored()
			if test.want != nil {
				test.want(&want)
			}
			if test.got != nil {
				test.got(&got)
			}
			d := Compare(want, got)
			if d.Positions != test.positions || d.Same != test.same || math.Abs(d.Total-test.total) > 1e-9 {
				t.Errorf("%+v, want %d positions, %d of them the same, total %v", d, test.positions, test.same, test.total)
			}
		})
	}
}

func shift(a *Answer, by float64) {
	for i := range a.PromptLogprobs {
		a.PromptLogprobs[i] -= by
	}
	for i := range a.Logprobs {
		a.Logprobs[i] -= by
	}
}

func cut(a *Answer, n int) {
	a.Tokens, a.Logprobs, a.Margins = a.Tokens[:n], a.Logprobs[:n], a.Margins[:n]
}

// responses returns n responses of each rank. Those of some ranks are shifted.
func responses(n, ranks int, shifted map[int]float64) []Response {
	var all []Response
	for i := range n * ranks {
		r := Response{Rank: i % ranks, Want: stored(), Got: stored()}
		shift(&r.Got, shifted[r.Rank])
		all = append(all, r)
	}
	return all
}

// TestJudge checks that each rank and all ranks together are judged, and that the allowed mean shrinks with the number
// of log-probabilities.
func TestJudge(t *testing.T) {
	const positions = 7
	allowed := func(n int) float64 { return Distance{Positions: n * positions}.Allowed() }
	for name, test := range map[string]struct {
		responses []Response
		fault     string
	}{
		"equal":                  {responses(3, 2, nil), ""},
		"below the bound":        {responses(3, 1, map[int]float64{0: allowed(3) - 0.01}), ""},
		"above the bound":        {responses(3, 1, map[int]float64{0: allowed(3) + 0.01}), "rank 0: 21 log-probabilities differ"},
		"more answers":           {responses(300, 1, map[int]float64{0: allowed(300) + 0.01}), "rank 0: 2100 log-probabilities differ"},
		"one of many ranks":      {responses(20, 16, map[int]float64{11: allowed(20) + 0.01}), "rank 11: 140 log-probabilities differ"},
		"every rank by a little": {responses(20, 16, everyRank(16, allowed(20)-0.01)), "the engine: 2240 log-probabilities differ"},
		"one token moved far":    {append(responses(20, 1, nil), Response{Want: stored(), Got: moved(1, 9)}), ""},
		"nothing compared":       {[]Response{{Want: Answer{Tokens: []string{"a"}, Logprobs: []float64{-1}, Margins: []float64{0.1}}, Got: Answer{Tokens: []string{"b"}, Logprobs: []float64{-1}}}}, errNothingCompared.Error()},
		"nothing answered":       {nil, errNothingCompared.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			err := Judge(test.responses)
			if test.fault == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var different *DifferenceError
			if err == nil || !strings.Contains(err.Error(), test.fault) || errors.As(err, &different) == errors.Is(err, errNothingCompared) {
				t.Errorf("%v, want %q", err, test.fault)
			}
		})
	}
}

func everyRank(ranks int, by float64) map[int]float64 {
	all := map[int]float64{}
	for rank := range ranks {
		all[rank] = by
	}
	return all
}

// moved returns the stored answer with one log-probability changed.
func moved(i int, by float64) Answer {
	a := stored()
	a.Logprobs[i] -= by
	return a
}

// TestDifferenceNamesThePrompt checks that the message names the prompt with the largest difference.
func TestDifferenceNamesThePrompt(t *testing.T) {
	all := responses(3, 1, map[int]float64{0: 0.9})
	all[1].Want.Prompt, all[1].Got = "the worst", moved(0, 9)
	shift(&all[1].Got, 5)
	if err := Judge(all); err == nil || !strings.Contains(err.Error(), `for the prompt "the worst"`) {
		t.Error(err)
	}
}

func TestQuoteIsOneShortLine(t *testing.T) {
	got := quote(strings.Repeat("é\n", 100))
	if strings.Contains(got, "\n") || !strings.HasSuffix(got, "…\"") || len(got) > 120 {
		t.Errorf("%d bytes: %s", len(got), got)
	}
}

func TestParse(t *testing.T) {
	completion := func(logprobs string) string { return `{"choices":[{"text":"x","logprobs":` + logprobs + `}]}` }
	for name, test := range map[string]struct {
		text    string
		logprob float64
		margin  float64
		fault   string
	}{
		"two alternatives":        {text: completion(`{"tokens":["a"],"token_logprobs":[-0.25],"top_logprobs":[{"a":-0.25,"b":-1.5}]}`), logprob: -0.25, margin: 1.25},
		"one more than requested": {text: completion(`{"tokens":["a"],"token_logprobs":[-0.25],"top_logprobs":[{"b":-1.5,"a":-0.25,"c":-1}]}`), logprob: -0.25, margin: 0.75},
		"texts shared":            {text: completion(`{"tokens":["�"],"token_logprobs":[-0.25],"top_logprobs":[{"�":-0.5}]}`), logprob: -0.25},
		"masked":                  {text: completion(`{"tokens":["a"],"token_logprobs":[0],"top_logprobs":[{"a":0,"b":-3.4028234663852886e38}]}`), margin: maxMargin},
		"not most likely":         {text: completion(`{"tokens":["a"],"token_logprobs":[-0.7],"top_logprobs":[{"b":-0.6}]}`), logprob: -0.7},
		"no alternative":          {text: completion(`{"tokens":["a"],"token_logprobs":[-0.7],"top_logprobs":null}`), logprob: -0.7},
		"null":                    {text: completion(`{"tokens":["a"],"token_logprobs":[null],"top_logprobs":[{"b":-0.6}]}`), logprob: math.NaN()},
		"alternative null":        {text: completion(`{"tokens":["a"],"token_logprobs":[-0.7],"top_logprobs":[{"b":null}]}`), logprob: -0.7},
		"cut off":                 {text: completion(`{"tokens":["a"],"token_logprobs":[-1e38],"top_logprobs":[{"b":-0.6}]}`), logprob: minLogprob},
		"no log-probability":      {text: completion(`null`), fault: "no log-probabilities"},
		"no choice":               {text: `{"choices":[]}`, fault: "no log-probabilities"},
		"fewer of them":           {text: completion(`{"tokens":["a","b"],"token_logprobs":[-1]}`), fault: "2 tokens and 1 log-probabilities"},
		"no JSON":                 {text: "<html>", fault: "as a completion"},
	} {
		t.Run(name, func(t *testing.T) {
			answer, err := parse("p", []byte(test.text))
			if test.fault != "" {
				if err == nil || !strings.Contains(err.Error(), test.fault) {
					t.Errorf("%v, want %q", err, test.fault)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			same := answer.Logprobs[0] == test.logprob || math.IsNaN(answer.Logprobs[0]) && math.IsNaN(test.logprob)
			if !same || !slices.Equal(answer.Margins, []float64{test.margin}) {
				t.Errorf("%+v, want log-probability %v and margin %v", answer, test.logprob, test.margin)
			}
		})
	}
}

// TestParseEcho covers engines that echo a prompt, which return its tokens before the generated ones, the first without
// a log-probability, and engines that ignore the request.
func TestParseEcho(t *testing.T) {
	completion := func(logprobs string, promptTokens int) string {
		return fmt.Sprintf(`{"choices":[{"logprobs":%s}],"usage":{"prompt_tokens":%d}}`, logprobs, promptTokens)
	}
	for name, test := range map[string]struct {
		text   string
		prompt []float64
		tokens []string
	}{
		"echoed":              {completion(`{"tokens":["a","b","c"],"token_logprobs":[null,-9,-1],"top_logprobs":[null,{"x":-2},{"c":-1}]}`, 2), []float64{-9}, []string{"c"}},
		"only the prompt":     {completion(`{"tokens":["a","b"],"token_logprobs":[null,-9]}`, 2), []float64{-9}, nil},
		"one prompt token":    {completion(`{"tokens":["a","b"],"token_logprobs":[null,-9]}`, 1), nil, []string{"b"}},
		"not echoed":          {completion(`{"tokens":["c"],"token_logprobs":[-1]}`, 2), nil, []string{"c"}},
		"longer prompt":       {completion(`{"tokens":["c"],"token_logprobs":[null]}`, 2), nil, []string{"c"}},
		"prompt without size": {completion(`{"tokens":["c"],"token_logprobs":[null]}`, -1), nil, []string{"c"}},
		"nothing":             {completion(`{"tokens":[],"token_logprobs":[]}`, 0), nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			answer, err := parse("p", []byte(test.text))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(answer.PromptLogprobs, test.prompt) || !slices.Equal(answer.Tokens, test.tokens) || len(answer.Logprobs) != len(test.tokens) {
				t.Errorf("%+v, want %v and %q", answer, test.prompt, test.tokens)
			}
		})
	}
}
