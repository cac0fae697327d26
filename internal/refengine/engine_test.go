package refengine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

const tinyModel = "testdata/tiny-qwen3moe"

// running is an engine under test on a real listener.
type running struct {
	url  string
	stop context.CancelFunc
	done chan error
}

// start runs an engine until the test ends and waits for it to be healthy.
func start(t testing.TB, change func(*Options)) *running {
	t.Helper()
	o := DefaultOptions()
	o.ModelPath, o.ServedModelName, o.Threads = tinyModel, "tiny", 2
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

// into decodes a successful answer.
func (a answer) into(t *testing.T, value any) {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	if err := json.Unmarshal(a.body, value); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
}

// events are the data of a stream of server-sent events; each must end with an empty line and the last be [DONE].
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

// Greedy completions must be the reference's, all at once, streamed and not, from text and from token ids.
func TestCompletionsMatchGolden(t *testing.T) {
	e := start(t, nil)
	var wg sync.WaitGroup
	for i, g := range golden(t) {
		prompts := []any{g.Text}
		if i == 0 {
			prompts = append(prompts, []string{g.Text}, g.PromptIDs, [][]int32{g.PromptIDs})
		}
		wg.Go(func() {
			for _, prompt := range prompts {
				body := map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": len(g.GreedyIDs), "ignore_eos": true}
				response, err := e.send(context.Background(), "/v1/completions", body)
				if err != nil {
					t.Error(err)
					return
				}
				var c completion
				if err := json.NewDecoder(response.Body).Decode(&c); err != nil {
					t.Error(err)
				}
				response.Body.Close()
				if len(c.Choices) != 1 || c.Choices[0].Text != g.GreedyText || *c.Choices[0].FinishReason != "length" {
					t.Errorf("%s: got %+v, want %q", g.Name, c.Choices, g.GreedyText)
					return
				}
				if u := *c.Usage; u.PromptTokens != len(g.PromptIDs) || u.CompletionTokens != len(g.GreedyIDs) || u.TotalTokens != u.PromptTokens+u.CompletionTokens {
					t.Errorf("%s: usage %+v", g.Name, u)
				}
				if c.Object != "text_completion" || c.Model != "tiny" || !strings.HasPrefix(c.ID, "cmpl-") {
					t.Errorf("%s: head %+v", g.Name, c)
				}
			}
		})
	}
	wg.Wait()
}

func TestStreamEqualsWhole(t *testing.T) {
	e := start(t, fourRanks)
	for _, g := range golden(t)[10:] { // among them characters that are split over tokens
		body := map[string]any{"prompt": g.Text, "max_tokens": 40, "return_routed_experts": true, "logprobs": 2}
		var whole completion
		e.post(t, "/v1/completions", body).into(t, &whole)

		body["stream"], body["stream_options"] = true, map[string]any{"include_usage": true}
		events := e.post(t, "/v1/completions", body).events(t)
		var text, reason, routes string
		var logprobs []float64
		var parts []completion
		for _, event := range events {
			var c completion
			if err := json.Unmarshal([]byte(event), &c); err != nil {
				t.Fatal(err)
			}
			parts = append(parts, c)
			for _, choice := range c.Choices {
				text += choice.Text
				if choice.FinishReason != nil {
					reason += *choice.FinishReason
				}
				if choice.Logprobs != nil {
					logprobs = append(logprobs, choice.Logprobs.TokenLogprobs...)
				}
			}
			if c.SGLExt != nil {
				routes = c.SGLExt.RoutedExperts
			}
		}
		if text != whole.Choices[0].Text || reason != *whole.Choices[0].FinishReason || routes != whole.SGLExt.RoutedExperts || routes == "" {
			t.Errorf("%s: stream gives %q (%s), whole %q (%s); routes equal: %v", g.Name, text, reason, whole.Choices[0].Text, *whole.Choices[0].FinishReason, routes == whole.SGLExt.RoutedExperts)
		}
		if !slices.Equal(logprobs, whole.Choices[0].Logprobs.TokenLogprobs) || len(logprobs) != 40 {
			t.Errorf("%s: log probabilities differ", g.Name)
		}
		last := parts[len(parts)-1]
		if len(last.Choices) != 0 || last.Usage == nil || *last.Usage != *whole.Usage || parts[0].Usage != nil {
			t.Errorf("%s: usage comes as %+v", g.Name, last)
		}
		if len(parts) < 40 {
			t.Errorf("%s: %d parts for 40 tokens", g.Name, len(parts))
		}
	}
}

func TestChatCompletions(t *testing.T) {
	e := start(t, nil)
	messages := []any{
		map[string]any{"role": "system", "content": "You answer."},
		map[string]any{"role": "user", "content": []any{map[string]any{"type": "text", "text": "Wie "}, map[string]any{"type": "text", "text": "geht es?"}}},
	}
	var plain, chat completion
	e.post(t, "/v1/completions", map[string]any{"prompt": "system: You answer.\nuser: Wie geht es?\nassistant:", "max_tokens": 20}).into(t, &plain)
	body := map[string]any{"messages": messages, "max_completion_tokens": 20}
	e.post(t, "/v1/chat/completions", body).into(t, &chat)
	if got := chat.Choices[0].Message; got.Role != "assistant" || got.Content != plain.Choices[0].Text || chat.Object != "chat.completion" {
		t.Errorf("got %+v, want %q", chat, plain.Choices[0].Text)
	}
	body["stream"] = true
	var text, role string
	for i, event := range e.post(t, "/v1/chat/completions", body).events(t) {
		var c completion
		if err := json.Unmarshal([]byte(event), &c); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			role = c.Choices[0].Delta.Role
		}
		text += c.Choices[0].Delta.Content
		if c.Object != "chat.completion.chunk" {
			t.Errorf("object %q", c.Object)
		}
	}
	if role != "assistant" || text != plain.Choices[0].Text {
		t.Errorf("stream gives %s: %q", role, text)
	}
}

func TestGenerate(t *testing.T) {
	e := start(t, fourRanks)
	g := golden(t)[0]
	for _, input := range []map[string]any{{"text": g.Text}, {"input_ids": g.PromptIDs}} {
		input["sampling_params"] = map[string]any{"max_new_tokens": 40, "temperature": 0, "ignore_eos": true}
		input["return_logprob"], input["top_logprobs_num"] = true, 3
		var whole generated
		e.post(t, "/generate", input, "X-Data-Parallel-Rank", "2").into(t, &whole)
		if whole.Text != g.GreedyText || !slices.Equal(whole.OutputIDs, g.GreedyIDs) {
			t.Errorf("got %q, want %q", whole.Text, g.GreedyText)
		}
		m := whole.MetaInfo
		if m.PromptTokens != len(g.PromptIDs) || m.CompletionTokens != 40 || m.CachedTokens == nil || m.DPRank == nil || *m.DPRank != 2 ||
			m.ID == "" || m.E2ELatency <= 0 || m.FinishReason["type"] != "length" || m.FinishReason["length"] != 40.0 || m.RoutedExperts != "" {
			t.Errorf("meta_info %+v", m)
		}
		for i, margin := range g.Margins {
			top := m.OutputTopLogprobs[i]
			if len(top) != 3 || top[0][1] != float64(g.GreedyIDs[i]) || top[0][0] != m.OutputTokenLogprobs[i][0] {
				t.Fatalf("token %d: top %v, token %v", i, top, m.OutputTokenLogprobs[i])
			}
			if got := top[0][0].(float64) - top[1][0].(float64); got < margin-1e-3 || got > margin+1e-3 {
				t.Errorf("token %d: margin %v, want %v", i, got, margin)
			}
		}
		input["stream"] = true
		events := e.post(t, "/generate", input, "X-Data-Parallel-Rank", "2").events(t)
		var last generated
		previous := ""
		for _, event := range events {
			if err := json.Unmarshal([]byte(event), &last); err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(last.Text, previous) {
				t.Fatalf("%q does not continue %q", last.Text, previous)
			}
			previous = last.Text
		}
		if last.Text != whole.Text || !slices.Equal(last.OutputIDs, whole.OutputIDs) {
			t.Errorf("stream ends with %q", last.Text)
		}
	}
}

func TestStops(t *testing.T) {
	e := start(t, nil)
	g := golden(t)[0]
	run := func(path string, body map[string]any) completion {
		t.Helper()
		body["prompt"], body["max_tokens"] = g.Text, 40
		var c completion
		e.post(t, path, body).into(t, &c)
		return c
	}
	// A stop string in the middle of the answer, which begins and ends within tokens.
	stop := g.GreedyText[7:13]
	for _, stops := range []any{stop, []string{"never in the text", stop}} {
		c := run("/v1/completions", map[string]any{"stop": stops})
		if want, _, _ := strings.Cut(g.GreedyText, stop); c.Choices[0].Text != want || *c.Choices[0].FinishReason != "stop" || c.Choices[0].MatchedStop != stop {
			t.Errorf("stop %q: got %+v, want %q", stops, c.Choices[0], want)
		}
		if c.Usage.CompletionTokens >= 40 {
			t.Error("generation went on after the stop string")
		}
		body := map[string]any{"stop": stops, "prompt": g.Text, "max_tokens": 40, "stream": true}
		streamed := ""
		for _, event := range e.post(t, "/v1/completions", body).events(t) {
			var part completion
			if err := json.Unmarshal([]byte(event), &part); err != nil {
				t.Fatal(err)
			}
			streamed += part.Choices[0].Text
		}
		if streamed != c.Choices[0].Text {
			t.Errorf("stop %q: stream gives %q, whole %q", stops, streamed, c.Choices[0].Text)
		}
	}
	c := run("/v1/completions", map[string]any{"stop_token_ids": []int32{g.GreedyIDs[5]}})
	first := slices.Index(g.GreedyIDs, g.GreedyIDs[5])
	if *c.Choices[0].FinishReason != "stop" || c.Usage.CompletionTokens != first+1 || c.Choices[0].MatchedStop != float64(g.GreedyIDs[5]) {
		t.Errorf("stop token: got %+v, usage %+v", c.Choices[0], *c.Usage)
	}
	if c := run("/v1/completions", map[string]any{"stop_token_ids": []int32{g.GreedyIDs[5]}, "ignore_eos": true}); c.Choices[0].Text != g.GreedyText {
		t.Error("ignore_eos does not ignore stop tokens")
	}
}

func TestSampling(t *testing.T) {
	e := start(t, nil)
	g := golden(t)[6]
	texts := map[string]int{}
	run := func(change map[string]any) string {
		t.Helper()
		body := map[string]any{"prompt": g.Text, "max_tokens": 20, "temperature": 1.0}
		for k, v := range change {
			body[k] = v
		}
		var c completion
		e.post(t, "/v1/completions", body).into(t, &c)
		return c.Choices[0].Text
	}
	for seed := range 4 {
		text := run(map[string]any{"seed": seed})
		if again := run(map[string]any{"seed": seed}); again != text {
			t.Errorf("seed %d gives %q, then %q", seed, text, again)
		}
		texts[text]++
	}
	if len(texts) < 2 {
		t.Error("four seeds give one text")
	}
	greedy := run(map[string]any{"temperature": 0})
	for name, change := range map[string]map[string]any{"top_k 1": {"top_k": 1}, "tiny top_p": {"top_p": 1e-9}, "cold": {"temperature": 1e-4}} {
		if got := run(change); got != greedy {
			t.Errorf("%s gives %q, want the greedy %q", name, got, greedy)
		}
	}
}

func TestRefusals(t *testing.T) {
	e := start(t, func(o *Options) {
		fourRanks(o)
		o.EnableReturnRoutedExperts, o.ContextLength = false, 256
	})
	long := strings.Repeat("word ", 400)
	for name, test := range map[string]struct {
		path   string
		body   any
		status int
		want   string
		header []string
	}{
		"not JSON":             {"/v1/completions", "{", 400, "not a JSON object", nil},
		"array":                {"/v1/completions", "[]", 400, "not a JSON object", nil},
		"no prompt":            {"/v1/completions", `{}`, 400, "prompt is missing", nil},
		"empty prompt":         {"/v1/completions", `{"prompt":""}`, 400, "prompt is empty", nil},
		"two prompts":          {"/v1/completions", `{"prompt":["a","b"]}`, 400, "2 entries", nil},
		"prompt is object":     {"/v1/completions", `{"prompt":{}}`, 400, "string or a list of token ids", nil},
		"token too large":      {"/v1/completions", `{"prompt":[1,4096]}`, 400, "token 1 of the prompt is 4096; allowed is 0 to 4095", nil},
		"negative token":       {"/v1/completions", `{"prompt":[-1]}`, 400, "allowed is 0 to 4095", nil},
		"prompt too long":      {"/v1/completions", map[string]any{"prompt": long}, 400, "the context length is 256 tokens", nil},
		"too many tokens":      {"/v1/completions", `{"prompt":[1],"max_tokens":256}`, 400, "max_tokens is 256; the context length of 256 tokens leaves 255", nil},
		"negative max_tokens":  {"/v1/completions", `{"prompt":[1],"max_tokens":-1}`, 400, "max_tokens is -1", nil},
		"max_tokens a string":  {"/v1/completions", `{"prompt":[1],"max_tokens":"5"}`, 400, "max_tokens has the wrong type", nil},
		"unknown model":        {"/v1/completions", `{"model":"gpt","prompt":[1]}`, 404, `"gpt" does not exist; this engine serves "tiny"`, nil},
		"temperature":          {"/v1/completions", `{"prompt":[1],"temperature":-0.1}`, 400, "temperature is -0.1", nil},
		"top_p":                {"/v1/completions", `{"prompt":[1],"top_p":0}`, 400, "top_p is 0", nil},
		"top_k":                {"/v1/completions", `{"prompt":[1],"top_k":-2}`, 400, "top_k is -2", nil},
		"n":                    {"/v1/completions", `{"prompt":[1],"n":2}`, 400, "n 2 is not supported", nil},
		"echo":                 {"/v1/completions", `{"prompt":[1],"echo":true}`, 400, "echo true is not supported", nil},
		"penalty":              {"/v1/completions", `{"prompt":[1],"presence_penalty":0.5}`, 400, "presence_penalty", nil},
		"empty stop":           {"/v1/completions", `{"prompt":[1],"stop":[""]}`, 400, "stop has an empty string", nil},
		"stop is a number":     {"/v1/completions", `{"prompt":[1],"stop":3}`, 400, "stop must be a string or a list", nil},
		"logprobs":             {"/v1/completions", `{"prompt":[1],"logprobs":99}`, 400, "logprobs is 99; allowed is 0 to 20", nil},
		"routes not enabled":   {"/v1/completions", `{"prompt":[1],"return_routed_experts":true}`, 400, "--enable-return-routed-experts", nil},
		"rank no integer":      {"/v1/completions", `{"prompt":[1]}`, 400, `"one"; it must be an integer`, []string{"X-Data-Parallel-Rank", "one"}},
		"rank too large":       {"/v1/completions", `{"prompt":[1]}`, 400, "X-Data-Parallel-Rank is 4; allowed is 0 to 3", []string{"X-Data-Parallel-Rank", "4"}},
		"negative rank":        {"/generate", `{"input_ids":[1]}`, 400, "is -1; allowed is 0 to 3", []string{"X-Data-Parallel-Rank", "-1"}},
		"routed_dp_rank":       {"/generate", `{"input_ids":[1],"routed_dp_rank":7}`, 400, "routed_dp_rank is 7; allowed is 0 to 3", nil},
		"data_parallel_rank":   {"/v1/completions", `{"prompt":[1],"data_parallel_rank":9}`, 400, "data_parallel_rank is 9", nil},
		"no messages":          {"/v1/chat/completions", `{}`, 400, "messages is empty", nil},
		"unknown role":         {"/v1/chat/completions", `{"messages":[{"role":"robot","content":"x"}]}`, 400, `role "robot"`, nil},
		"image":                {"/v1/chat/completions", `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, 400, `"image_url"`, nil},
		"tools":                {"/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"tools":[{}]}`, 400, "tools", nil},
		"text and ids":         {"/generate", `{"text":"a","input_ids":[1]}`, 400, "either text or input_ids", nil},
		"neither":              {"/generate", `{}`, 400, "either text or input_ids", nil},
		"params of generate":   {"/generate", `{"text":"a","sampling_params":{"max_new_tokens":-3}}`, 400, "max_new_tokens is -3", nil},
		"regex of generate":    {"/generate", `{"text":"a","sampling_params":{"regex":"x+"}}`, 400, "regex", nil},
		"body too large":       {"/generate", `{"text":"` + strings.Repeat("a", 17<<20) + `"}`, 413, "larger than the limit", nil},
		"tokenize both":        {"/v1/tokenize", `{"prompt":"a","messages":[]}`, 400, "either prompt or messages", nil},
		"tokenize a number":    {"/tokenize", `{"prompt":3}`, 400, "string or a list of strings", nil},
		"no such route":        {"/v1/embeddings", `{}`, 404, "no route POST /v1/embeddings", nil},
		"stream refused early": {"/v1/completions", `{"prompt":"","stream":true}`, 400, "prompt is empty", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := e.post(t, test.path, test.body, test.header...)
			var body struct {
				Error struct{ Message, Type string } `json:"error"`
			}
			if err := json.Unmarshal(got.body, &body); err != nil {
				t.Fatalf("%v: %s", err, got.body)
			}
			if got.status != test.status || !strings.Contains(body.Error.Message, test.want) || body.Error.Type == "" {
				t.Errorf("got %d %s, want %d with %q", got.status, got.body, test.status, test.want)
			}
		})
	}
	// Unknown fields, and supported ones that say "not used", are no error.
	var c completion
	e.post(t, "/v1/completions", `{"prompt":[1],"max_tokens":0,"user":"me","unknown":{},"n":1,"echo":false,"best_of":null,"presence_penalty":0,"logit_bias":{},"stop":null}`).into(t, &c)
	if c.Choices[0].Text != "" || c.Usage.CompletionTokens != 0 {
		t.Errorf("max_tokens 0 gives %+v", c)
	}
}

func decodeRoutes(t *testing.T, wire string, layers, topK int) [][][]int32 {
	t.Helper()
	raw, err := base64.StdEncoding.DecodeString(wire)
	if err != nil || len(raw)%(4*layers*topK) != 0 {
		t.Fatalf("%d bytes of routes, %v", len(raw), err)
	}
	values := make([]int32, len(raw)/4)
	if err := binary.Read(bytes.NewReader(raw), binary.LittleEndian, values); err != nil {
		t.Fatal(err)
	}
	var tokens [][][]int32
	for token := range slices.Chunk(values, layers*topK) {
		tokens = append(tokens, slices.Collect(slices.Chunk(token, topK)))
	}
	return tokens
}

// metric reads a sample of /metrics by its whole name, labels included.
func (e *running) metric(t *testing.T, name string) float64 {
	t.Helper()
	lines := bufio.NewScanner(bytes.NewReader(e.get(t, "/metrics").body))
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			var number float64
			if _, err := fmt.Sscan(value, &number); err != nil {
				t.Fatal(err)
			}
			return number
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// Every activation is counted once, as local exactly if the map puts the expert on the rank of the request; the outputs
// are those of the trivial map.
func TestRanksRoutesAndAccounting(t *testing.T) {
	const ranks, layers, experts, topK = 4, 4, 32, 4
	// A map with four redundant slots, different in each layer: 36 slots, nine on each rank.
	rows := make([][]int, layers)
	onRank := make([]map[[2]int32]bool, ranks)
	for l := range rows {
		for p := range experts + 4 {
			expert := (p*5 + 7*l) % experts
			rows[l] = append(rows[l], expert)
			if onRank[p/9] == nil {
				onRank[p/9] = map[[2]int32]bool{}
			}
			onRank[p/9][[2]int32{int32(l), int32(expert)}] = true
		}
	}
	text, err := json.Marshal(map[string]any{"physical_to_logical_map": rows})
	if err != nil {
		t.Fatal(err)
	}
	e := start(t, func(o *Options) {
		fourRanks(o)
		o.InitExpertLocation, o.RedundantExperts = string(text), 4
	})
	var want [ranks][2]float64
	for i, g := range golden(t) {
		rank := i % ranks
		body := map[string]any{"text": g.Text, "sampling_params": map[string]any{"max_new_tokens": 40, "ignore_eos": true}, "return_routed_experts": true}
		header := []string{}
		switch i % 3 {
		case 0:
			body["routed_dp_rank"] = rank
		case 1:
			body["data_parallel_rank"] = rank
		default:
			body["routed_dp_rank"] = (rank + 1) % ranks // the header wins
			header = []string{"X-Data-Parallel-Rank", fmt.Sprint(rank)}
		}
		var out generated
		e.post(t, "/generate", body, header...).into(t, &out)
		if out.Text != g.GreedyText || *out.MetaInfo.DPRank != rank {
			t.Errorf("%s: rank %d gives %q", g.Name, *out.MetaInfo.DPRank, out.Text)
		}
		tokens := decodeRoutes(t, out.MetaInfo.RoutedExperts, layers, topK)
		if len(tokens) != len(g.PromptIDs)+40-1 {
			t.Fatalf("%s: routes of %d tokens, want %d", g.Name, len(tokens), len(g.PromptIDs)+39)
		}
		for position, byLayer := range tokens {
			for l, chosen := range byLayer {
				if position < len(g.PromptIDs) && !slices.Equal(chosen, g.Experts[l][position]) {
					t.Fatalf("%s: position %d, layer %d: experts %v, want %v", g.Name, position, l, chosen, g.Experts[l][position])
				}
				for _, expert := range chosen {
					if onRank[rank][[2]int32{int32(l), expert}] {
						want[rank][0]++
					} else {
						want[rank][1]++
					}
				}
			}
		}
		// With a start, the first tokens are missing.
		body["routed_experts_start_len"] = len(g.PromptIDs)
		var rest generated
		body["sampling_params"] = map[string]any{"max_new_tokens": 3, "ignore_eos": true}
		e.post(t, "/generate", body, header...).into(t, &rest)
		if got := decodeRoutes(t, rest.MetaInfo.RoutedExperts, layers, topK); len(got) != 2 || !slices.EqualFunc(got[1], tokens[len(g.PromptIDs)+1], slices.Equal) {
			t.Errorf("%s: routes from %d on: %v", g.Name, len(g.PromptIDs), got)
		}
		for position := range len(g.PromptIDs) + 2 {
			for l, chosen := range tokens[position] {
				for _, expert := range chosen {
					if onRank[rank][[2]int32{int32(l), expert}] {
						want[rank][0]++
					} else {
						want[rank][1]++
					}
				}
			}
		}
	}
	for rank := range ranks {
		for i, locality := range []string{"local", "remote"} {
			name := fmt.Sprintf(`semmoe_engine_activations_total{locality="%s",rank="%d"}`, locality, rank)
			if got := e.metric(t, name); got != want[rank][i] || got == 0 {
				t.Errorf("%s is %v, want %v", name, got, want[rank][i])
			}
		}
	}
	if got := e.metric(t, `sglang:num_requests_total{model_name="tiny"}`); got != 30 {
		t.Errorf("%v requests counted, want 30", got)
	}
}

// Without attention data parallelism requests have no rank; tokens count for the ranks in turn.
func TestTensorParallelAttention(t *testing.T) {
	e := start(t, func(o *Options) { o.TPSize, o.EPSize = 4, 4 })
	g := golden(t)[0]
	var out generated
	e.post(t, "/generate", map[string]any{"text": g.Text, "sampling_params": map[string]any{"max_new_tokens": 4}}).into(t, &out)
	if out.MetaInfo.DPRank != nil {
		t.Errorf("dp_rank %d", *out.MetaInfo.DPRank)
	}
	tokens := len(g.PromptIDs) + 3
	for rank := range 4 {
		var sum float64
		for _, locality := range []string{"local", "remote"} {
			sum += e.metric(t, fmt.Sprintf(`semmoe_engine_activations_total{locality="%s",rank="%d"}`, locality, rank))
		}
		if want := float64((tokens + 3 - rank) / 4 * 16); sum != want {
			t.Errorf("rank %d: %v activations, want %v", rank, sum, want)
		}
	}
	if got := e.post(t, "/generate", `{"text":"a"}`, "X-Data-Parallel-Rank", "1"); got.status != 400 {
		t.Errorf("rank 1 of one: status %d", got.status)
	}
}

func TestRoundRobinWithoutRank(t *testing.T) {
	e := start(t, fourRanks)
	seen := map[int]int{}
	for range 8 {
		var out generated
		e.post(t, "/generate", `{"input_ids":[5],"sampling_params":{"max_new_tokens":1}}`).into(t, &out)
		seen[*out.MetaInfo.DPRank]++
	}
	for rank := range 4 {
		if seen[rank] != 2 {
			t.Errorf("rank %d served %d of 8 requests", rank, seen[rank])
		}
	}
}

type loads struct {
	Loads []struct {
		DPRank         int `json:"dp_rank"`
		Running        int `json:"num_running_reqs"`
		Waiting        int `json:"num_waiting_reqs"`
		UsedTokens     int `json:"num_used_tokens"`
		TotalTokens    int `json:"num_total_tokens"`
		MaxTotalTokens int `json:"max_total_num_tokens"`
	} `json:"loads"`
}

// A client that leaves frees its slot, whether it runs or waits.
func TestCancellationFreesTheSlot(t *testing.T) {
	e := start(t, func(o *Options) {
		fourRanks(o)
		o.MaxRunning = 1
	})
	load := func(rank int) (running, waiting int) {
		var l loads
		e.get(t, fmt.Sprintf("/v1/loads?dp_rank=%d", rank)).into(t, &l)
		if len(l.Loads) != 1 || l.Loads[0].DPRank != rank {
			t.Fatalf("loads %+v", l)
		}
		return l.Loads[0].Running, l.Loads[0].Waiting
	}
	open := func(rank string) context.CancelFunc {
		t.Helper()
		ctx, cancel := context.WithCancel(context.Background())
		t.Cleanup(cancel)
		body := map[string]any{"prompt": "a", "max_tokens": 2000, "ignore_eos": true, "stream": true}
		response, err := e.send(ctx, "/v1/completions", body, "X-Data-Parallel-Rank", rank)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { response.Body.Close() })
		return cancel
	}
	// Several requests for rank 1, one after the other, keep the one of rank 2 waiting for seconds.
	var cancelOthers []context.CancelFunc
	for range 5 {
		cancelOthers = append(cancelOthers, open("1"))
	}
	cancelLast := open("2")
	if running, waiting := load(2); running != 0 || waiting != 1 {
		t.Fatalf("rank 2 has %d running and %d waiting requests", running, waiting)
	}
	e.until(t, "running on rank 1", func() bool { running, waiting := load(1); return running == 1 && waiting > 0 })
	cancelLast()
	e.until(t, "taken from the queue", func() bool { _, waiting := load(2); return waiting == 0 })
	for _, cancel := range cancelOthers {
		cancel()
	}
	e.until(t, "freed", func() bool { running, waiting := load(1); return running+waiting == 0 })
	if got := e.metric(t, `sglang:num_aborted_requests_total{model_name="tiny"}`); got < 2 {
		t.Errorf("%v aborted requests, want at least the two that ran and waited", got)
	}
	var l loads
	e.get(t, "/v1/loads").into(t, &l)
	for _, rank := range l.Loads {
		if rank.UsedTokens != 0 || rank.TotalTokens != 0 || rank.MaxTotalTokens != 2048 {
			t.Errorf("idle rank: %+v", rank)
		}
	}
}

func TestFullQueueIsUnavailable(t *testing.T) {
	e := start(t, func(o *Options) { o.MaxRunning, o.MaxQueued = 1, 1 })
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var responses sync.WaitGroup
	defer responses.Wait()
	statuses := make(chan int, 16)
	for range 16 {
		responses.Go(func() {
			response, err := e.send(ctx, "/v1/completions", map[string]any{"prompt": "a", "max_tokens": 2000, "ignore_eos": true, "stream": true})
			if err == nil {
				statuses <- response.StatusCode
				<-ctx.Done()
				response.Body.Close()
			}
		})
	}
	seen := map[int]int{}
	for range 16 {
		seen[<-statuses]++
	}
	cancel()
	if seen[200]+seen[503] != 16 || seen[200] < 2 || seen[503] == 0 {
		t.Errorf("statuses %v of 16 requests; one may run and one wait", seen)
	}
}

// On shutdown health fails at once, new requests are refused, running ones end, and then the engine does.
func TestDrain(t *testing.T) {
	e := start(t, nil)
	response, err := e.send(context.Background(), "/v1/completions", map[string]any{"prompt": "a", "max_tokens": 1500, "ignore_eos": true, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	body := bufio.NewReader(response.Body)
	if _, err := body.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	e.stop()
	e.until(t, "unhealthy", func() bool { return e.get(t, "/health").status == http.StatusServiceUnavailable })
	if got := e.post(t, "/v1/completions", `{"prompt":"a"}`); got.status != http.StatusServiceUnavailable || !strings.Contains(string(got.body), "shutting down") {
		t.Errorf("a new request gets %d %s", got.status, got.body)
	}
	rest, err := io.ReadAll(body)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(rest), "data: [DONE]\n\n") || strings.Count(string(rest), `"length"`) != 1 {
		t.Errorf("the running request ends with %q", rest[max(0, len(rest)-200):])
	}
	select {
	case err := <-e.done:
		e.done <- err
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the engine does not stop")
	}
	if _, err := http.Get(e.url + "/health"); err == nil {
		t.Error("the engine still listens")
	}
}

func TestModelsAndTokenize(t *testing.T) {
	e := start(t, nil)
	var models struct {
		Data []struct {
			ID          string `json:"id"`
			MaxModelLen int    `json:"max_model_len"`
		} `json:"data"`
	}
	e.get(t, "/v1/models").into(t, &models)
	if len(models.Data) != 1 || models.Data[0].ID != "tiny" || models.Data[0].MaxModelLen != 2048 {
		t.Errorf("models %+v", models)
	}
	g := golden(t)[0]
	var one struct {
		Tokens []int32
		Count  int
	}
	for _, path := range []string{"/v1/tokenize", "/tokenize"} {
		e.post(t, path, map[string]any{"model": "tiny", "prompt": g.Text}).into(t, &one)
		if !slices.Equal(one.Tokens, g.PromptIDs) || one.Count != len(g.PromptIDs) {
			t.Errorf("%s gives %+v", path, one)
		}
	}
	var many struct {
		Tokens [][]int32
		Count  []int
	}
	e.post(t, "/tokenize", map[string]any{"prompt": []string{g.Text, ""}}).into(t, &many)
	if len(many.Tokens) != 2 || !slices.Equal(many.Count, []int{len(g.PromptIDs), 0}) {
		t.Errorf("list gives %+v", many)
	}
	e.post(t, "/tokenize", map[string]any{"messages": []any{map[string]any{"role": "user", "content": "x"}}}).into(t, &one)
	if one.Count == 0 {
		t.Error("no tokens for messages")
	}
}

func TestOptionsThatContradict(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Options)
		want   []string
	}{
		"no model":         {func(o *Options) { o.ModelPath = "" }, []string{"--model-path"}},
		"tp and ep":        {func(o *Options) { o.TPSize = 2 }, []string{"--tp-size 2", "--ep-size 1"}},
		"dp and ep":        {func(o *Options) { o.TPSize, o.EPSize, o.DPSize, o.EnableDPAttention = 4, 4, 2, true }, []string{"--dp-size 2", "--ep-size 4"}},
		"dp without flag":  {func(o *Options) { o.DPSize = 2 }, []string{"--dp-size 2", "--enable-dp-attention"}},
		"ep does not fit":  {func(o *Options) { o.TPSize, o.EPSize = 3, 3 }, []string{"3", "32 experts", "1, 2, 4, 8, 16, 32"}},
		"redundant":        {func(o *Options) { o.TPSize, o.EPSize, o.RedundantExperts = 3, 3, 3 }, []string{"size 3", "35 slots"}},
		"map":              {func(o *Options) { o.InitExpertLocation = "{}" }, []string{"--init-expert-location", "physical_to_logical_map"}},
		"context too long": {func(o *Options) { o.ContextLength = 4096 }, []string{"4096", "2048"}},
		"no thread":        {func(o *Options) { o.Threads = 0 }, []string{"--threads is 0"}},
		"negative port":    {func(o *Options) { o.Port = -1 }, []string{"--port is -1"}},
		"no such model":    {func(o *Options) { o.ModelPath = "testdata/none" }, []string{"testdata/none does not exist"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := DefaultOptions()
			o.ModelPath, o.Port = tinyModel, 0
			test.change(&o)
			err := Run(t.Context(), o)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not mention %q", err, want)
				}
			}
		})
	}
}

// BenchmarkServe reports what 16 clients that ask at the same time get over HTTP: tokens of their streams, and prompt
// tokens of requests for a single token.
func BenchmarkServe(b *testing.B) {
	e := start(b, func(o *Options) { o.Threads = DefaultOptions().Threads })
	prompt := golden(b)[0].PromptIDs
	for _, shape := range []struct {
		name               string
		prompt, tokens, of int
	}{
		{"decode", 32, 200, 200},
		{"prefill", 512, 1, 512},
	} {
		b.Run(shape.name, func(b *testing.B) {
			const clients = 16
			for b.Loop() {
				var all sync.WaitGroup
				for range clients {
					all.Go(func() {
						ids := slices.Repeat(prompt, 1+shape.prompt/len(prompt))[:shape.prompt]
						body := map[string]any{"prompt": ids, "max_tokens": shape.tokens, "ignore_eos": true, "stream": true}
						response, err := e.send(context.Background(), "/v1/completions", body)
						if err != nil {
							b.Error(err)
							return
						}
						defer response.Body.Close()
						if text, err := io.ReadAll(response.Body); err != nil || !bytes.HasSuffix(text, []byte("[DONE]\n\n")) {
							b.Errorf("%v: %s", err, text)
						}
					})
				}
				all.Wait()
			}
			b.ReportMetric(float64(clients*shape.of*b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}
