// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/test/ports"
)

// vllmStart is the maximum start time of vLLM, which needs 60 s of CPU time per rank.
const vllmStart = 5 * time.Minute

// vllmSubject is the release that test/vllm/install.sh installs, started by test/vllm/serve.sh.
var vllmSubject = subject{
	dialect: "vllm-0.32.0",
	command: func(port string) []string {
		return []string{
			"vllm", "serve", tinyModel, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port,
			"--data-parallel-size", strconv.Itoa(ranks), "--enable-expert-parallel", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
			"--max-num-seqs", "8", "--api-server-count=1",
		}
	},
	requests: vllmRequests,
	start:    startVLLM,
	served:   regexp.MustCompile(`(?m)^vllm:request_success_total\{.*engine="(\d+)".*\} (\S+)$`),
}

// vllmRequests returns the requests that the double must answer like vLLM.
func vllmRequests() map[string]request {
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

		"chat, token ids": post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"func main() {"}],"max_tokens":4,"temperature":0,"return_token_ids":true}`),
		"completion, echo, logprobs": {
			method: http.MethodPost, path: "/v1/completions", body: completion(`,"echo":true,"logprobs":1`), generates: true,
			differs: map[string]string{".choices[].prompt_logprobs": "contains the rank of each token in the vocabulary, which the reference engine does not compute and no client reads"},
		},
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
	maps.Copy(all, completions())
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
			pinned.pinned = existing(rank) && r.path != "/v1/responses"
			all[fmt.Sprintf("%s, rank %q", name, rank)] = pinned
			if rank == "1" || rank == "2" {
				pinned.body = strings.TrimSuffix(r.body, "}") + `,"stream":true}`
				all[fmt.Sprintf("%s, streamed, rank %q", name, rank)] = pinned
			}
		}
	}
	return all
}

// startVLLM starts vLLM, waits until it serves, and returns its address.
func startVLLM(t *testing.T) string {
	t.Helper()
	if *vllmDir == "" {
		t.Skip("needs -args -vllm: run make test-vllm")
	}
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
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	wait(t, url, vllmStart, ended)
	return url
}
