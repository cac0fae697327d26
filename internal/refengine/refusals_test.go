// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

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
		"prompt in many lists": {"/v1/completions", `{"prompt":[[["a"]]]}`, 400, "string or a list of token ids", nil},
		"prompt is object":     {"/v1/completions", `{"prompt":{}}`, 400, "string or a list of token ids", nil},
		"token too large":      {"/v1/completions", `{"prompt":[1,4096]}`, 400, "token 1 of the prompt is 4096; allowed is 0 to 4095", nil},
		"negative token":       {"/v1/completions", `{"prompt":[-1]}`, 400, "allowed is 0 to 4095", nil},
		"prompt too long":      {"/v1/completions", map[string]any{"prompt": long}, 400, "tokens) is longer than the model's context length (256 tokens).", nil},
		"too many tokens":      {"/v1/completions", `{"prompt":[1],"max_tokens":256}`, 400, "exceeds the model's maximum context length of 256 tokens. You requested a total of 257 tokens: 1 tokens from the input messages and 256 tokens for the completion.", nil},
		"negative max_tokens":  {"/v1/completions", `{"prompt":[1],"max_tokens":-1}`, 400, "max_tokens is -1", nil},
		"max_tokens a string":  {"/v1/completions", `{"prompt":[1],"max_tokens":"5"}`, 400, "max_tokens has the wrong type: string, want an integer", nil},
		"unknown model":        {"/v1/completions", `{"model":"gpt","prompt":[1]}`, 404, `"gpt" does not exist; this engine serves "tiny"`, nil},
		"temperature":          {"/v1/completions", `{"prompt":[1],"temperature":-0.1}`, 400, "temperature is -0.1", nil},
		"top_p":                {"/v1/completions", `{"prompt":[1],"top_p":0}`, 400, "top_p is 0", nil},
		"top_k":                {"/v1/completions", `{"prompt":[1],"top_k":-2}`, 400, "top_k is -2", nil},
		"n":                    {"/v1/completions", `{"prompt":[1],"n":2}`, 400, "n 2 is not supported", nil},
		"echo":                 {"/v1/completions", `{"prompt":[1],"echo":1}`, 400, "echo has the wrong type: number, want true or false", nil},
		"messages an object":   {"/v1/chat/completions", `{"messages":{}}`, 400, "messages has the wrong type: object, want a list", nil},
		"options a string":     {"/v1/completions", `{"prompt":[1],"stream_options":"x"}`, 400, "stream_options has the wrong type: string, want an object", nil},
		"temperature a list":   {"/v1/completions", `{"prompt":[1],"temperature":[]}`, 400, "temperature has the wrong type: array, want a number", nil},
		"user without content": {"/v1/chat/completions", `{"messages":[{"role":"user","content":null}]}`, 400, "message 0 has no content", nil},
		"logprob_start_len":    {"/generate", `{"input_ids":[1,2],"return_logprob":true,"logprob_start_len":3}`, 400, "logprob_start_len is 3; allowed is -1 to 2", nil},
		"penalty":              {"/v1/completions", `{"prompt":[1],"presence_penalty":0.5}`, 400, "presence_penalty", nil},
		"empty stop":           {"/v1/completions", `{"prompt":[1],"stop":[""]}`, 400, "stop has an empty string", nil},
		"stop is a number":     {"/v1/completions", `{"prompt":[1],"stop":3}`, 400, "stop must be a string or a list", nil},
		"logprobs":             {"/v1/completions", `{"prompt":[1],"logprobs":99}`, 400, "logprobs is 99; allowed is 0 to 20", nil},
		"routes not enabled":   {"/v1/completions", `{"prompt":[1],"return_routed_experts":true}`, 400, "--enable-return-routed-experts", nil},
		"rank no integer":      {"/v1/completions", `{"prompt":[1]}`, 400, `"one"; it must be an integer`, []string{"X-Data-Parallel-Rank", "one"}},
		"rank too large":       {"/v1/completions", `{"prompt":[1]}`, 400, "X-Data-Parallel-Rank is 4; allowed is 0 to 3", []string{"X-Data-Parallel-Rank", "4"}},
		"negative rank":        {"/v1/completions", `{"prompt":[1]}`, 400, "is -1; allowed is 0 to 3", []string{"X-Data-Parallel-Rank", "-1"}},
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
	// Unknown fields, and unsupported fields with a value that disables them, are no error.
	var c completion
	e.post(t, "/v1/completions", `{"prompt":[1],"max_tokens":0,"user":"me","unknown":{},"n":1,"echo":false,"best_of":null,"presence_penalty":0,"logit_bias":{},"stop":null}`).into(t, &c)
	if c.Choices[0].Text != "" || c.Usage.CompletionTokens != 0 {
		t.Errorf("max_tokens 0 gives %+v", c)
	}
}

func TestOptionsThatContradict(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Options)
		want   []string
	}{
		"no model":          {func(o *Options) { o.ModelPath = "" }, []string{"--model-path"}},
		"tp and ep":         {func(o *Options) { o.TPSize = 2 }, []string{"--tp-size 2", "--ep-size 1"}},
		"dp and ep":         {func(o *Options) { o.TPSize, o.EPSize, o.DPSize, o.EnableDPAttention = 4, 4, 2, true }, []string{"--dp-size 2", "--ep-size 4"}},
		"nodes and devices": {func(o *Options) { fourRanks(o); o.Nodes, o.DistInitAddr = 3, "h:1" }, []string{"--tp-size 4", "--nnodes 3"}},
		"no meeting point":  {func(o *Options) { fourRanks(o); o.Nodes = 2 }, []string{"--dist-init-addr", "--nnodes 2"}},
		"node beyond":       {func(o *Options) { fourRanks(o); o.Nodes, o.NodeRank = 2, 2 }, []string{"--node-rank is 2", "0 to 1"}},
		"dp without flag":   {func(o *Options) { o.DPSize = 2 }, []string{"--dp-size 2", "--enable-dp-attention"}},
		"ep does not fit":   {func(o *Options) { o.TPSize, o.EPSize = 3, 3 }, []string{"3", "32 experts", "1, 2, 4, 8, 16, 32"}},
		"redundant":         {func(o *Options) { o.TPSize, o.EPSize, o.RedundantExperts = 3, 3, 3 }, []string{"size 3", "35 slots"}},
		"map":               {func(o *Options) { o.InitExpertLocation = "{}" }, []string{"--init-expert-location", "physical_to_logical_map"}},
		"context too long":  {func(o *Options) { o.ContextLength = 4096 }, []string{"4096", "2048"}},
		"no thread":         {func(o *Options) { o.Threads = 0 }, []string{"--threads is 0"}},
		"negative port":     {func(o *Options) { o.Port = -1 }, []string{"--port is -1"}},
		"no such model":     {func(o *Options) { o.ModelPath = "testdata/none" }, []string{"testdata/none does not exist"}},
		"no such dispatch":  {func(o *Options) { o.DispatchAlgorithm = "fake" }, []string{`--ep-dispatch-algorithm is "fake"`, "static"}},
		"no such exchange":  {func(o *Options) { o.AllToAllBackend = "x" }, []string{`--moe-a2a-backend is "x"`, "none, deepep"}},
		"keys of trtllm":    {func(o *Options) { o.APIKeys, o.Dialect = []string{"a"}, "tensorrt-llm-1.3.0" }, []string{"--api-key", "tensorrt-llm-1.3.0"}},
		"empty key":         {func(o *Options) { o.APIKeys = []string{""} }, []string{"--api-key is empty"}},
		"endless steps":     {func(o *Options) { o.Fault = FaultSlowSteps + "2m" }, []string{`--fault is "slow-steps:2m"`, "at most 1m0s"}},
		"no such fault":     {func(o *Options) { o.Fault = "x" }, []string{`--fault is "x"`, FaultIgnoreMapAtDispatch, FaultSlowExpertMap}},
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

// TestNoGoTypesInErrors sends wrong types in all members of requests: no error message contains the name of a Go type.
func TestNoGoTypesInErrors(t *testing.T) {
	e := start(t, nil)
	for route, members := range map[string][]string{
		"/v1/completions":      {"prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs", "echo", "model"},
		"/v1/chat/completions": {"messages", "max_completion_tokens", "logprobs", "top_logprobs"},
		"/v1/messages":         {"messages", "system", "stop_sequences", "max_tokens"},
		"/v1/responses":        {"input", "instructions", "max_output_tokens", "background"},
		"/generate":            {"text", "input_ids", "sampling_params", "return_logprob"},
		"/tokenize":            {"prompt", "messages"},
	} {
		for _, member := range members {
			for _, value := range []string{`{"a":1}`, `[{"a":1}]`, `[[["a"]]]`, `"x"`, `1.5`, `true`} {
				got := e.post(t, route, `{"model":"tiny","`+member+`":`+value+`}`)
				for _, word := range []string{"Go ", "server.", " struct", "Request.", "arameters.", "int32", "float64", "[]", "*int", "map["} {
					if strings.Contains(string(got.body), word) && !strings.Contains(string(got.body), `"object":`) {
						t.Errorf("%s with %s %s: %q in %s", route, member, value, word, got.body)
					}
				}
			}
		}
	}
}

// TestToolCallsInHistory sends a conversation in which an assistant has called a tool: its content is null or absent.
func TestToolCallsInHistory(t *testing.T) {
	e := start(t, nil)
	conversation := func(assistant string) string {
		return `{"max_tokens":4,"temperature":0,"messages":[{"role":"user","content":"func"},{"role":"assistant"` + assistant +
			`,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"call_1","content":"3"}]}`
	}
	var want string
	for _, content := range []string{`,"content":""`, `,"content":null`, ``} {
		got := e.post(t, "/v1/chat/completions", conversation(content))
		var answer struct {
			Choices []struct{ Message struct{ Content string } }
		}
		if err := json.Unmarshal(got.body, &answer); err != nil || got.status != http.StatusOK || len(answer.Choices) != 1 {
			t.Fatalf("%s: %d %s", content, got.status, got.body)
		}
		if want == "" {
			want = answer.Choices[0].Message.Content
		}
		if answer.Choices[0].Message.Content != want {
			t.Errorf("%s: %q, want %q", content, answer.Choices[0].Message.Content, want)
		}
	}
}

// TestAPIKeys checks which routes of each dialect need a key.
func TestAPIKeys(t *testing.T) {
	const keys = "first second"
	for dialect, test := range map[string]struct{ guarded, open []string }{
		"":              {[]string{"/v1/models", "/v1/completions", "/tokenize", "/generate"}, []string{"/health", "/metrics"}},
		"sglang-0.5.23": {[]string{"/v1/models", "/v1/completions", "/tokenize", "/server_info", "/nothing"}, []string{"/health", "/health_generate", "/metrics"}},
		"vllm-0.32.0":   {[]string{"/v1/models", "/v1/completions", "/v1/nothing"}, []string{"/health", "/version", "/metrics", "/tokenize"}},
	} {
		t.Run(dialect, func(t *testing.T) {
			e := start(t, func(o *Options) { o.Dialect, o.EnableMetrics, o.APIKeys = dialect, true, strings.Fields(keys) })
			for _, route := range append(test.guarded, test.open...) {
				for _, header := range []string{"", "Bearer other", "Bearer", "first", "Bearer first", "bearer second", "Basic first"} {
					right := strings.EqualFold(header, "Bearer first") || strings.EqualFold(header, "Bearer second")
					request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, e.url+route, nil)
					if err != nil {
						t.Fatal(err)
					}
					if header != "" {
						request.Header.Set("Authorization", header)
					}
					response, err := http.DefaultClient.Do(request)
					got := read(t, response, err)
					refused := got.status == http.StatusUnauthorized && strings.TrimSpace(string(got.body)) == `{"error":"Unauthorized"}`
					if want := slices.Contains(test.guarded, route) && !right; refused != want {
						t.Errorf("%s with %q: %d %s, refused is %t, want %t", route, header, got.status, got.body, refused, want)
					}
				}
			}
		})
	}
}

// TestUnknownModelType checks that a checkpoint of an unknown type is refused, unless the user states its type, and
// answers like the checkpoint of that type.
func TestUnknownModelType(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(tinyModel)); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, bytes.Replace(text, []byte(`"qwen3_moe"`), []byte(`"acme_moe"`), 1), 0o644); err != nil {
		t.Fatal(err)
	}
	o := DefaultOptions()
	o.ModelPath = dir
	if _, err := load(o); err == nil || !strings.Contains(err.Error(), "acme_moe") {
		t.Errorf("an unknown type: %v", err)
	}
	o.LayoutAs = "mixtral"
	if _, err := load(o); err == nil || !strings.Contains(err.Error(), "mixtral") {
		t.Errorf("another type: %v", err)
	}
	o.LayoutAs = "qwen3_moe"
	if _, err := load(o); err != nil {
		t.Error(err)
	}
}
