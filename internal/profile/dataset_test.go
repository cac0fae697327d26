package profile

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadDataset(t *testing.T) {
	cases := map[string]struct {
		text    string
		want    []Item
		message string
	}{
		"prompt":   {`{"prompt":"a"}`, []Item{{Line: 1, Prompt: "a"}}, ""},
		"messages": {`{"messages":[{"role":"user","content":"a"}]}`, []Item{{Line: 1, Messages: []Message{{"user", "a"}}}}, ""},
		"ShareGPT": {
			`{"id":"x","conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"},{"from":"system","value":"c"}]}`,
			[]Item{{Line: 1, Messages: []Message{{"user", "a"}, {"assistant", "b"}, {"system", "c"}}}}, "",
		},
		"domains and blank lines": {"{\"prompt\":\"a\",\"domain\":\"code\"}\n\n  \n{\"prompt\":\"b\"}\n", []Item{{Line: 1, Prompt: "a", Domain: "code"}, {Line: 4, Prompt: "b"}}, ""},
		"empty":                   {"\n\n", nil, "the data set is empty"},
		"not JSON":                {"{\"prompt\":\"a\"}\nprompt: b", nil, "line 2 is not a JSON object"},
		"another type":            {`{"prompt":["a"]}`, nil, "line 1 is not a JSON object of the known form"},
		"nothing known":           {`{"text":"a"}`, nil, "line 1 has none, or more than one, of prompt, messages and conversations"},
		"two at once":             {`{"prompt":"a","messages":[{"role":"user","content":"b"}]}`, nil, "want exactly one"},
		"empty prompt":            {`{"prompt":""}`, nil, "line 1: prompt is empty"},
		"empty conversation":      {`{"conversations":[]}`, nil, "line 1: the conversation is empty"},
		"no role":                 {`{"messages":[{"content":"a"}]}`, nil, "line 1: message 1 has no role"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got, err := ReadDataset(strings.NewReader(tc.text), 10, 1)
			if tc.message != "" {
				if err == nil || !strings.Contains(err.Error(), tc.message) {
					t.Errorf("error %v, want one with %q", err, tc.message)
				}
				return
			}
			if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
				t.Errorf("error %v, (-want +got):\n%s", err, diff)
			}
		})
	}
}

// A sample has the asked size, keeps the order of the file, is decided by the seed, and every line has the same chance.
func TestReadDatasetSamples(t *testing.T) {
	const lines, limit, seeds = 50, 10, 2000
	text := strings.Repeat("{\"prompt\":\"x\"}\n", lines)
	var chosen [lines + 1]int
	for seed := range uint64(seeds) {
		items, err := ReadDataset(strings.NewReader(text), limit, seed)
		if err != nil || len(items) != limit {
			t.Fatalf("%d items, %v", len(items), err)
		}
		for i, item := range items {
			chosen[item.Line]++
			if i > 0 && item.Line <= items[i-1].Line {
				t.Fatalf("seed %d: line %d follows line %d", seed, item.Line, items[i-1].Line)
			}
		}
		again, _ := ReadDataset(strings.NewReader(text), limit, seed)
		if !cmp.Equal(items, again) {
			t.Fatalf("seed %d gives two samples", seed)
		}
	}
	want := seeds * limit / lines
	for line, count := range chosen[1:] {
		if count < want*8/10 || count > want*12/10 {
			t.Errorf("line %d was chosen %d times, want about %d", line+1, count, want)
		}
	}
}
