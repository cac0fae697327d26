// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// smallModel is a checkpoint that SGLang computes (test/models/README.md).
const smallModel = "../models/small-qwen3moe"

// sglangSubject is the release that was recorded on two GPUs, started by test/gpu/serve_sglang.sh.
var sglangSubject = subject{
	dialect: "sglang-0.5.17",
	command: func(port string) []string {
		return []string{
			"python3", "-m", "sglang.launch_server", "--model-path", smallModel, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port,
			"--tp-size", strconv.Itoa(ranks), "--ep-size", strconv.Itoa(ranks), "--dp-size", strconv.Itoa(ranks), "--enable-dp-attention",
			"--enable-return-routed-experts", "--enable-metrics", "--context-length", "1024", "--max-running-requests", "16",
		}
	},
	requests: sglangRequests,
	start:    findSGLang,
	// The double has no cache of prefixes.
	volatile: []string{".meta_info.cached_tokens_details"},
	served:   regexp.MustCompile(`(?m)^sglang:realtime_tokens_total\{.*dp_rank="(\d+)".*mode="prefill_compute".*\} (\S+)$`),
}

// findSGLang returns the address of the SGLang server that the flag names.
func findSGLang(t *testing.T) string {
	t.Helper()
	if *sglangURL == "" {
		t.Skip("needs two GPUs and -args -sglang: see docs/testing.md")
	}
	wait(t, *sglangURL, time.Minute, make(chan error))
	return *sglangURL
}

// native returns a request body for SGLang's own route.
func native(members string) string {
	return `{"text":"func main() {","sampling_params":{"max_new_tokens":3,"temperature":0}` + members + `}`
}

// sampled returns a request body for SGLang's own route with sampling parameters.
func sampled(parameters string) string {
	return `{"text":"func main() {","sampling_params":` + parameters + `}`
}

// serverInfo and loads are the compared members of long answers: those that the operator reads, and sizes.
var (
	serverInfo = []string{".version", ".model_path", ".served_model_name", ".tp_size", ".ep_size", ".dp_size", ".enable_dp_attention", ".internal_states"}
	loads      = []string{
		".timestamp", ".loads", ".loads[].dp_rank", ".loads[].timestamp", ".loads[].num_running_reqs", ".loads[].num_waiting_reqs", ".loads[].num_used_tokens",
		".loads[].num_total_tokens", ".loads[].max_total_num_tokens", ".loads[].token_usage", ".loads[].gen_throughput", ".loads[].max_running_requests",
	}
)

// sglangRequests returns the requests that the double must answer like SGLang.
func sglangRequests() map[string]request {
	long := strings.Repeat("func main() { ", 2000)
	all := map[string]request{
		"health":           get("/health"),
		"health generate":  get("/health_generate"),
		"models":           get("/v1/models"),
		"server info":      {method: "GET", path: "/server_info", reads: serverInfo},
		"old server info":  {method: "GET", path: "/get_server_info", reads: serverInfo},
		"loads":            {method: "GET", path: "/v1/loads", reads: loads},
		"no such page":     get("/nothing"),
		"no such route":    post("/inference/v1/generate", `{"text":"a"}`),
		"another method":   get("/v1/completions"),
		"tokenize":         post("/v1/tokenize", `{"model":"tiny","prompt":"func main() {"}`),
		"tokenize, old":    post("/tokenize", `{"model":"tiny","prompt":"func main() {"}`),
		"tokenize, list":   post("/v1/tokenize", `{"model":"tiny","prompt":["func","main"]}`),
		"tokenize, no one": post("/v1/tokenize", `{"prompt":"func"}`),
		"tokenize nothing": post("/v1/tokenize", `{"model":"tiny"}`),
		"tokenize other":   post("/v1/tokenize", `{"model":"other","prompt":"func"}`),
		"tokenize no JSON": post("/v1/tokenize", `{"model":`),

		"completion, experts":        post("/v1/completions", completion(`,"return_routed_experts":true`)),
		"completion, late experts":   post("/v1/completions", completion(`,"return_routed_experts":true,"routed_experts_start_len":2`)),
		"completion, echo, logprobs": post("/v1/completions", completion(`,"echo":true,"logprobs":1`)),
		"completion, unknown member": post("/v1/completions", completion(`,"anything":1`)),

		"chat, no messages":    post("/v1/chat/completions", `{"model":"tiny"}`),
		"chat, empty":          post("/v1/chat/completions", `{"model":"tiny","messages":[],"max_tokens":1}`),
		"chat, other model":    post("/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"a"}],"max_tokens":1}`),
		"chat, no JSON":        post("/v1/chat/completions", `{"model":`),
		"chat, too many":       post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":100000}`),
		"chat, too long":       post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"`+long+`"}],"max_tokens":1}`),
		"chat, no tokens":      post("/v1/chat/completions", strings.Replace(chat(""), `"max_tokens":3`, `"max_tokens":0`, 1)),
		"chat, no such member": post("/v1/chat/completions", chat(`,"anything":1`)),
		"chat, experts":        post("/v1/chat/completions", chat(`,"return_routed_experts":true`)),
		"chat, token ids":      post("/v1/chat/completions", chat(`,"return_token_ids":true`)),
		"chat, ids, streamed":  post("/v1/chat/completions", chat(`,"return_token_ids":true,"stream":true`)),
		"chat, in parts":       post("/v1/chat/completions", strings.Replace(chat(""), `"content":"func main() {"`, `"content":[{"type":"text","text":"func"}]`, 1)),

		"message, count":       post("/v1/messages/count_tokens", `{"model":"tiny","messages":[{"role":"user","content":"func"}]}`),
		"message, other model": post("/v1/messages", strings.Replace(chat(""), "tiny", "other", 1)),
		"message, no bound":    post("/v1/messages", `{"model":"tiny","messages":[{"role":"user","content":"func"}]}`),
		"message, no JSON":     post("/v1/messages", `{"model":`),
		"message, too long":    post("/v1/messages", `{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"`+long+`"}]}`),
		"message, system":      post("/v1/messages", chat(`,"system":"short"`)),
		"response, other":      post("/v1/responses", `{"model":"other","input":"func","max_output_tokens":1}`),
		"response, no input":   post("/v1/responses", `{"model":"tiny"}`),
		"response, no JSON":    post("/v1/responses", `{"model":`),
		"response, too long":   post("/v1/responses", `{"model":"tiny","max_output_tokens":1,"input":"`+long+`"}`),
		"response, not stored": get("/v1/responses/resp_1"),

		"native, PUT":            {method: "PUT", path: "/generate", body: native(""), generates: true},
		"native, ids":            post("/generate", `{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":2}}`),
		"native, both":           post("/generate", `{"text":"a","input_ids":[1,2,3]}`),
		"native, neither":        post("/generate", `{}`),
		"native, no JSON":        post("/generate", `{"text":`),
		"native, a list":         post("/generate", `[]`),
		"native, another type":   post("/generate", `{"text":7}`),
		"native, empty":          post("/generate", `{"text":"","sampling_params":{"max_new_tokens":1}}`),
		"native, too long":       post("/generate", `{"text":"`+long+`","sampling_params":{"max_new_tokens":1}}`),
		"native, too many":       post("/generate", sampled(`{"max_new_tokens":100000}`)),
		"native, no tokens":      post("/generate", sampled(`{"max_new_tokens":0}`)),
		"native, negative":       post("/generate", sampled(`{"max_new_tokens":-1}`)),
		"native, hot":            post("/generate", sampled(`{"max_new_tokens":1,"temperature":-1}`)),
		"native, top_p":          post("/generate", sampled(`{"max_new_tokens":1,"top_p":2}`)),
		"native, unknown":        post("/generate", sampled(`{"max_new_tokens":1,"anything":1}`)),
		"native, unknown member": post("/generate", native(`,"anything":1`)),
		"native, stop":           post("/generate", sampled(`{"max_new_tokens":24,"temperature":0,"stop":["e","a","t"," "]}`)),
		"native, experts":        post("/generate", native(`,"return_routed_experts":true`)),
		"native, logprobs":       post("/generate", native(`,"return_logprob":true`)),
		"native, all logprobs":   post("/generate", native(`,"return_logprob":true,"logprob_start_len":0,"top_logprobs_num":2`)),
		"native, late logprobs":  post("/generate", native(`,"return_logprob":true,"logprob_start_len":100`)),
	}
	// The ignored members of Responses: a rank that does not exist changes nothing.
	all["response, member 7"] = post("/v1/responses", `{"model":"tiny","input":"func","max_output_tokens":1,"routed_dp_rank":7}`)
	maps.Copy(all, completions())
	for name, r := range map[string]request{
		"completion": post("/v1/completions", completion("")),
		"chat":       post("/v1/chat/completions", chat("")),
		"message":    post("/v1/messages", chat("")),
		"response":   post("/v1/responses", `{"model":"tiny","input":"func main() {","max_output_tokens":3,"temperature":0}`),
		"native":     post("/generate", native("")),
		"invocation": post("/invocations", chat("")),
	} {
		all[name] = r
		with := func(members string) request {
			other := r
			other.body = strings.TrimSuffix(r.body, "}") + members + "}"
			return other
		}
		all[name+", streamed"] = with(`,"stream":true`)
		all[name+", streamed with usage"] = with(`,"stream":true,"stream_options":{"include_usage":true}`)
		all[name+", streamed with experts"] = with(`,"stream":true,"return_routed_experts":true`)
		deaf := r.path == "/generate" || r.path == "/v1/responses"
		for _, rank := range []string{"0", "1", "2", "-1", "one", "", " 1 ", "1.0"} {
			pinned := r
			pinned.rank, pinned.pinned = rank, existing(rank) && !deaf
			all[fmt.Sprintf("%s, rank %q", name, rank)] = pinned
			if rank == "1" || rank == "2" {
				pinned.body = with(`,"stream":true`).body
				all[fmt.Sprintf("%s, streamed, rank %q", name, rank)] = pinned
			}
		}
		for _, member := range []string{"routed_dp_rank", "data_parallel_rank"} {
			reads := r.path == "/generate" && member == "routed_dp_rank" || r.path == "/v1/completions" || r.path == "/v1/chat/completions" || r.path == "/invocations"
			for _, rank := range []string{"1", "2", `"1"`, "1.5", "null"} {
				pinned := with(fmt.Sprintf(`,"%s":%s`, member, rank))
				pinned.pinned = rank == "1" && reads
				all[fmt.Sprintf("%s, %s %s", name, member, rank)] = pinned
			}
		}
	}
	return all
}
