// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/test/ports"
)

var (
	vllmDir    = flag.String("vllm", "", "virtual environment that test/vllm/install.sh printed: compare the recording with vLLM itself")
	sglangURL  = flag.String("sglang", "", "address of an SGLang server that test/gpu/serve_sglang.sh started: compare the recording with SGLang itself")
	update     = flag.Bool("record", false, "write the recording instead of comparing it; needs -vllm or -sglang")
	metricsURL = flag.String("metrics", "", "address of the engine's metrics, if the address is one of a request router in front of it")
	answerFile = flag.String("texts", "", "file to which the texts of the answers are written as JSON, by the name of the request")
)

// ranks is the number of data-parallel ranks of all servers.
const ranks = 2

// subject is a release of an engine whose answers are recorded, to compare its double with them.
type subject struct {
	dialect string
	// command starts the double like the recorded engine.
	command func(port string) []string
	// requests are the requests that the double must answer like the engine.
	requests func() map[string]request
	// start starts or finds the engine, and returns its address. It skips the test if no flag names an engine.
	start func(*testing.T) string
	// volatile lists the paths of answer members whose presence depends on earlier requests. They are not compared.
	volatile []string
	// served matches samples of the counter that each served request increases, by rank.
	served *regexp.Regexp
}

var subjects = []subject{vllmSubject, sglangSubject}

// rankHeader is the header by which engines read a rank.
const rankHeader = "X-Data-Parallel-Rank"

// request is a request to both servers.
type request struct {
	method, path, body string
	// rank is the value of the rank header; empty for none.
	rank string
	// generates is true if the request generates tokens. pinned is true if the engine must serve it on the rank that
	// it names.
	generates, pinned bool
	// differs maps paths of answer members that differ between the double and the engine to the reason.
	differs map[string]string
	// reads lists the paths of the members that are compared, if the answer has many others; nil for all.
	reads []string
}

// generating lists the routes that generate tokens.
var generating = []string{"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate", "/invocations"}

func get(path string) request { return request{method: http.MethodGet, path: path} }

func post(path, body string) request {
	return request{method: http.MethodPost, path: path, body: body, generates: slices.Contains(generating, path)}
}

// existing reports whether a value of the rank header names a rank.
func existing(value string) bool {
	rank, err := strconv.Atoi(strings.TrimSpace(value))
	return err == nil && rank >= 0 && rank < ranks
}

// chat returns a request body for chat completions and messages.
func chat(members string) string {
	return `{"model":"tiny","messages":[{"role":"user","content":"func main() {"}],"max_tokens":3,"temperature":0` + members + `}`
}

func completion(members string) string {
	return `{"model":"tiny","prompt":"func main() {","max_tokens":3,"temperature":0` + members + `}`
}

// completions returns the requests for completions that all engines get.
func completions() map[string]request {
	return map[string]request{
		"completion, ids":            post("/v1/completions", `{"model":"tiny","prompt":[1,2,3],"max_tokens":2}`),
		"completion, token ids":      post("/v1/completions", completion(`,"return_token_ids":true`)),
		"completion, logprobs":       post("/v1/completions", completion(`,"logprobs":2`)),
		"completion, no alternative": post("/v1/completions", completion(`,"logprobs":0`)),
		"completion, echo":           post("/v1/completions", completion(`,"echo":true`)),
		"completion, stop":           post("/v1/completions", `{"model":"tiny","prompt":"func main() {","max_tokens":24,"temperature":0,"stop":["e","a","t"," "]}`),
		"completion, no tokens":      post("/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":0}`),
		"completion, only echo":      post("/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":0,"echo":true}`),
		"completion, negative":       post("/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":-1}`),
		"completion, too many":       post("/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":100000}`),
		"completion, too long":       post("/v1/completions", `{"model":"tiny","max_tokens":1,"prompt":"`+strings.Repeat("func main() { ", 2000)+`"}`),
		"completion, no prompt":      post("/v1/completions", `{"model":"tiny"}`),
		"completion, empty prompt":   post("/v1/completions", `{"model":"tiny","prompt":""}`),
		"completion, no model":       post("/v1/completions", `{"prompt":"func","max_tokens":1}`),
		"completion, default model":  post("/v1/completions", `{"model":"default","prompt":"func","max_tokens":1}`),
		"completion, other model":    post("/v1/completions", `{"model":"other","prompt":"func","max_tokens":1}`),
		"completion, no JSON":        post("/v1/completions", `{"model":`),
		"completion, a list":         post("/v1/completions", `[]`),
		"completion, another type":   post("/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":"many"}`),
		"completion, hot":            post("/v1/completions", `{"model":"tiny","prompt":"func","max_tokens":1,"temperature":-1}`),
	}
}

// answered holds the compared properties of an answer.
type answered struct {
	Status int    `json:"status"`
	Type   string `json:"type,omitempty"`
	// Form maps the paths of the answer's members to their types. For a stream, Form covers all events and includes the
	// names of the events.
	Form map[string]string `json:"form,omitempty"`
	// Error is the type and the code of an error.
	Error string `json:"error,omitempty"`
	// Rank is the rank that served the request, if the route reads ranks and the request is for an existing rank.
	Rank string `json:"rank,omitempty"`
}

// recording holds the answers of an engine.
type recording struct {
	Answers map[string]answered `json:"answers"`
	// Metrics maps the names of metrics to their labels.
	Metrics map[string][]string `json:"metrics"`
}

func (s subject) file() string { return "testdata/" + s.dialect + ".json" }

func (s subject) recorded(t *testing.T) recording {
	t.Helper()
	text, err := os.ReadFile(s.file())
	if err != nil {
		t.Fatal(err)
	}
	var r recording
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestConformance sends requests to the double of an engine and compares the answers with the recorded answers of the
// engine to the same requests: statuses, content types, the forms of answers and errors, the serving ranks, and the
// metrics.
func TestConformance(t *testing.T) {
	for _, s := range subjects {
		t.Run(s.dialect, func(t *testing.T) {
			want := s.recorded(t)
			got, texts := s.record(t, startDouble(t, s))
			for name, r := range s.requests() {
				for path, why := range r.differs {
					if want.Answers[name].Form[path] == got.Answers[name].Form[path] {
						t.Errorf("%s: %s is equal in both, but listed as different: %s", name, path, why)
					}
					for _, form := range []map[string]string{want.Answers[name].Form, got.Answers[name].Form} {
						maps.DeleteFunc(form, func(member, _ string) bool { return strings.HasPrefix(member, path) })
					}
				}
			}
			maps.DeleteFunc(got.Metrics, func(name string, _ []string) bool { return strings.HasPrefix(name, "semmoe_") }) // those of the reference engine
			for name := range want.Metrics {
				if got.Metrics[name] == nil { // the double has only the metrics that the operator and the router read
					delete(want.Metrics, name)
				}
			}
			s.compare(t, "-"+s.dialect+" +double", want, got, texts)
		})
	}
}

// TestRecording compares the answers of the engines themselves with the recordings.
func TestRecording(t *testing.T) {
	for _, s := range subjects {
		t.Run(s.dialect, func(t *testing.T) {
			url := s.start(t)
			engine := &peer{url: url, metricsPage: url + "/metrics", served: s.served}
			if *metricsURL != "" {
				engine.metricsPage = *metricsURL
			}
			got, texts := s.record(t, engine)
			if *answerFile != "" {
				writeJSON(t, *answerFile, texts)
			}
			if *update {
				writeJSON(t, s.file(), got)
				return
			}
			s.compare(t, "-recorded +"+s.dialect, s.recorded(t), got, texts)
		})
	}
}

func writeJSON(t *testing.T, path string, value any) {
	t.Helper()
	text, err := json.MarshalIndent(value, "", " ")
	if err == nil {
		err = os.WriteFile(path, append(text, '\n'), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (s subject) compare(t *testing.T, what string, want, got recording, texts map[string]string) {
	t.Helper()
	names := slices.Sorted(maps.Keys(got.Answers))
	if diff := cmp.Diff(slices.Sorted(maps.Keys(want.Answers)), names); diff != "" {
		t.Errorf("the recording is of other requests: record again (docs/testing.md)\n%s", diff)
	}
	requests := s.requests()
	for _, name := range names {
		if diff := cmp.Diff(want.Answers[name], got.Answers[name]); diff != "" {
			t.Errorf("%s: %s %.300s\n(%s):\n%s\n%.1500s", name, requests[name].path, requests[name].body, what, diff, texts[name])
		}
	}
	if diff := cmp.Diff(want.Metrics, got.Metrics); diff != "" {
		t.Errorf("metrics (%s):\n%s", what, diff)
	}
}

// record sends the requests to a server sequentially, and returns the answers and their texts.
func (s subject) record(t *testing.T, p *peer) (recording, map[string]string) {
	t.Helper()
	r, texts, requests := recording{Answers: map[string]answered{}}, map[string]string{}, s.requests()
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		r.Answers[name], texts[name] = p.ask(t, name, requests[name])
		if reads := requests[name].reads; reads != nil {
			maps.DeleteFunc(r.Answers[name].Form, func(member, _ string) bool { return !slices.Contains(reads, member) })
		}
		for _, path := range s.volatile {
			maps.DeleteFunc(r.Answers[name].Form, func(member, _ string) bool { return strings.HasPrefix(member, path) })
		}
	}
	r.Metrics = p.metrics(t)
	return r, texts
}

// peer is one of the compared servers.
type peer struct {
	url, metricsPage string
	served           *regexp.Regexp
}

// startDouble starts the double with the arguments of the engine.
func startDouble(t *testing.T, s subject) *peer {
	t.Helper()
	port := strconv.Itoa(ports.Reserve(t))
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, append([]string{s.dialect}, s.command(port)...)) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the double ended with %v", err)
		}
	})
	url := "http://127.0.0.1:" + port
	wait(t, url, time.Minute, ended)
	return &peer{url: url, metricsPage: url + "/metrics", served: s.served}
}

// wait waits until the server is healthy. It fails the test if the server ends.
func wait(t *testing.T, url string, patience time.Duration, ended chan error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		if response, err := http.Get(url + "/health"); err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("the server ended with %v", err)
		case <-time.After(200 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("the server is not healthy within %v", patience)
		}
	}
}

// ask sends a request. It waits until the server has counted the request, so that the rank of the next request is
// detectable.
func (p *peer) ask(t *testing.T, name string, r request) (answered, string) {
	t.Helper()
	before := p.counts(t)
	sent, err := http.NewRequestWithContext(t.Context(), r.method, p.url+r.path, strings.NewReader(r.body))
	if err != nil {
		t.Fatal(err)
	}
	if r.body != "" {
		sent.Header.Set("Content-Type", "application/json")
	}
	if r.rank != "" {
		sent.Header.Set(rankHeader, r.rank)
	}
	response, err := http.DefaultClient.Do(sent)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	a := answered{Status: response.StatusCode, Type: response.Header.Get("Content-Type"), Form: map[string]string{}}
	values := [][]byte{text}
	if strings.HasPrefix(a.Type, "text/event-stream") {
		values = events(a.Form, text)
	}
	failed := response.StatusCode != http.StatusOK
	for _, data := range values {
		var value any
		if err := json.Unmarshal(data, &value); err == nil {
			forms(a.Form, "", value)
		}
		if failure := failureOf(data); failure != "" {
			a.Error, failed = failure, true
		}
	}
	if r.generates && !failed {
		if rank := p.rankOf(t, name, before); r.pinned {
			a.Rank = rank
		}
	}
	if len(a.Form) == 0 {
		a.Form = nil
	}
	return a, string(text)
}

// failureOf returns the type and the code of an error, which is a member or, by SGLang, the whole answer. It is empty for
// other answers.
func failureOf(text []byte) string {
	type failure struct {
		Object, Type string
		Code         any
		Error        *failure
	}
	var f failure
	if json.Unmarshal(text, &f) != nil {
		return ""
	}
	switch {
	case f.Error != nil:
		return fmt.Sprintf("%s, code %v", f.Error.Type, f.Error.Code)
	case f.Object == "error":
		return fmt.Sprintf("%s, code %v", f.Type, f.Code)
	}
	return ""
}

// events returns the data of a stream's events, and adds the names of the events to form, including the end of the
// stream.
func events(form map[string]string, text []byte) [][]byte {
	var all [][]byte
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		name, named := bytes.CutPrefix(lines.Bytes(), []byte("event: "))
		if named {
			form["event "+string(name)] = "event"
		}
		data, is := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		switch {
		case !is:
		case string(data) == "[DONE]":
			form["event [DONE]"] = "event"
		default:
			all = append(all, bytes.Clone(data))
		}
	}
	return all
}

// forms adds the types of a value and of its members to all, by path. Map members that are named by tokens share one
// path.
func forms(all map[string]string, path string, value any) {
	add := func(kind string) {
		if !slices.Contains(strings.Split(all[path], "|"), kind) {
			kinds := append(strings.FieldsFunc(all[path], func(r rune) bool { return r == '|' }), kind)
			slices.Sort(kinds)
			all[path] = strings.Join(kinds, "|")
		}
	}
	switch value := value.(type) {
	case map[string]any:
		add("object")
		for name, member := range value {
			if strings.HasSuffix(path, "_logprobs[]") {
				name = "*"
			}
			forms(all, path+"."+name, member)
		}
	case []any:
		add("list")
		for _, member := range value {
			forms(all, path+"[]", member)
		}
	case nil:
		add("null")
	default:
		add(fmt.Sprintf("%T", value))
	}
}

// counts returns the counter of served requests of each rank.
func (p *peer) counts(t *testing.T) map[string]float64 {
	t.Helper()
	counts := map[string]float64{}
	for _, sample := range p.served.FindAllStringSubmatch(page(t, p.metricsPage), -1) {
		value, err := strconv.ParseFloat(sample[2], 64)
		if err != nil {
			t.Fatalf("sample %q has no number", sample[0])
		}
		counts[sample[1]] += value
	}
	return counts
}

// rankOf waits until a rank has counted more than before, and returns the rank.
func (p *peer) rankOf(t *testing.T, name string, before map[string]float64) string {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		for rank, count := range p.counts(t) {
			if count > before[rank] {
				return rank
			}
		}
	}
	t.Errorf("%s: no rank has counted the request within 30 s", name)
	return ""
}

func page(t *testing.T, url string) string {
	t.Helper()
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var sample = regexp.MustCompile(`(?m)^([a-z_:]+)\{([^}]*)\}`)
var labelName = regexp.MustCompile(`(\w+)="`)

// metrics returns the names of the labels of each metric.
func (p *peer) metrics(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, match := range sample.FindAllStringSubmatch(page(t, p.metricsPage), -1) {
		var labels []string
		for _, label := range labelName.FindAllStringSubmatch(match[2], -1) {
			labels = append(labels, label[1])
		}
		slices.Sort(labels)
		all[match[1]] = labels
	}
	return all
}
