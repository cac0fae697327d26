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
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/test/ports"
)

var (
	vllmDir = flag.String("vllm", "", "virtual environment that test/vllm/install.sh printed; empty skips the comparison of the recording with vLLM itself")
	update  = flag.Bool("record", false, "write the recording instead of comparing it; needs -vllm")
)

const (
	// vllmDialect is the dialect of the release that test/vllm/install.sh installs.
	vllmDialect = "vllm-0.32.0"
	// vllmStart is the maximum start time of vLLM, which needs 60 s of CPU time per rank.
	vllmStart = 5 * time.Minute
	ranks     = 2
)

// request is a request to both servers.
type request struct {
	method, path, body string
	// rank is the value of the rank header; empty for none.
	rank string
	// differs maps paths of answer members that differ between the double and vLLM to the reason.
	differs map[string]string
}

// chat returns a request body for chat completions and messages.
func chat(members string) string {
	return `{"model":"tiny","messages":[{"role":"user","content":"func main() {"}],"max_tokens":3,"temperature":0` + members + `}`
}

func completion(members string) string {
	return `{"model":"tiny","prompt":"func main() {","max_tokens":3,"temperature":0` + members + `}`
}

// conforming returns the requests that the double must answer like vLLM.
func conforming() map[string]request {
	post := func(path, body string) request { return request{method: http.MethodPost, path: path, body: body} }
	all := map[string]request{
		"health":            {method: http.MethodGet, path: "/health"},
		"ping":              {method: http.MethodGet, path: "/ping"},
		"version":           {method: http.MethodGet, path: "/version"},
		"load":              {method: http.MethodGet, path: "/load"},
		"models":            {method: http.MethodGet, path: "/v1/models"},
		"no such route":     post("/generate", `{"text":"a"}`),
		"no such page":      {method: http.MethodGet, path: "/nothing"},
		"another method":    {method: http.MethodGet, path: "/v1/completions"},
		"tokenize":          post("/tokenize", `{"model":"tiny","prompt":"func main() {"}`),
		"tokenize chat":     post("/tokenize", `{"model":"tiny","messages":[{"role":"user","content":"func"}]}`),
		"tokenize no model": post("/tokenize", `{"prompt":"func"}`),
		"tokenize nothing":  post("/tokenize", `{"model":"tiny"}`),
		"tokenize other":    post("/tokenize", `{"model":"other","prompt":"func"}`),

		"completion, ids":            post("/v1/completions", `{"model":"tiny","prompt":[1,2,3],"max_tokens":2}`),
		"completion, token ids":      post("/v1/completions", completion(`,"return_token_ids":true`)),
		"chat, token ids":            post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"func main() {"}],"max_tokens":4,"temperature":0,"return_token_ids":true}`),
		"completion, logprobs":       post("/v1/completions", completion(`,"logprobs":2`)),
		"completion, no alternative": post("/v1/completions", completion(`,"logprobs":0`)),
		"completion, echo":           post("/v1/completions", completion(`,"echo":true`)),
		"completion, echo, logprobs": {
			method: http.MethodPost, path: "/v1/completions", body: completion(`,"echo":true,"logprobs":1`),
			differs: map[string]string{".choices[].prompt_logprobs": "contains the rank of each token in the vocabulary, which the reference engine does not compute and no client reads"},
		},
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
		"completion, logprobs 100":   post("/v1/completions", completion(`,"logprobs":100`)),
		"completion, unknown member": post("/v1/completions", completion(`,"return_routed_experts":true,"routed_dp_rank":7,"anything":1`)),
		"completion, id outside":     post("/v1/completions", `{"model":"tiny","prompt":[999999],"max_tokens":1}`),

		"chat, no messages":    post("/v1/chat/completions", `{"model":"tiny"}`),
		"chat, empty":          post("/v1/chat/completions", `{"model":"tiny","messages":[],"max_tokens":1}`),
		"chat, other model":    post("/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"a"}]}`),
		"chat, no JSON":        post("/v1/chat/completions", `{"model":`),
		"chat, too many":       post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":100000}`),
		"chat, too long":       post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"`+strings.Repeat("func main() { ", 2000)+`"}]}`),
		"chat, no tokens":      post("/v1/chat/completions", strings.Replace(chat(""), `"max_tokens":3`, `"max_tokens":0`, 1)),
		"chat, no such member": post("/v1/chat/completions", chat(`,"anything":1`)),

		"message, count":       post("/v1/messages/count_tokens", `{"model":"tiny","messages":[{"role":"user","content":"func"}]}`),
		"message, other model": post("/v1/messages", strings.Replace(chat(""), "tiny", "other", 1)),
		"message, no bound":    post("/v1/messages", `{"model":"tiny","messages":[{"role":"user","content":"func"}]}`),
		"message, no JSON":     post("/v1/messages", `{"model":`),
		"message, system":      post("/v1/messages", chat(`,"system":"short"`)),
		"response, other":      post("/v1/responses", `{"model":"other","input":"func"}`),
		"response, no input":   post("/v1/responses", `{"model":"tiny"}`),
		"response, no JSON":    post("/v1/responses", `{"model":`),
		"response, stored":     {method: http.MethodGet, path: "/v1/responses/resp_1"},
	}
	for name, r := range map[string]request{
		"completion": post("/v1/completions", completion("")),
		"chat":       post("/v1/chat/completions", chat("")),
		"message":    post("/v1/messages", chat("")),
		"response":   post("/v1/responses", `{"model":"tiny","input":"func main() {","max_output_tokens":3,"temperature":0}`),
	} {
		all[name] = r
		streamed := r
		streamed.body = strings.TrimSuffix(r.body, "}") + `,"stream":true}`
		all[name+", streamed"] = streamed
		streamed.body = strings.TrimSuffix(r.body, "}") + `,"stream":true,"stream_options":{"include_usage":true}}`
		all[name+", streamed with usage"] = streamed
		for _, rank := range []string{"0", "1", "2", "-1", "one", "", " 1 ", "1.0"} {
			pinned := r
			pinned.rank = rank
			all[fmt.Sprintf("%s, rank %q", name, rank)] = pinned
			if rank == "1" || rank == "2" {
				pinned.body = strings.TrimSuffix(r.body, "}") + `,"stream":true}`
				all[fmt.Sprintf("%s, streamed, rank %q", name, rank)] = pinned
			}
		}
	}
	return all
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

// recording holds the answers of vLLM 0.32.0.
type recording struct {
	Answers map[string]answered `json:"answers"`
	// Metrics maps the names of metrics to their labels.
	Metrics map[string][]string `json:"metrics"`
}

const recordingFile = "testdata/" + vllmDialect + ".json"

// TestConformance sends requests to the double and compares the answers with the recorded answers of vLLM 0.32.0 to the
// same requests: statuses, content types, the forms of answers and errors, the serving ranks, and the metrics.
func TestConformance(t *testing.T) {
	text, err := os.ReadFile(recordingFile)
	if err != nil {
		t.Fatal(err)
	}
	var want recording
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	got, texts := record(t, startDouble(t))
	for name, r := range conforming() {
		for path, why := range r.differs {
			if want.Answers[name].Form[path] == got.Answers[name].Form[path] {
				t.Errorf("%s: %s is equal in both, but listed as different: %s", name, path, why)
			}
			for _, form := range []map[string]string{want.Answers[name].Form, got.Answers[name].Form} {
				maps.DeleteFunc(form, func(member, _ string) bool { return strings.HasPrefix(member, path) })
			}
		}
	}
	for name := range want.Metrics {
		if got.Metrics[name] == nil { // the double has only the metrics that the operator and the router read
			delete(want.Metrics, name)
		}
	}
	compare(t, "-"+vllmDialect+" +double", want, got, texts)
}

// TestRecording starts vLLM 0.32.0 on CPUs and compares its answers with the recording.
func TestRecording(t *testing.T) {
	if *vllmDir == "" {
		t.Skip("needs -args -vllm: run make test-vllm")
	}
	got, texts := record(t, startVLLM(t))
	if *update {
		text, err := json.MarshalIndent(got, "", " ")
		if err == nil {
			err = os.WriteFile(recordingFile, append(text, '\n'), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(recordingFile)
	if err != nil {
		t.Fatal(err)
	}
	var want recording
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	compare(t, "-recorded +"+vllmDialect, want, got, texts)
}

func compare(t *testing.T, what string, want, got recording, texts map[string]string) {
	t.Helper()
	names := slices.Sorted(maps.Keys(got.Answers))
	if diff := cmp.Diff(slices.Sorted(maps.Keys(want.Answers)), names); diff != "" {
		t.Errorf("the recording is of other requests: record again with -args -vllm DIR -record\n%s", diff)
	}
	requests := conforming()
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
func record(t *testing.T, p *peer) (recording, map[string]string) {
	t.Helper()
	r, texts, requests := recording{Answers: map[string]answered{}}, map[string]string{}, conforming()
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		r.Answers[name], texts[name] = p.ask(t, name, requests[name])
	}
	r.Metrics = p.metrics(t)
	return r, texts
}

// peer is one of the compared servers.
type peer struct{ url string }

// startVLLM starts vLLM, and waits until it serves.
func startVLLM(t *testing.T) *peer {
	t.Helper()
	port := ports.Reserve(t)
	log, err := os.Create(filepath.Join(t.TempDir(), "vllm.log"))
	if err != nil {
		t.Fatal(err)
	}
	server := exec.Command("../vllm/serve.sh", strconv.Itoa(port), "--api-server-count=1")
	server.Env = append(os.Environ(), "SEMMOE_VLLM_DIR="+*vllmDir)
	server.Stdout, server.Stderr = log, log
	server.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // each rank is a separate process
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	t.Cleanup(func() {
		_ = syscall.Kill(-server.Process.Pid, syscall.SIGKILL)
		<-ended
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("%s", text[max(0, len(text)-4000):])
		}
	})
	p := &peer{url: fmt.Sprintf("http://127.0.0.1:%d", port)}
	p.wait(t, vllmStart, ended)
	return p
}

// startDouble starts the double with the arguments of test/vllm/serve.sh.
func startDouble(t *testing.T) *peer {
	t.Helper()
	port := ports.Reserve(t)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, []string{
			vllmDialect, "vllm", "serve", tinyModel, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", strconv.Itoa(port),
			"--data-parallel-size", strconv.Itoa(ranks), "--enable-expert-parallel", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
			"--max-num-seqs", "8", "--api-server-count=1",
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the double ended with %v", err)
		}
	})
	p := &peer{url: fmt.Sprintf("http://127.0.0.1:%d", port)}
	p.wait(t, time.Minute, ended)
	return p
}

// wait waits until the server is healthy. It fails the test if the server ends.
func (p *peer) wait(t *testing.T, patience time.Duration, ended chan error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		if response, err := http.Get(p.url + "/health"); err == nil {
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
		sent.Header.Set("X-data-parallel-rank", r.rank)
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
		var failure struct {
			Error struct {
				Type string
				Code any
			}
		}
		if json.Unmarshal(data, &failure) == nil && failure.Error.Type != "" {
			a.Error, failed = fmt.Sprintf("%s, code %v", failure.Error.Type, failure.Error.Code), true
		}
	}
	if r.method == http.MethodPost && strings.HasPrefix(r.path, "/v1/") && r.path != "/v1/messages/count_tokens" && !failed {
		served := p.served(t, name, before)
		if rank, err := strconv.Atoi(strings.TrimSpace(r.rank)); err == nil && rank >= 0 && rank < ranks && r.path != "/v1/responses" {
			a.Rank = served
		}
	}
	if len(a.Form) == 0 {
		a.Form = nil
	}
	return a, string(text)
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

var successes = regexp.MustCompile(`(?m)^vllm:request_success_total\{(.*)\} (\S+)$`)
var engineLabel = regexp.MustCompile(`engine="(\d+)"`)

// counts returns the number of finished requests of each rank.
func (p *peer) counts(t *testing.T) map[string]float64 {
	t.Helper()
	counts := map[string]float64{}
	for _, sample := range successes.FindAllStringSubmatch(p.get(t, "/metrics"), -1) {
		value, err := strconv.ParseFloat(sample[2], 64)
		label := engineLabel.FindStringSubmatch(sample[1])
		if err != nil || label == nil {
			t.Fatalf("sample %q has no rank or no number", sample[0])
		}
		counts[label[1]] += value
	}
	return counts
}

// served waits until a rank has finished one more request than before, and returns the rank.
func (p *peer) served(t *testing.T, name string, before map[string]float64) string {
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

func (p *peer) get(t *testing.T, path string) string {
	t.Helper()
	response, err := http.Get(p.url + path)
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
	for _, match := range sample.FindAllStringSubmatch(p.get(t, "/metrics"), -1) {
		var labels []string
		for _, label := range labelName.FindAllStringSubmatch(match[2], -1) {
			labels = append(labels, label[1])
		}
		slices.Sort(labels)
		all[match[1]] = labels
	}
	return all
}
