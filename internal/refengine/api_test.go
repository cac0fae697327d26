// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"context"
	"encoding/json"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/tlsfiles"
	"github.com/semmoe/operator/internal/router/tlsfiles/tlstest"
)

// Greedy completions equal the reference's, in concurrent requests, streamed and not, for text and for token IDs.
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
		input["return_logprob"], input["top_logprobs_num"], input["routed_dp_rank"] = true, 3, 2
		var whole generated
		e.post(t, "/generate", input).into(t, &whole)
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
		events := e.post(t, "/generate", input).events(t)
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
	// A stop string in the middle of the response, which starts and ends inside tokens.
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

// The log probabilities of a prompt equal those of its tokens when they were generated, in every form that SGLang
// returns, and for all chunk sizes of the prompt.
func TestPromptLogprobs(t *testing.T) {
	e := start(t, fourRanks)
	g := golden(t)[0]
	var answered completion
	e.post(t, "/v1/completions", map[string]any{"prompt": g.PromptIDs, "max_tokens": 200, "ignore_eos": true, "logprobs": 2}).into(t, &answered)
	want := answered.Choices[0].Logprobs
	var output generated
	e.post(t, "/generate", map[string]any{"input_ids": g.PromptIDs, "sampling_params": map[string]any{"max_new_tokens": 200, "temperature": 0, "ignore_eos": true}}).into(t, &output)
	prompt := slices.Concat(g.PromptIDs, output.OutputIDs)
	first := len(g.PromptIDs)

	var echoed completion
	body := map[string]any{"prompt": prompt, "max_tokens": 3, "ignore_eos": true, "logprobs": 2, "echo": true}
	e.post(t, "/v1/completions", body).into(t, &echoed)
	got := echoed.Choices[0].Logprobs
	if len(got.Tokens) != len(prompt)+3 || len(got.TopLogprobs) != len(got.Tokens) || got.TopLogprobs[0] != nil || got.TopLogprobs[1] == nil {
		t.Fatalf("%d tokens and %d tops, want %d; the first top is %v", len(got.Tokens), len(got.TopLogprobs), len(prompt)+3, got.TopLogprobs[0])
	}
	if !slices.Equal(got.TokenLogprobs[first:len(prompt)], want.TokenLogprobs) || !slices.Equal(got.Tokens[first:len(prompt)], want.Tokens) ||
		!slices.EqualFunc(got.TopLogprobs[first:len(prompt)], want.TopLogprobs, maps.Equal) {
		t.Error("the prompt's log probabilities are not those of its generation")
	}
	if !strings.HasSuffix(echoed.Choices[0].Text, strings.Join(got.Tokens[len(prompt):], "")) || !strings.Contains(echoed.Choices[0].Text, g.GreedyText) {
		t.Errorf("echoed text is %q", echoed.Choices[0].Text)
	}

	body["stream"] = true
	var text string
	var streamed []float64
	for _, event := range e.post(t, "/v1/completions", body).events(t) {
		var c completion
		if err := json.Unmarshal([]byte(event), &c); err != nil {
			t.Fatal(err)
		}
		for _, choice := range c.Choices {
			text += choice.Text
			if choice.Logprobs != nil {
				streamed = append(streamed, choice.Logprobs.TokenLogprobs...)
			}
		}
	}
	if text != echoed.Choices[0].Text || !slices.Equal(streamed, got.TokenLogprobs) {
		t.Errorf("stream gives %d log probabilities and %q", len(streamed), text)
	}
	body["stream"], body["logprobs"] = false, 0 // as in SGLang: without alternatives no log probabilities of the prompt
	var without completion
	e.post(t, "/v1/completions", body).into(t, &without)
	if n := len(without.Choices[0].Logprobs.Tokens); n != 3 {
		t.Errorf("%d log probabilities without alternatives, want those of 3 generated tokens", n)
	}

	for start, length := range map[int]int{-1: 0, 0: len(prompt), 150: len(prompt) - 150, len(prompt): 0} {
		e.post(t, "/generate", map[string]any{
			"input_ids": prompt, "return_logprob": true, "logprob_start_len": start, "sampling_params": map[string]any{"max_new_tokens": 1, "temperature": 0},
		}).into(t, &output)
		entries := output.MetaInfo.InputTokenLogprobs
		if len(entries) != length || len(output.MetaInfo.OutputTokenLogprobs) != 1 {
			t.Fatalf("start %d: %d entries, want %d", start, len(entries), length)
		}
		for i, entry := range entries {
			at := start + i
			switch {
			case entry[1] != float64(prompt[at]):
				t.Fatalf("start %d: entry %d is %v, want token %d", start, i, entry, prompt[at])
			case i == 0 && entry[0] != nil:
				t.Errorf("start %d: the first log probability is %v", start, entry[0])
			case i > 0 && entry[0] != got.TokenLogprobs[at]:
				t.Fatalf("start %d: entry %d is %v, want %v", start, i, entry, got.TokenLogprobs[at])
			}
		}
		output = generated{}
	}
}

// TestTLS serves by TLS with a certificate and its key.
func TestTLS(t *testing.T) {
	authority := tlstest.NewAuthority(t)
	o := DefaultOptions()
	o.ModelPath, o.Threads = tinyModel, 2
	o.CertFile, o.KeyFile = authority.Files(t.TempDir(), "127.0.0.1", time.Now().Add(time.Hour))
	files, err := tlsfiles.New("", "", authority.File)
	if err != nil {
		t.Fatal(err)
	}
	config, err := files.Client("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, listener, o) }()
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	if response, err := (&http.Client{Transport: transport}).Get("https://" + listener.Addr().String() + "/health"); err != nil {
		t.Error(err)
	} else {
		response.Body.Close()
	}
	if response, err := http.Get("http://" + listener.Addr().String() + "/health"); err == nil {
		if response.Body.Close(); response.StatusCode == http.StatusOK {
			t.Error("a client without TLS is served")
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	o.KeyFile = ""
	if err := o.Validate(); err == nil {
		t.Error("a certificate without a key is accepted")
	}
}
