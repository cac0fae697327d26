// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/router"
)

// answer is the served model's answer to one prompt.
type answer struct {
	goldenCase
	ids      []int
	pod      string
	rank     string
	text     string
	streamed string
	taken    time.Duration
}

// ask sends all prompts concurrently through the Service and the request router: as token IDs to the engine's /generate
// route, and as text to the OpenAI completions route, with and without streaming.
func (d *demo) ask(ctx context.Context, golden []goldenCase) ([]answer, error) {
	answers := make([]answer, len(golden))
	err := d.out.Step(ctx, fmt.Sprintf("%d prompts answered", len(golden)), func(update func(string)) error {
		if len(golden) > 0 { // send the first prompt separately, to time a single request
			if _, err := d.askOne(ctx, golden[0]); err != nil {
				return err
			}
			d.out.FirstAnswer(time.Now())
		}
		group, ctx := errgroup.WithContext(ctx)
		var done atomic.Int32
		for i, g := range golden {
			group.Go(func() (err error) {
				answers[i], err = d.askOne(ctx, g)
				if n := done.Add(1); d.out.Terminal {
					update(fmt.Sprintf("%d of %d", n, len(golden)))
				}
				return err
			})
		}
		return group.Wait()
	})
	return answers, err
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

	request := map[string]any{"model": d.name, "prompt": g.Text, "max_tokens": len(g.GreedyIDs), "temperature": 0}
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
	response, err := d.client.Do(request)
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

func (d *demo) post(ctx context.Context, path string, body, into any) (header http.Header, err error) {
	defer func() { d.ledger.count(ctx, err) }()
	response, err := d.send(ctx, path, body)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return response.Header, json.NewDecoder(response.Body).Decode(into)
}

// stream reads a streamed completion to the end and returns its text.
func (d *demo) stream(ctx context.Context, body any) (text string, err error) {
	defer func() { d.ledger.count(ctx, err) }()
	response, err := d.send(ctx, "/v1/completions", body)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	var whole strings.Builder
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return whole.String(), nil
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
			whole.WriteString(choice.Text)
		}
	}
	return "", fmt.Errorf("the stream ended without [DONE]: %w", lines.Err())
}
