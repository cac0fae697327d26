// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// checkedProxy serves a router with pin checks in front of the reference engine.
func checkedProxy(t *testing.T, address string) (string, *Observations) {
	t.Helper()
	pool := checkedPool(t, discovery.Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", Shape: &planstest.Shape, Engine: "SGLang"})
	return proxyServer(t, pool, ProxyOptions{RoutedExperts: adapterOf(t, "SGLang").RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
}

// TestMessages checks that Messages requests go to the rank that the router reports, regardless of what the client asks
// for, and are answered like chat completions of the same conversation, with and without streaming. They are not
// sampled because their responses contain no experts.
func TestMessages(t *testing.T) {
	address := startReferenceEngine(t, locality.Trivial)
	url, observed := checkedProxy(t, address)
	var chat struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
	}
	ranks := map[string]bool{}
	for i := range 6 {
		turns := fmt.Sprintf(`{"role":"user","content":"SELECT name FROM users %d"}`, i)
		if err := json.Unmarshal([]byte(fetch(t, "http://"+address+"/v1/chat/completions", `{"messages":[{"role":"system","content":"be brief"},`+turns+`],"max_tokens":8}`)), &chat); err != nil {
			t.Fatal(err)
		}
		want := chat.Choices[0].Message.Content
		for _, stream := range []bool{false, true} {
			before := engineRanks(t, address)
			body := fmt.Sprintf(`{"model":"tiny","system":[{"type":"text","text":"be brief"}],"messages":[%s],"max_tokens":8,"stream":%t,"routed_dp_rank":3,"metadata":{"user_id":"u"}}`, turns, stream)
			request, err := http.NewRequest(http.MethodPost, url+"/v1/messages", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			request.Header.Set(rankHeader, "3")
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(response.Body)
			response.Body.Close()
			if err != nil || response.StatusCode != http.StatusOK {
				t.Fatalf("%s: %s, %v", response.Status, text, err)
			}
			served, _ := rankBetween(t, before, engineRanks(t, address))
			if got := response.Header.Get(HeaderRank); got != served {
				t.Errorf("rank %q is reported, %s has served", got, served)
			}
			ranks[served] = true
			if got := messageText(t, string(text), stream); got != want {
				t.Errorf("stream %t: %q, a chat completion is %q", stream, got, want)
			}
		}
	}
	if len(ranks) < 2 {
		t.Errorf("all messages went to rank %v", ranks)
	}
	if seen := observed.recent(); len(seen) != 0 {
		t.Errorf("observed %+v", seen)
	}
	if served := servedBy(t, observed)["r"]; served.Requests != 12 || served.Answer.N != 6 || served.FirstToken.N != 6 || served.InterToken.N != 6 {
		t.Errorf("served %+v, want the times of 6 answers in one piece and 6 streams", served)
	}
	if response, text := post(t, url+"/v1/messages/count_tokens", `{"model":"tiny","messages":[{"role":"user","content":"a"}]}`); response.StatusCode != http.StatusOK || !strings.Contains(text, `"input_tokens"`) {
		t.Errorf("count_tokens: %s: %s", response.Status, text)
	}
}

// messageText returns the text of a message, from one response or from events.
func messageText(t *testing.T, answer string, stream bool) string {
	t.Helper()
	type block struct {
		Text string `json:"text"`
	}
	if !stream {
		var whole struct {
			Content    []block `json:"content"`
			StopReason string  `json:"stop_reason"`
		}
		if err := json.Unmarshal([]byte(answer), &whole); err != nil || len(whole.Content) != 1 || whole.StopReason != "max_tokens" {
			t.Fatalf("%s, %v", answer, err)
		}
		return whole.Content[0].Text
	}
	var text string
	var names []string
	for _, event := range strings.Split(strings.TrimSpace(answer), "\n\n") {
		head, data, _ := strings.Cut(event, "\ndata: ")
		var body struct {
			Type  string `json:"type"`
			Delta block  `json:"delta"`
		}
		if err := json.Unmarshal([]byte(data), &body); err != nil || head != "event: "+body.Type {
			t.Fatalf("event %q, %v", event, err)
		}
		text += body.Delta.Text
		names = append(names, body.Type)
	}
	if got := slices.Compact(names); !slices.Equal(got, []string{"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"}) {
		t.Errorf("events %v", got)
	}
	return text
}

// TestTimesOfNamedEvents checks that the first token of a stream is its first delta, and that other events do not count
// as tokens.
func TestTimesOfNamedEvents(t *testing.T) {
	for path, events := range map[string][]string{
		"/v1/messages":  {"message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop", "message_delta", "message_stop"},
		"/v1/responses": {"response.created", "response.in_progress", "response.output_item.added", "response.output_text.delta", "response.output_text.delta", "response.output_text.done", "response.completed"},
	} {
		clock := &testClock{}
		engine := newEngine(t, "a", 0, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for _, event := range events {
				fmt.Fprintf(w, "event: %s\ndata: {}\n\n", event)
			}
		})
		engine.Revision = "a"
		url, observations := proxyServer(t, newPool(engine), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
		observations.now = clock.now
		fetch(t, url+path, "{}")
		want := lar.Service{Requests: 1, FirstToken: of(0), InterToken: of(0)}
		eventually(t, path+": the request is counted", func() bool { return servedBy(t, observations)["a"] == want })
	}
	// Time passes before the first delta and between deltas.
	clock, next := &testClock{}, make(chan struct{})
	engine := newEngine(t, "a", 0, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, event := range []string{"message_start", "content_block_delta", "content_block_delta", "message_delta"} {
			fmt.Fprintf(w, "event: %s\ndata: {}\n\n", event)
			w.(http.Flusher).Flush()
			<-next
		}
	})
	engine.Revision = "a"
	url, observations := proxyServer(t, newPool(engine), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
	observations.now = clock.now
	response, err := http.Post(url+"/v1/messages", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	events := bufio.NewReader(response.Body)
	for range 4 {
		for range 3 {
			if _, err := events.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
		clock.pass(2)
		next <- struct{}{}
	}
	io.Copy(io.Discard, events) //nolint:errcheck // its end is counted
	want := lar.Service{Requests: 1, FirstToken: of(2), InterToken: of(2)}
	eventually(t, "the stream is counted", func() bool { return servedBy(t, observations)["a"] == want })
}

// TestMessagesAreScoredAsChats checks that under a plan, a message is scored like a chat completion with the same texts
// and goes to the same rank.
func TestMessagesAreScoredAsChats(t *testing.T) {
	first, _ := solved(t)
	for want := range 4 {
		p := favouring(t, first, want)
		backend := newEngine(t, "a", 4, func(http.ResponseWriter, *http.Request) {})
		backend.Engine, backend.PlanDigest = "SGLang", p.layout.Digest
		pool := newPool(backend)
		pool.AddLayout(p.layout)
		url, _ := proxyServer(t, pool, ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
		for path, body := range map[string]string{
			"/v1/chat/completions": `{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"SELECT name FROM users"}],"max_tokens":1}`,
			"/v1/messages":         `{"system":"be brief","messages":[{"role":"user","content":[{"type":"text","text":"SELECT name FROM users"}]}],"max_tokens":1}`,
		} {
			response, _ := post(t, url+path, body)
			if response.Header.Get(HeaderPlan) == "" || response.Header.Get(HeaderRank) != fmt.Sprint(want) {
				t.Errorf("%s: rank %s by plan %q, want rank %d by a plan", path, response.Header.Get(HeaderRank), response.Header.Get(HeaderPlan), want)
			}
		}
	}
	var chat, message *request
	chat = requestOf("/v1/chat/completions", "r", []byte(`{"messages":[{"content":"s"},{"content":"a"}],"max_tokens":100}`))
	message = requestOf("/v1/messages", "r", []byte(`{"system":"s","messages":[{"content":"a"}],"max_tokens":100}`))
	if diff := cmp.Diff(chat.prompt, message.prompt); diff != "" || message.output != 100 {
		t.Errorf("%d tokens of output, prompt (-chat +message):\n%s", message.output, diff)
	}
	if response := requestOf("/v1/responses", "r", []byte(`{"instructions":"s","input":"a","max_output_tokens":100}`)); response.output != 100 || !response.inference || response.reportsExperts {
		t.Errorf("%+v", response)
	}
}

// TestErrorsOfMessages checks that errors of the Messages API have its format, from the router and from the engine,
// with the proxy and with a gateway.
func TestErrorsOfMessages(t *testing.T) {
	gatewaytest.NoLeaks(t)
	url, _ := checkedProxy(t, startReferenceEngine(t, locality.Trivial))
	empty, _ := proxyServer(t, newPool(), ProxyOptions{MaxBodyBytes: 100, EndpointWait: time.Millisecond})
	for name, tc := range map[string]struct {
		url, body string
		code      int
		kind      string
	}{
		"no pod":      {empty, `{}`, 503, "overloaded_error"},
		"too large":   {empty, strings.Repeat(" ", 101), 413, "request_too_large"},
		"a rank":      {url, `{"dp_rank":NaN}`, 400, "invalid_request_error"},
		"no model":    {url, `{"messages":[{"role":"user","content":"a"}],"max_tokens":1}`, 400, "invalid_request_error"},
		"wrong model": {url, `{"model":"gpt","messages":[{"role":"user","content":"a"}],"max_tokens":1}`, 404, "not_found_error"},
		"no limit":    {url, `{"model":"tiny","messages":[{"role":"user","content":"a"}]}`, 400, "invalid_request_error"},
		"no JSON":     {url, `{`, 400, "invalid_request_error"},
	} {
		response, text := post(t, tc.url+"/v1/messages", tc.body)
		var got struct {
			Type  string
			Error struct{ Type, Message string }
		}
		if err := json.Unmarshal([]byte(text), &got); err != nil || response.StatusCode != tc.code || got.Type != "error" || got.Error.Type != tc.kind || got.Error.Message == "" {
			t.Errorf("%s: %s: %s, %v; want %d, %s", name, response.Status, text, err, tc.code, tc.kind)
		}
	}
	gateway, _, _ := newPicker(t, newPool(), ProxyOptions{})
	stream := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
	stream.RequestHeaders(http.MethodPost, "/qwen/v1/messages", nil, true, nil)
	if code, _, body := stream.Refused(); code != 503 || !strings.Contains(body, `"type":"overloaded_error"`) || !strings.Contains(body, `"type":"error"`) {
		t.Errorf("by a gateway: %d, %s", code, body)
	}
}

// TestResponses checks that Responses requests go to the pod with the lowest load, where the engine picks the rank. No
// rank is reported or observed.
func TestResponses(t *testing.T) {
	address := startReferenceEngine(t, locality.Trivial)
	url, observed := checkedProxy(t, address)
	ranks := map[string]bool{}
	for i := range 8 {
		before := engineRanks(t, address)
		body := fmt.Sprintf(`{"model":"tiny","input":"text %d","max_output_tokens":3,"stream":%t,"routed_dp_rank":3}`, i, i%2 == 1)
		response, text := post(t, url+"/v1/responses", body)
		if response.StatusCode != http.StatusOK || response.Header.Get(HeaderRank) != "" || response.Header.Get(HeaderPod) != "p" || !strings.Contains(text, `"store":false`) {
			t.Fatalf("%s on rank %q: %s", response.Status, response.Header.Get(HeaderRank), text)
		}
		served, _ := rankBetween(t, before, engineRanks(t, address))
		ranks[served] = true
	}
	if len(ranks) != 4 {
		t.Errorf("the engine has served on ranks %v", ranks)
	}
	if seen, ignored := observed.recent(), observed.report().IgnoredRanks; len(seen) != 0 || len(ignored) != 0 {
		t.Errorf("observed %+v, ignored ranks %+v", seen, ignored)
	}
	if served := servedBy(t, observed)["r"]; served != (lar.Service{Requests: 8}) {
		t.Errorf("served %+v, want 8 requests without times", served)
	}
}

// TestRoutesThatEnginesLack checks that a route that an engine lacks is rejected with the reason. If pods of several
// engines serve, pods of engines with the route get the requests.
func TestRoutesThatEnginesLack(t *testing.T) {
	gatewaytest.NoLeaks(t)
	serve := func(engineType string, asked *atomic.Int32) discovery.Backend {
		backend := newEngine(t, engineType, 4, func(w http.ResponseWriter, _ *http.Request) { asked.Add(1) })
		backend.Engine = engineType
		return backend
	}
	for path, want := range map[string]map[string]bool{
		"/generate": {"SGLang": true}, "/v1/embeddings": {"SGLang": true, "VLLM": true, "VLLMAscend": true}, "/v2/embed": {"VLLM": true, "VLLMAscend": true}, "/v1/tokenize": {"SGLang": true}, "/tokenize": {"SGLang": true, "VLLM": true, "VLLMAscend": true},
		"/v1/completions": {"SGLang": true, "VLLM": true, "VLLMAscend": true, "TensorRTLLM": true},
		"/v1/messages":    {"SGLang": true, "VLLM": true, "VLLMAscend": true, "TensorRTLLM": true},
		"/v1/responses":   {"SGLang": true, "VLLM": true, "VLLMAscend": true, "TensorRTLLM": true},
		"/v1/detokenize":  {"SGLang": true},
	} {
		for _, engineType := range []string{"SGLang", "VLLM", "VLLMAscend", "TensorRTLLM"} {
			var asked atomic.Int32
			adapter := adapterOf(t, engineType)
			backend := discovery.Pinnable([]discovery.Backend{serve(engineType, &asked)}, &adapter)[0]
			url, _ := proxyServer(t, newPool(backend), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Minute})
			response, text := post(t, url+path, "{}")
			if served := response.StatusCode == http.StatusOK; served != want[engineType] || served != (asked.Load() > 0) || !served && (response.StatusCode != 404 || !strings.Contains(text, "POST "+path)) {
				t.Errorf("%s of %s: %s: %s", path, engineType, response.Status, text)
			}
			gateway, _, _ := newPicker(t, newPool(backend), ProxyOptions{})
			stream := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
			stream.RequestHeaders(http.MethodPost, path, nil, true, nil)
			if want[engineType] {
				stream.Picked()
			} else if code, _, body := stream.Refused(); code != 404 || !strings.Contains(body, "POST "+path) {
				t.Errorf("%s of %s by a gateway: %d, %s", path, engineType, code, body)
			}
		}
	}
	var native, other atomic.Int32
	url, _ := proxyServer(t, newPool(serve("SGLang", &native), serve("VLLM", &other)), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
	for range 8 {
		fetch(t, url+"/generate", `{"text":"a"}`)
	}
	if native.Load() != 8 || other.Load() != 0 {
		t.Errorf("SGLang got %d requests, vLLM %d", native.Load(), other.Load())
	}
}

// TestExplainsMissingRoutes checks that the generic "not found" of an engine release without a route is replaced by the
// reason, in the format of the API.
func TestExplainsMissingRoutes(t *testing.T) {
	gatewaytest.NoLeaks(t)
	for _, tc := range []struct{ path, answer, want string }{
		{"/v1/messages", `{"detail":"Not Found"}`, `{"error":{"message":"the engine of this service has no such route: POST /v1/messages","type":"not_found_error"},"type":"error"}`},
		{"/v1/responses", `{"detail":"Not Found"}`, `{"error":{"code":404,"message":"the engine of this service has no such route: POST /v1/responses","param":null,"type":"not_found"}}`},
		{"/v1/messages", `{"type":"error","error":{"type":"NotFoundError","message":"The model gpt does not exist."}}`, `{"type":"error","error":{"type":"NotFoundError","message":"The model gpt does not exist."}}`},
		{"/v1/completions", `{"text":"` + strings.Repeat("x", maxNotFoundBytes) + `","detail":"Not Found"}`, `{"text":"` + strings.Repeat("x", maxNotFoundBytes) + `","detail":"Not Found"}`},
	} {
		backend := newEngine(t, "a", 0, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, tc.answer) //nolint:errcheck // the client verifies the body
		})
		backend.Engine = "TensorRTLLM"
		pool := newPool(backend)
		url, _ := proxyServerOn(t, prometheus.NewRegistry(), pool, ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
		response, text := post(t, url+tc.path, "{}")
		if response.StatusCode != http.StatusNotFound || strings.TrimSpace(text) != tc.want {
			t.Errorf("%s: %s: %.200s; want %.200s", tc.path, response.Status, text, tc.want)
		}
		gateway, _, _ := newPicker(t, pool, ProxyOptions{})
		if _, text := throughGateway(t, gateway, tc.path, "{}", 1<<16); strings.TrimSpace(text) != tc.want {
			t.Errorf("%s by a gateway: %.200s; want %.200s", tc.path, text, tc.want)
		}
		if left := outstanding(pool); left != 0 {
			t.Errorf("%d tokens are outstanding", left)
		}
	}
}
