package lossless

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

// stored is an answer with four tokens, of which the third was a close choice.
func stored() Answer {
	return Answer{
		Prompt: "one two", Tokens: []string{" three", " four", " five", " six"},
		Logprobs: []float64{-0.2, -0.4, -0.9, -0.1}, Margins: []float64{2, 3, 0.3, 4},
	}
}

func TestCompare(t *testing.T) {
	const large = SmallMargin + 0.01
	for name, test := range map[string]struct {
		want, got       func(*Answer)
		positions, same int
		fault           string // of Compare, or of the drift
	}{
		"equal":                   {positions: 4, same: 4},
		"small drift":             {got: func(a *Answer) { a.Logprobs[0] += 0.1; a.Logprobs[2] -= 0.2 }, positions: 4, same: 4},
		"at the tolerance":        {got: func(a *Answer) { a.Logprobs[1] = -0.9 }, positions: 4, same: 4, fault: "0.1250 away"},
		"above the tolerance":     {got: func(a *Answer) { a.Logprobs[1] = -0.91 }, fault: `prompt "one two", position 1: the log-probability of token " four" is -0.9100, without the plan that of " four" is -0.4000`},
		"mean drift":              {got: func(a *Answer) { shift(a, 0.11) }, positions: 4, same: 4, fault: "of 4 tokens are 0.1100 away from those without the plan in the mean; allowed is 0.1"},
		"mean at its tolerance":   {got: func(a *Answer) { shift(a, 0.09) }, positions: 4, same: 4},
		"not a number":            {got: func(a *Answer) { a.Logprobs[0] = math.NaN() }, fault: "is NaN"},
		"flip, small margin":      {got: func(a *Answer) { a.Tokens[2], a.Logprobs[2] = " 5", -1; a.Tokens[3] = "?" }, positions: 3, same: 2},
		"flip, garbage follows":   {got: func(a *Answer) { a.Tokens[2], a.Logprobs[3] = " 5", -50 }, positions: 3, same: 2},
		"flip, but another level": {got: func(a *Answer) { a.Tokens[2], a.Logprobs[2] = " 5", -3 }, fault: `position 2: the log-probability of token " 5" is -3.0000, without the plan that of " five" is -0.9000`},
		"flip, large margin": {
			want: func(a *Answer) { a.Margins[2] = large }, got: func(a *Answer) { a.Tokens[2] = " 5" },
			fault: `position 2: the token is " 5" (log-probability -0.9000), without the plan " five" (-0.9000), by a margin of 0.5100; another token is allowed up to 0.5`,
		},
		"flip at the first token":   {want: func(a *Answer) { a.Margins[0] = SmallMargin }, got: func(a *Answer) { a.Tokens[0] = "x" }, positions: 1, fault: ErrNothingCompared.Error()},
		"shorter, small margin":     {got: func(a *Answer) { cut(a, 2) }, positions: 2, same: 2},
		"shorter, large margin":     {got: func(a *Answer) { cut(a, 3) }, fault: `position 3: the answer ends, without the plan it goes on with token " six"`},
		"no token":                  {got: func(a *Answer) { cut(a, 0) }, fault: "position 0: the answer ends"},
		"longer":                    {want: func(a *Answer) { cut(a, 3) }, fault: `position 3: the answer goes on with token " six" (log-probability -0.1000), without the plan it ends`},
		"nothing on either side":    {want: func(a *Answer) { cut(a, 0) }, got: func(a *Answer) { cut(a, 0) }, fault: ErrNothingCompared.Error()},
		"token is only a beginning": {got: func(a *Answer) { a.Tokens[3] = " s" }, fault: `the token is " s"`},
	} {
		t.Run(name, func(t *testing.T) {
			want, got := stored(), stored()
			if test.want != nil {
				test.want(&want)
			}
			if test.got != nil {
				test.got(&got)
			}
			drift, err := Compare(want, got)
			if err == nil {
				if drift.Positions != test.positions || drift.Same != test.same {
					t.Errorf("%d positions, %d of them the same; want %d, %d", drift.Positions, drift.Same, test.positions, test.same)
				}
				err = drift.Err()
			}
			if test.fault == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var difference *DifferenceError
			if err == nil || !strings.Contains(err.Error(), test.fault) || errors.As(err, &difference) == errors.Is(err, ErrNothingCompared) {
				t.Errorf("%v, want %q", err, test.fault)
			}
		})
	}
}

func shift(a *Answer, by float64) {
	for i := range a.Logprobs {
		a.Logprobs[i] -= by
	}
}

func cut(a *Answer, n int) {
	a.Tokens, a.Logprobs, a.Margins = a.Tokens[:n], a.Logprobs[:n], a.Margins[:n]
}

// A mean is over all prompts: one that drifts is noise among others that do not.
func TestDriftIsOverAllPrompts(t *testing.T) {
	drifted := stored()
	shift(&drifted, 0.3)
	far, err := Compare(stored(), drifted)
	if err != nil {
		t.Fatal(err)
	}
	near, err := Compare(stored(), stored())
	if err != nil {
		t.Fatal(err)
	}
	if far.Err() == nil || far.plus(near).Err() == nil {
		t.Error("means of 0.3 and 0.15 are accepted")
	}
	if err := far.plus(near).plus(near).plus(near).Err(); err != nil {
		t.Errorf("a mean of 0.075: %v", err)
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
		"two tokens told":     {text: completion(`{"tokens":["a"],"token_logprobs":[-0.25],"top_logprobs":[{"a":-0.25,"b":-1.5}]}`), logprob: -0.25, margin: 1.25},
		"one more than asked": {text: completion(`{"tokens":["a"],"token_logprobs":[-0.25],"top_logprobs":[{"b":-1.5,"a":-0.25,"c":-1}]}`), logprob: -0.25, margin: 0.75},
		"texts shared":        {text: completion(`{"tokens":["�"],"token_logprobs":[-0.25],"top_logprobs":[{"�":-0.5}]}`), logprob: -0.25},
		"masked":              {text: completion(`{"tokens":["a"],"token_logprobs":[0],"top_logprobs":[{"a":0,"b":-3.4028234663852886e38}]}`), margin: mostMargin},
		"not the first":       {text: completion(`{"tokens":["a"],"token_logprobs":[-0.7],"top_logprobs":[{"b":-0.6}]}`), logprob: -0.7},
		"nothing else told":   {text: completion(`{"tokens":["a"],"token_logprobs":[-0.7],"top_logprobs":null}`), logprob: -0.7},
		"null":                {text: completion(`{"tokens":["a"],"token_logprobs":[null],"top_logprobs":[{"b":-0.6}]}`), logprob: math.NaN()},
		"alternative null":    {text: completion(`{"tokens":["a"],"token_logprobs":[-0.7],"top_logprobs":[{"b":null}]}`), logprob: -0.7},
		"no log-probability":  {text: completion(`null`), fault: "no log-probabilities"},
		"no choice":           {text: `{"choices":[]}`, fault: "no log-probabilities"},
		"fewer of them":       {text: completion(`{"tokens":["a","b"],"token_logprobs":[-1]}`), fault: "2 tokens and 1 log-probabilities"},
		"no JSON":             {text: "<html>", fault: "no completion"},
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
