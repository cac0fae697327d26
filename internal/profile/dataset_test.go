// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func writeDataset(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "d.jsonl")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func manyDomains(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "{\"prompt\":\"a\",\"domain\":\"d%d\"}\n", i)
	}
	return b.String()
}

// TestDatasetFileFaults checks that a file that only a user can fix gives a DatasetError.
func TestDatasetFileFaults(t *testing.T) {
	dir := t.TempDir()
	file := writeDataset(t, `{"prompt":"a"}`)
	for path, want := range map[string]string{
		filepath.Join(dir, "nowhere.jsonl"): "does not exist: check the name of the file",
		dir:                                 "is a directory",
		filepath.Join(file, "x"):            "a part of the path is a file",
	} {
		_, err := InspectDataset(path)
		var invalid *DatasetError
		if !errors.As(err, &invalid) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, want %q", path, err, want)
		}
	}
}

func TestLoadDataset(t *testing.T) {
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
		"empty":                   {"\n\n", nil, "the file is empty"},
		"not JSON":                {"{\"prompt\":\"a\"}\nprompt: b", nil, "line 2 is not a supported JSON object"},
		"another type":            {`{"prompt":["a"]}`, nil, "line 1 is not a supported JSON object"},
		"no known member":         {`{"text":"a"}`, nil, "line 1 must have exactly one of prompt, messages and conversations"},
		"two members":             {`{"prompt":"a","messages":[{"role":"user","content":"b"}]}`, nil, "must have exactly one"},
		"empty prompt":            {`{"prompt":""}`, nil, "line 1: prompt is empty"},
		"empty conversation":      {`{"conversations":[]}`, nil, "line 1: the conversation is empty"},
		"too many domains":        {manyDomains(257), nil, "line 257 increases the number of domains to 257: the maximum is 256"},
		"too long a line":         {strings.Repeat("x", maxLine+1), nil, "line 1 is longer than"},
		"no role":                 {`{"messages":[{"content":"a"}]}`, nil, "line 1: message 1 has no role"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			path := writeDataset(t, tc.text)
			got, report, err := LoadDataset(path, 10, 1)
			if tc.message != "" {
				var invalid *DatasetError
				if !errors.As(err, &invalid) || !strings.Contains(err.Error(), tc.message) || !strings.Contains(err.Error(), path) {
					t.Errorf("error %v, want one with %q and the name of the file", err, tc.message)
				}
				return
			}
			inspected, inspectErr := InspectDataset(path)
			if inspectErr != nil || inspected != report || report.Requests != len(tc.want) || report.Bytes != int64(len(tc.text)) || report.Digest != fmt.Sprintf("%x", sha256.Sum256([]byte(tc.text))) {
				t.Errorf("reports %+v and %+v, %v", report, inspected, inspectErr)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
				t.Errorf("error %v, (-want +got):\n%s", err, diff)
			}
		})
	}
}

// TestLoadDatasetSamples checks that a sample has the requested size and the order of the file, depends only on the
// seed, and contains every line with the same probability.
func TestLoadDatasetSamples(t *testing.T) {
	const lines, limit, seeds = 50, 10, 2000
	path := writeDataset(t, strings.Repeat("{\"prompt\":\"x\"}\n", lines))
	var chosen [lines + 1]int
	for seed := range uint64(seeds) {
		items, _, err := LoadDataset(path, limit, seed)
		if err != nil || len(items) != limit {
			t.Fatalf("%d items, %v", len(items), err)
		}
		for i, item := range items {
			chosen[item.Line]++
			if i > 0 && item.Line <= items[i-1].Line {
				t.Fatalf("seed %d: line %d follows line %d", seed, item.Line, items[i-1].Line)
			}
		}
		again, _, _ := LoadDataset(path, limit, seed)
		if !cmp.Equal(items, again) {
			t.Fatalf("seed %d gives two different samples", seed)
		}
	}
	want := seeds * limit / lines
	for line, count := range chosen[1:] {
		if count < want*8/10 || count > want*12/10 {
			t.Errorf("line %d was chosen %d times, want about %d", line+1, count, want)
		}
	}
}
