package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/router"
)

// answer is what the served model said to one prompt.
type answer struct {
	goldenCase
	ids      []int
	pod      string
	rank     string
	text     string
	streamed string
	taken    time.Duration
}

// report is the demo's result.
type report struct {
	answers []answer
	checks  []check
}

type check struct {
	name   string
	holds  bool
	detail string
}

// ask sends all prompts at once, through the Service and the request router: by token ids on the engine's own route, and
// as text on the OpenAI route, streamed and not.
func (d *demo) ask(ctx context.Context, golden []goldenCase) (*report, error) {
	r := &report{answers: make([]answer, len(golden))}
	err := d.out.step(ctx, fmt.Sprintf("%d prompts answered", len(golden)), func(tell func(string)) error {
		group, ctx := errgroup.WithContext(ctx)
		var mu sync.Mutex
		done := 0
		for i, g := range golden {
			group.Go(func() (err error) {
				r.answers[i], err = d.askOne(ctx, g)
				mu.Lock()
				defer mu.Unlock()
				done++
				if d.out.terminal {
					tell(fmt.Sprintf("%d of %d", done, len(golden)))
				}
				return err
			})
		}
		return group.Wait()
	})
	if err != nil {
		return nil, err
	}
	r.check()
	return r, nil
}

func (d *demo) askOne(ctx context.Context, g goldenCase) (answer, error) {
	a := answer{goldenCase: g}
	begin := time.Now()
	var native struct {
		OutputIDs []int `json:"output_ids"`
	}
	header, err := d.post(ctx, "/generate", map[string]any{
		"input_ids":       g.PromptIDs,
		"sampling_params": map[string]any{"temperature": 0, "max_new_tokens": len(g.GreedyIDs), "ignore_eos": true},
	}, &native)
	if err != nil {
		return a, err
	}
	a.taken = time.Since(begin)
	a.ids, a.pod, a.rank = native.OutputIDs, header.Get(router.HeaderPod), header.Get(router.HeaderRank)

	request := map[string]any{"model": name, "prompt": g.Text, "max_tokens": len(g.GreedyIDs), "temperature": 0}
	var completion struct {
		Choices []struct {
			Text string `json:"text"`
		} `json:"choices"`
	}
	if _, err := d.post(ctx, "/v1/completions", request, &completion); err != nil {
		return a, err
	}
	if len(completion.Choices) != 1 {
		return a, fmt.Errorf("prompt %s: %d choices, want 1", g.Name, len(completion.Choices))
	}
	a.text = completion.Choices[0].Text
	request["stream"] = true
	a.streamed, err = d.stream(ctx, request)
	return a, err
}

func (d *demo) send(ctx context.Context, path string, body any) (*http.Response, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+d.address+path, bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		defer response.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1000))
		return nil, fmt.Errorf("POST %s: %s: %s", path, response.Status, text)
	}
	return response, nil
}

func (d *demo) post(ctx context.Context, path string, body, into any) (http.Header, error) {
	response, err := d.send(ctx, path, body)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return response.Header, json.NewDecoder(response.Body).Decode(into)
}

// stream reads a streamed completion to its end and returns the text.
func (d *demo) stream(ctx context.Context, body any) (string, error) {
	response, err := d.send(ctx, "/v1/completions", body)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	var text strings.Builder
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return text.String(), nil
		}
		var chunk struct {
			Choices []struct {
				Text string `json:"text"`
			} `json:"choices"`
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return "", fmt.Errorf("stream: %w", err)
		}
		for _, choice := range chunk.Choices {
			text.WriteString(choice.Text)
		}
	}
	return "", fmt.Errorf("the stream ended without [DONE]: %w", lines.Err())
}

func (r *report) check() {
	tokens, agree, streams := 0, 0, 0
	ranks, pods := map[string]bool{}, map[string]bool{}
	for _, a := range r.answers {
		tokens += a.comparable()
		agree += a.agree(a.ids)
		ranks[a.rank], pods[a.pod] = true, true
		if a.text == a.streamed && a.text != "" {
			streams++
		}
	}
	r.checks = []check{
		{"greedy tokens equal the reference", agree == tokens, fmt.Sprintf("%d of %d", agree, tokens)},
		{"streamed text equals the whole", streams == len(r.answers), fmt.Sprintf("%d of %d", streams, len(r.answers))},
		{"every rank was used", len(ranks) == 4, strings.Join(slices.Sorted(maps.Keys(ranks)), ", ")},
		{"every replica was used", len(pods) == 2, strings.Join(slices.Sorted(maps.Keys(pods)), ", ")},
	}
}

func (r *report) failed() int {
	failed := 0
	for _, c := range r.checks {
		if !c.holds {
			failed++
		}
	}
	return failed
}

func (r *report) print(w io.Writer) {
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "Prompt\tPod\tRank\tTokens as expected\tMillis\tContinuation")
	for _, a := range r.answers {
		fmt.Fprintf(table, "%s\t%s\t%s\t%d/%d\t%d\t%s\n", a.Name, a.pod, a.rank, a.agree(a.ids), a.comparable(), a.taken.Milliseconds(), firstRunes(a.text, 44))
	}
	table.Flush() //nolint:errcheck // a terminal
	fmt.Fprintln(w)
	for _, c := range r.checks {
		verdict := "  ok"
		if !c.holds {
			verdict = "FAIL"
		}
		fmt.Fprintf(w, "%s  %-36s %s\n", verdict, c.name, c.detail)
	}
}

func firstRunes(text string, n int) string {
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= n {
		return text
	}
	return string([]rune(text)[:n]) + "..."
}
