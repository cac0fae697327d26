// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// recorder is a test double of transformers_recorder.py. test/transformers tests the program itself.
type recorder struct {
	t *testing.T
	// failures is the number of requests for which the response ends early.
	failures int
	// edit changes the frames before they are sent.
	edit func(frames []string) []string
}

// expertOf returns the i-th expert of a token in a layer.
func expertOf(token int32, layer, i int) uint16 { return uint16((int(token) + layer + i) % 8) }

func (r *recorder) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	if request.URL.Path == "/health" {
		return
	}
	var body recordBody
	if err := json.NewDecoder(request.Body).Decode(&body); err != nil || request.URL.Path != "/record" {
		r.t.Errorf("%s: %v", request.URL.Path, err)
	}
	if r.failures > 0 {
		r.failures--
		io.WriteString(w, `{"event": "progress", "done": 0, "total"`) //nolint:errcheck // the client may have disconnected
		return
	}
	type answer struct {
		IDs     []int32 `json:"ids,omitempty"`
		Refused string  `json:"refused,omitempty"`
	}
	var answers []answer
	var known [][]int32
	tokens := 0
	for _, item := range body.Requests {
		text := item.Prompt
		if text == "" {
			text = item.Messages[0].Content
		}
		if strings.HasPrefix(text, "bad") {
			answers = append(answers, answer{Refused: "no"})
			continue
		}
		var ids []int32
		for _, c := range []byte(text)[:min(len(text), body.RequestTokens)] {
			ids = append(ids, int32(c))
		}
		answers, known = append(answers, answer{IDs: ids}), append(known, ids)
		if tokens += len(ids); tokens >= body.Tokens {
			break
		}
	}
	line, _ := json.Marshal(map[string]any{"event": "tokenized", "requests": answers})
	frames := []string{string(line) + "\n"}
	for first, ids := range known { // a pass for each request
		for _, layer := range body.Model.MoELayers {
			var experts bytes.Buffer
			for _, token := range ids {
				for i := range body.Model.ExpertsPerToken {
					binary.Write(&experts, binary.LittleEndian, expertOf(token, layer, i)) //nolint:errcheck // a buffer
				}
			}
			frames = append(frames, fmt.Sprintf(`{"event": "experts", "layer": %d, "first": %d, "count": 1, "bytes": %d}`+"\n%s", layer, first, experts.Len(), experts.String()))
		}
		frames = append(frames, fmt.Sprintf(`{"event": "progress", "done": %d, "total": %d}`+"\n", first+1, len(known)))
	}
	frames = append(frames, `{"event": "end"}`+"\n")
	if r.edit != nil {
		frames = r.edit(frames)
	}
	io.WriteString(w, strings.Join(frames, "")) //nolint:errcheck // the client may have disconnected
}

func recorderOptions(t *testing.T, r *recorder) Options {
	r.t = t
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	return Options{
		Endpoint: server.URL, Config: "{}", Seed: 1, Tokens: 1000, TraceTokens: 1000, RequestTokens: 5, NewTokens: 1, Concurrency: 1, Wait: time.Minute,
		Report: checkpoint.Report{Family: "qwen3_moe", Layers: 4, MoELayers: []int{1, 3}, Experts: 8, ExpertsPerToken: 3, Vocab: 256, Hidden: 4, ModelDigest: "d"},
		Items: []Item{
			{Line: 1, Prompt: "hello"}, {Line: 2, Prompt: "bad"}, {Line: 5, Messages: []Message{{Role: "user", Content: "a long message"}}, Domain: "chat"}, {Line: 6, Prompt: "x"},
		},
	}
}

// TestRunTransformers checks that the trace and the counts contain the answers of the recorder, also after it ended
// early.
func TestRunTransformers(t *testing.T) {
	o := recorderOptions(t, &recorder{failures: 2})
	var last Progress
	o.Progress = func(p Progress) { last = p }
	run, err := RunTransformers(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	recorded := run.Trace
	if recorded.Requests() != 3 || run.Summary.Refused != 1 || run.Summary.Tokens != 11 || last.Done != 4 || last.Tokens != 11 || last.Phase != Recording {
		t.Fatalf("%d requests, summary %+v, progress %+v", recorded.Requests(), run.Summary, last)
	}
	if !slices.Equal(recorded.Documents, []int32{1, 5, 6}) || !slices.Equal(recorded.Domains, []uint8{0, 1, 0}) || string(ids(recorded.Request(1))) != "a lon" {
		t.Errorf("documents %v, domains %v, tokens %v", recorded.Documents, recorded.Domains, recorded.Request(1))
	}
	at := 0
	for _, token := range recorded.Tokens {
		for _, layer := range []int{1, 3} {
			for i := range 3 {
				if want := expertOf(token, layer, i); recorded.Experts[at] != want {
					t.Fatalf("activation %d: expert %d, want %d", at, recorded.Experts[at], want)
				}
				at++
			}
		}
	}
}

func ids(tokens []int32) (text []byte) {
	for _, token := range tokens {
		text = append(text, byte(token))
	}
	return text
}

// TestRunTransformersTokens checks that no further request is recorded once the tokens suffice.
func TestRunTransformersTokens(t *testing.T) {
	o := recorderOptions(t, &recorder{})
	o.Tokens = 1
	run, err := RunTransformers(t.Context(), o)
	if err != nil || run.Trace.Requests() != 1 {
		t.Errorf("%v, error %v", run, err)
	}
}

// TestRunTransformersRefuses checks that invalid responses of the recorder are permanent errors.
func TestRunTransformersRefuses(t *testing.T) {
	change := func(old, replacement string) func([]string) []string {
		return func(frames []string) []string {
			return strings.SplitAfter(strings.Replace(strings.Join(frames, ""), old, replacement, 1), "\x00\x00\x00\x00")
		}
	}
	for name, tc := range map[string]struct {
		edit func([]string) []string
		want string
	}{
		"failure": {func([]string) []string { return []string{`{"event": "error", "message": "out of memory"}` + "\n"} }, "the recorder failed: out of memory"},
		"no JSON": {func([]string) []string { return []string{"<html>\n"} }, "invalid response of the recorder"},
		"nothing": {func(frames []string) []string { return frames[len(frames)-1:] }, "no requests"},
		"refused": {func([]string) []string {
			return []string{`{"event": "tokenized", "requests": [{"refused": "no template"}]}` + "\n"}
		}, "refused all requests; the last one: line"},
		"early end":       {func(frames []string) []string { return append(frames[:2:2], frames[len(frames)-1]) }, "layer 1 of 1 requests: there are 3"},
		"other layer":     {change(`"layer": 3`, `"layer": 2`), "in layer 2"},
		"other bytes":     {change(`"bytes": `, `"bytes": 1`), "the tokens need"},
		"other requests":  {change(`"count": 1`, `"count": 9`), "9 requests from request 0 on"},
		"negative":        {change(`"first": 0`, `"first": -1`), "from request -1 on"},
		"twice":           {func(frames []string) []string { return append([]string{frames[0]}, frames...) }, "other requests"},
		"foreign token":   {change(`"ids":[`, `"ids":[300,`), "token ID 300"},
		"too many tokens": {change(`"ids":[`, `"ids":[1,2,3,4,5,6,`), "the maximum is 5"},
		"unknown expert": {func(frames []string) []string {
			return append([]string{frames[0], frames[1][:len(frames[1])-2] + "\x08\x00"}, frames[2:]...)
		}, "returned expert 8"},
		"expert twice": {func(frames []string) []string {
			end := len(frames[1])
			return append([]string{frames[0], frames[1][:end-2] + frames[1][end-4:end-2]}, frames[2:]...)
		}, "must differ"},
	} {
		t.Run(name, func(t *testing.T) {
			o := recorderOptions(t, &recorder{edit: tc.edit})
			_, err := RunTransformers(t.Context(), o)
			var broken *EngineError
			if !errors.As(err, &broken) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want a permanent one with %q", err, tc.want)
			}
		})
	}
	o := recorderOptions(t, &recorder{failures: attempts})
	if _, err := RunTransformers(t.Context(), o); err == nil || !strings.Contains(err.Error(), "failed 4 times: the response of the recorder ended early") {
		t.Errorf("a recorder that always ends early: %v", err)
	}
}
