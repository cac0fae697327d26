// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

const tinyModel = "testdata/tiny-qwen3moe"

// running is an engine under test with a real listener.
type running struct {
	url  string
	stop context.CancelFunc
	done chan error
}

// start runs an engine until the test ends, and waits until it is healthy.
func start(t testing.TB, change func(*Options)) *running {
	t.Helper()
	o := DefaultOptions()
	o.ModelPath, o.ServedModelName, o.Threads = tinyModel, "tiny", 2
	o.Getenv = func(string) string { return "" }
	if change != nil {
		change(&o)
	}
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	e := &running{url: "http://" + listener.Addr().String(), stop: stop, done: make(chan error, 1)}
	go func() { e.done <- serve(ctx, listener, o) }()
	t.Cleanup(func() {
		stop()
		select {
		case err := <-e.done:
			if err != nil {
				t.Errorf("engine ended with %v", err)
			}
		case <-time.After(30 * time.Second):
			t.Error("engine does not stop")
		}
	})
	e.until(t, "healthy", func() bool { return e.get(t, "/health").status == http.StatusOK })
	return e
}

func fourRanks(o *Options) {
	o.TPSize, o.DPSize, o.EPSize, o.EnableDPAttention, o.EnableReturnRoutedExperts = 4, 4, 4, true, true
}

// until polls with a deadline.
func (e *running) until(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not %s within 30 s", what)
		}
	}
}

type answer struct {
	status int
	body   []byte
}

func (e *running) get(t testing.TB, path string) answer {
	t.Helper()
	response, err := http.Get(e.url + path)
	return read(t, response, err)
}

func (e *running) post(t testing.TB, path string, body any, header ...string) answer {
	t.Helper()
	response, err := e.send(context.Background(), path, body, header...)
	return read(t, response, err)
}

// send posts a body, JSON unless it is a string.
func (e *running) send(ctx context.Context, path string, body any, header ...string) (*http.Response, error) {
	text, ok := body.(string)
	if !ok {
		raw, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		text = string(raw)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+path, strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return http.DefaultClient.Do(r)
}

func read(t testing.TB, response *http.Response, err error) answer {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{response.StatusCode, body}
}

// into decodes a successful response.
func (a answer) into(t *testing.T, value any) {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	if err := json.Unmarshal(a.body, value); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
}

// events returns the data of a stream of server-sent events. Each event must end with an empty line, and the last one
// must be [DONE].
func (a answer) events(t *testing.T) []string {
	t.Helper()
	if a.status != http.StatusOK || !bytes.HasSuffix(a.body, []byte("\n\n")) {
		t.Fatalf("status %d, stream %q", a.status, a.body)
	}
	var list []string
	for event := range strings.SplitSeq(strings.TrimSuffix(string(a.body), "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok || strings.Contains(data, "\n") {
			t.Fatalf("not an event: %q", event)
		}
		list = append(list, data)
	}
	if list[len(list)-1] != "[DONE]" {
		t.Fatalf("stream ends with %q", list[len(list)-1])
	}
	return list[:len(list)-1]
}

type completion struct {
	ID, Object, Model string
	Choices           []struct {
		Text         string
		Message      struct{ Role, Content string }
		Delta        struct{ Role, Content string }
		FinishReason *string `json:"finish_reason"`
		MatchedStop  any     `json:"matched_stop"`
		Logprobs     *struct {
			Tokens        []string
			TokenLogprobs []float64            `json:"token_logprobs"`
			TopLogprobs   []map[string]float64 `json:"top_logprobs"`
		}
	}
	Usage  *struct{ PromptTokens, CompletionTokens, TotalTokens int }
	SGLExt *struct {
		RoutedExperts string `json:"routed_experts"`
	}
}

func (c *completion) UnmarshalJSON(text []byte) error {
	type plain completion
	value := struct {
		*plain
		Usage *struct {
			PromptTokens     int `json:"prompt_tokens"`
			CompletionTokens int `json:"completion_tokens"`
			TotalTokens      int `json:"total_tokens"`
		} `json:"usage"`
	}{plain: (*plain)(c)}
	if err := json.Unmarshal(text, &value); err != nil {
		return err
	}
	c.Usage = (*struct{ PromptTokens, CompletionTokens, TotalTokens int })(value.Usage)
	return nil
}

type generated struct {
	Text      string  `json:"text"`
	OutputIDs []int32 `json:"output_ids"`
	MetaInfo  struct {
		ID                  string         `json:"id"`
		FinishReason        map[string]any `json:"finish_reason"`
		PromptTokens        int            `json:"prompt_tokens"`
		CompletionTokens    int            `json:"completion_tokens"`
		CachedTokens        *int           `json:"cached_tokens"`
		DPRank              *int           `json:"dp_rank"`
		RoutedExperts       string         `json:"routed_experts"`
		E2ELatency          float64        `json:"e2e_latency"`
		InputTokenLogprobs  [][3]any       `json:"input_token_logprobs"`
		OutputTokenLogprobs [][3]any       `json:"output_token_logprobs"`
		OutputTopLogprobs   [][][3]any     `json:"output_top_logprobs"`
	} `json:"meta_info"`
}

type goldenCase struct {
	Name       string    `json:"name"`
	Text       string    `json:"text"`
	PromptIDs  []int32   `json:"prompt_ids"`
	GreedyIDs  []int32   `json:"greedy_ids"`
	Margins    []float64 `json:"greedy_margin"`
	GreedyText string    `json:"greedy_text"`
	// Experts is [layers][tokens][top-k].
	Experts [][][]int32 `json:"experts_by_layer"`
}

func golden(t testing.TB) []goldenCase {
	t.Helper()
	text, err := os.ReadFile(tinyModel + "/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Cases []goldenCase `json:"cases"`
	}
	if err := json.Unmarshal(text, &file); err != nil || len(file.Cases) == 0 {
		t.Fatalf("%d golden cases, %v", len(file.Cases), err)
	}
	for _, c := range file.Cases {
		if slices.Min(c.Margins) < 1e-3 {
			t.Fatalf("golden case %s has a margin below 1e-3; comparing whole texts is not sound for it", c.Name)
		}
	}
	return file.Cases
}
